"""Every exception of the package passes between processes, and through copies, as it is."""

import ast
import builtins
import concurrent.futures
import copy
import importlib
import multiprocessing
import pickle

import pytest
from paths import ROOT

from eagle3_llama import EagleError, ErrorKind
from eagle3_llama.common.memory_size import parse_size

# what the constructors take that are not as those of EagleError or Exception
ARGUMENTS = {
    "ApiError": (418, "words", "field", "code", {"Retry-After": "5"}, {"n_ctx": 7}),
    "Crash": ("words",),
    "RequestCancelled": ("deadline",),
}


def exceptions():
    """(module, name) of every exception class of the package, by the names of its bases."""
    found, known = set(), {name for name in dir(builtins) if name.endswith(("Error", "Exception"))}
    classes = [
        (".".join(path.relative_to(ROOT).with_suffix("").parts), node)
        for path in (ROOT / "eagle3_llama").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    for _ in classes:  # until no class is new
        before = len(found)
        for module, node in classes:
            if known & {base.id for base in node.bases if isinstance(base, ast.Name)}:
                found.add((module, node.name))
                known.add(node.name)
        if len(found) == before:
            break
    return sorted(found)


@pytest.mark.parametrize("module, name", exceptions())
def test_copies(module, name):
    cls = getattr(importlib.import_module(module), name)
    usual = (ErrorKind.MEMORY, "words") if issubclass(cls, EagleError) else ("words",)
    error = cls(*ARGUMENTS.get(name, usual))
    error.more = ["what a caller adds"]
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is cls and again is not error
        assert str(again) == str(error) and again.args == error.args and vars(again) == vars(error)


def test_an_error_of_another_process():
    """A pool passes it on. It broke instead, and multiprocessing's own waited for ever."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        error = pool.submit(parse_size, "no size").exception(60)
    assert isinstance(error, EagleError) and error.kind is ErrorKind.BAD_ARGUMENT and "no size" in str(error)
