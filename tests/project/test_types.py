"""The rooms through which a token goes are typed strictly: mypy's settings say so, and no engine is Any."""

import ast

import pytest
from paths import ROOT

try:
    import tomllib
except ImportError:  # Python 3.10
    tomllib = pytest.importorskip("tomli")

ROOMS = ("runtime", "llama", "batching")
STRICT = {
    "check_untyped_defs",
    "disallow_any_generics",
    "disallow_incomplete_defs",
    "disallow_untyped_calls",
    "disallow_untyped_defs",
    "no_implicit_reexport",
    "warn_return_any",
}
FILES = [path for room in ROOMS for path in sorted((ROOT / "eagle3_llama" / room).glob("*.py"))]


def test_the_rooms_are_strict():
    (override,) = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"][
        "overrides"
    ]
    assert {f"eagle3_llama.{room}.*" for room in ROOMS} <= set(override["module"])
    assert {name for name in STRICT if override.get(name) is True} == STRICT


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_engine_or_batcher_is_any(path):
    """An argument that is one of ours has its type: with Any, nothing that is done with it is checked."""
    ours = {"engine", "batcher", "slot", "session", "job"}
    functions = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    ]
    arguments = [a for f in functions for a in (*f.args.args, *f.args.kwonlyargs) if a.arg in ours]
    assert not [a.arg for a in arguments if a.annotation is not None and ast.unparse(a.annotation) == "Any"]
