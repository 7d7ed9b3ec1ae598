"""Every module of the package imports alone, in a process that has imported none before it. Files and
functions are short, and no two classes have one name."""

import ast
import graphlib
import itertools
import json
import re
import sys
from importlib.metadata import requires
from importlib.util import resolve_name

import pytest
from commands import run
from paths import ROOT
from tiers import each

PACKAGE = ROOT / "eagle3_llama"
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}
PROGRAMS = {name for name in FILES if name.endswith(".__main__")}  # they run when they are imported

# A child process per module. It inherits other packages, which take seconds to import, but none of ours.
IMPORT_EACH = """
import importlib, json, os, sys, traceback
for name in ("gguf", "numpy", "rich", "typer", "torch", "fastapi", "cffi"):
    try:
        importlib.import_module(name)
    except ImportError:
        pass
for name in sys.argv[1:]:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        why = {"error": ""}
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as e:
            why = {"error": traceback.format_exc(), "missing": e.name}
        except BaseException:
            why = {"error": traceback.format_exc()}
        print(json.dumps([name, why]), flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status != 0:
        print(json.dumps([name, {"error": f"the process ended with {status}"}]))
"""


@pytest.fixture(scope="module")
def outcomes(request):
    """What importing each module came to: its error, "" for none, and the package that was missing.

    Of those that the run asks for: each takes a process.
    """
    asked = [
        i.callspec.params["name"] for i in request.session.items if i.name.startswith("test_imports_alone[")
    ]
    names = [name for name in FILES if name in asked]
    done = run([sys.executable, "-c", IMPORT_EACH, *names], cwd=ROOT)
    return dict(json.loads(line) for line in done.stdout.splitlines())


def optional():
    """Packages that only an extra of pyproject.toml installs."""
    return {
        re.split(r"[^\w-]", wanted, maxsplit=1)[0]
        for wanted in requires("eagle3-llama")
        if "extra ==" in wanted
    }


# those that are packages import most of the others; test_no_cycles looks at all
@pytest.mark.parametrize(
    "name", each(sorted(set(FILES) - PROGRAMS), lambda name: FILES[name].name == "__init__.py")
)
def test_imports_alone(outcomes, name):
    outcome = outcomes[name]
    if outcome.get("missing") in optional():
        pytest.skip(f"{outcome['missing']} is not installed")
    assert not outcome["error"], outcome["error"]


def imports_of(name):
    """Modules of ours that this one imports at its top level: not those that its functions import."""
    package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in at_import(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (wanted for alias in node.names for wanted in chain(alias.name, name))
        elif isinstance(node, ast.ImportFrom):
            source = (
                resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module
            )
            below = {f"{source}.{alias.name}" for alias in node.names} & set(FILES)
            named = {source} if any(f"{source}.{alias.name}" not in FILES for alias in node.names) else set()
            yield from (wanted for each in below | named for wanted in chain(each, name))


def at_import(tree):
    """The statements that run with the module."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        yield from at_import(node)


def chain(wanted, by):
    """A module of ours and the packages around it, which run before it; those around `by` run already."""
    parts = wanted.split(".")
    around = {".".join(parts[:i]) for i in range(1, len(parts))}
    return [
        each
        for each in {wanted} | {a for a in around if not f"{by}.".startswith(f"{a}.")}
        if each in FILES and each != by
    ]


def test_no_cycles():
    """A cycle works from one end only, and which one that is changes with every new import."""
    graph = {name: set(imports_of(name)) for name in FILES}
    assert graph["eagle3_llama.heads.info"] >= {"eagle3_llama.common.gguf_reader", "eagle3_llama.errors"}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as cycle:
        pytest.fail(" <- ".join(cycle.args[1]))


def test_no_cycles_by_types_or_within_functions():
    """Two files that name each other, be it for a type or in a function, can only be read together."""
    files = {name for name, path in FILES.items() if path.name != "__init__.py"}
    graph = {
        name: {
            module
            for wanted in imports_anywhere(name)
            for module in (wanted, wanted.rpartition(".")[0])
            if module in files and module != name
        }
        for name in files
    }
    assert sum(map(len, graph.values())) > 1000
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as cycle:
        pytest.fail(" <- ".join(cycle.args[1]))


LAYERS = (
    "errors",
    "common",
    "runtime",
    "models",
    "llama",
    "batching",
    "heads",
    "bench",
    "train",
    "server",
    "cli",
)  # each may import those before it


def imports_anywhere(name):
    """Modules of ours that `name` imports, within functions too."""
    package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = (
                resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module
            )
            yield from (f"{source}.{alias.name}" for alias in node.names)


def layer(module):
    parts = module.split(".")
    return (
        LAYERS.index(parts[1]) if parts[0] == "eagle3_llama" and len(parts) > 1 and parts[1] in LAYERS else -1
    )


def test_every_module_is_in_a_layer():
    assert {name for name in FILES if layer(name) < 0} == {"eagle3_llama", "eagle3_llama.__main__"}


def test_no_import_runs_upwards():
    upwards = [
        f"{name} imports {wanted}"
        for name in FILES
        for wanted in imports_anywhere(name)
        if name not in ("eagle3_llama", "eagle3_llama.__main__") and layer(wanted) > layer(name)
    ]
    assert not upwards, "\n".join(upwards)


LONGEST_FILE, LONGEST_FUNCTION = 350, 50  # lines
COMMANDS = {"serve", "train", "bench"}  # a line or two for each of their options


NATIVE = ("native/src", "native/kernels")


@pytest.mark.parametrize(
    "folder, suffix", [("eagle3_llama", ".py"), *itertools.product(NATIVE, (".cpp", ".hpp"))]
)
def test_files_are_short(folder, suffix):
    paths = list((ROOT / folder).rglob(f"*{suffix}"))
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in paths}
    assert lines and not {name: n for name, n in lines.items() if n > LONGEST_FILE}


def test_functions_are_short():
    long = {}
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                n = node.end_lineno - node.lineno + 1
                if n > LONGEST_FUNCTION and not (node.name in COMMANDS and "typer" in path.read_text()):
                    long[f"{name}.{node.name}"] = n
    assert not long


def cpp_functions(text):
    """(first line, number of lines) of each function of a C++ source that no other one is in."""

    def blank(match):
        return re.sub(r"[^\n]", " ", match[0])

    literal = r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'"
    text = re.sub(literal, blank, text, flags=re.DOTALL)
    text = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", blank, text, flags=re.MULTILINE)
    found, open_blocks = [], []  # of each block that is open: its start, and whether it is a scope of names
    for brace in re.finditer("[{}]", text):
        if brace[0] == "{":
            before = re.split("[;{}]", text[: brace.start()])[-1]
            is_scope = re.search(r"\b(namespace|struct|class|enum|union|extern)\b[^()]*$", before) is not None
            start = brace.start() - len(before.lstrip())
            open_blocks.append((start, is_scope, "(" in before))
            continue
        start, is_scope, has_parameters = open_blocks.pop()
        if has_parameters and not is_scope and all(scope for _, scope, _ in open_blocks):
            found.append((text[:start].count("\n") + 1, text[start : brace.end()].count("\n") + 1))
    assert not open_blocks, "braces that do not match"
    return found


def test_the_check_of_cpp_functions_sees_them():
    body = "    // } a brace\n    if (x) {\n        y('}', \"{\");\n    }\n"
    text = f"namespace a {{\nstruct b {{\n    int c() const {{\n{body}    }}\n}};\n}}\nvoid d() {{\n}}\n"
    assert cpp_functions(text) == [(3, 6), (11, 2)]


def test_functions_of_cpp_are_short():
    paths = [path for folder in NATIVE for path in (ROOT / folder).rglob("*") if path.is_file()]
    found = {str(path.relative_to(ROOT)): cpp_functions(path.read_text()) for path in paths}
    assert sum(map(len, found.values())) > 500
    long = {f"{name}:{line}": n for name, at in found.items() for line, n in at if n > LONGEST_FUNCTION}
    assert not long


def test_no_two_classes_have_one_name():
    where = {}
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(name)
    assert len(where) > 100 and not {name: at for name, at in where.items() if len(at) > 1}
