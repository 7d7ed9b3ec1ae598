"""install(): llama_cpp.Llama drafts, whoever makes it; and the snippets of the page on other libraries."""

import ast
import importlib.util
import os
import re
import sys

import pytest
import tiny_models
from commands import run
from paths import ROOT
from tiers import each

from eagle3_llama.runtime.library import find_lib_dir

PAGE = (ROOT / "eagle3_llama/docs/libraries.md").read_text()
SNIPPETS = {
    section.partition("\n")[0]: code
    for section in re.split(r"^#+ ", PAGE, flags=re.MULTILINE)
    for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL)
}
SAYS = """
def says(llm):
    llm("abc", max_tokens=8)
    print(type(llm).__name__, llm.stats.drafted if hasattr(llm, "stats") else None)
"""
LOAD = 'Llama("target.gguf", n_ctx=256, verbose=False{})'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("installed")
    words = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tiny_models.target(path / "target.gguf", chat_template=words)
    tiny_models.head(path / "head.gguf")
    return path


def python(folder, *words, code=0, **env):
    done = run([sys.executable, *words], code, cwd=folder, env={**os.environ, **env})
    return done.stdout, done.stderr


HEAD = "eagle3_llama.install('head.gguf', n_max=2)"
WAYS = {
    "before": f"import eagle3_llama; {HEAD}; from llama_cpp import Llama",
    "after": f"import eagle3_llama; from llama_cpp import Llama; {HEAD}",
    "elsewhere": f"import eagle3_llama; {HEAD}; os.chdir('/'); import llama_cpp; Llama = llama_cpp.Llama",
    "by the environment": "import eagle3_llama; eagle3_llama.install(n_max=2); from llama_cpp import Llama",
    "given": "import eagle3_llama; eagle3_llama.install(n_max=2); from llama_cpp import Llama",
    "wrapped by a tracer": (
        "import functools; from llama_cpp import Llama; own = Llama.__init__; "
        "Llama.__init__ = functools.wraps(own)(lambda self, *a, **given: own(self, *a, **given)); "
        f"import eagle3_llama; {HEAD}"
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_llama_is_ours_whenever_it_was_imported(folder, way):
    load = LOAD.format(", f16_kv=True" + ', head="head.gguf"' * (way == "given"))
    load = load.replace("target.gguf", str(folder / "target.gguf"))
    env = {"EAGLE3_LLAMA_HEAD": "head.gguf"} if way == "by the environment" else {}
    env |= {"LLAMA_CPP_LIB_PATH": str(find_lib_dir())} if "tracer" in way else {}
    out, err = python(folder, "-W", "error", "-c", f"import os\n{WAYS[way]}{SAYS}says({load})", **env)
    name, drafted = out.split()
    assert name == "InstalledLlama" and int(drafted) > 0, err


def test_what_is_left_alone(folder):
    """EagleLlama, subclasses of a program's own, a draft model, and a process without install()."""
    code = f"""import eagle3_llama
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
print(type({LOAD.format("")}).__name__)
{HEAD}
class Own(Llama): pass
for made in (Own, eagle3_llama.EagleLlama):
    print(type(made("target.gguf", n_ctx=256, verbose=False)).__name__)
print({LOAD.format(", draft_model=LlamaPromptLookupDecoding()")}._eagle_path)
"""
    assert python(folder, "-c", code)[0].split() == ["Llama", "Own", "EagleLlama", "None"]


def test_a_saved_model_has_its_settings(folder):
    code = f"""import pickle, eagle3_llama
{HEAD}
from llama_cpp import Llama
saved = pickle.dumps({LOAD.format("")})
eagle3_llama.install()
llm = pickle.loads(saved)
print(type(llm).__name__, llm._eagle_path.endswith("head.gguf"), llm.n_max)
"""
    assert python(folder, "-c", code)[0].split() == ["InstalledLlama", "True", "2"]


def test_what_has_no_drafts_is_told_once(folder):
    stock = f"import eagle3_llama\nfrom llama_cpp import Llama\nfor _ in range(2): {LOAD.format(', eagle=1')}"
    err = python(folder, "-c", stock)[1]
    assert err.count("llama_cpp.Llama ignores eagle") == 1 and "call eagle3_llama.install()" in err
    reads = f"import eagle3_llama\n{HEAD}\nfrom llama_cpp import Llama\nllm = {LOAD.format('')}\n"
    err = python(folder, "-c", f"{reads}llm('abc', max_tokens=4)\nfor _ in range(2): llm.ctx")[1]
    assert err.count("takes this model's context (ctx)") == 1, err
    assert "RuntimeWarning" not in python(folder, "-c", f"{reads}llm('abc', max_tokens=4)")[1]


@pytest.mark.parametrize(
    "call, kind, words",
    [
        ("install('no.gguf')", "bad_file", "no such file: no.gguf"),
        ("install('head.gguf', n_draft=3)", "bad_argument", "did you mean n_max?"),
        ("install('head.gguf', colour=3)", "bad_argument", "the settings are the arguments of EagleLlama"),
    ],
)
def test_what_cannot_be_installed(folder, call, kind, words):
    told = "except eagle3_llama.EagleError as e: print(e.kind.value, e)"
    code = f"import eagle3_llama\ntry: eagle3_llama.{call}\n{told}"
    out = python(folder, "-c", code)[0]
    assert out.startswith(kind) and words in out


def test_any_order_with_the_folder_named(folder):
    """The pages' cure, as the page's command prints it."""
    [ask] = re.findall(r"^find='(.+)'$", PAGE, re.MULTILINE)
    lib = python(folder, "-c", ask)[0].strip()
    code = f"import llama_cpp, eagle3_llama\n{HEAD}{SAYS}says(llama_cpp.{LOAD.format('')})"
    assert python(folder, "-W", "error", "-c", code, LLAMA_CPP_LIB_PATH=lib)[0].startswith("InstalledLlama")


PROGRAM = f"""import sys
from llama_cpp import Llama
import beside
{SAYS}
says({LOAD.format(", n_max=2")})
print(sys.argv)
"""


def test_a_program_that_knows_nothing_of_it(folder, tmp_path):
    """A script with its own folder and options, and a module."""
    (tmp_path / "beside.py").touch()
    (tmp_path / "program.py").write_text(PROGRAM)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    us = ("-m", "eagle3_llama", "--eagle", "head.gguf")
    script = str(tmp_path / "program.py")
    for words in ([script], ["-m", "program"]):
        out = python(folder, *us, *words, "--eagle", "x", PYTHONPATH=path)[0]
        said = re.fullmatch(r"InstalledLlama (\d+)\n\['(.+)', '--eagle', 'x'\]\n", out)
        assert said and int(said[1]) > 0 and said[2] == script, out


@pytest.mark.parametrize(
    "words, why",
    [
        ([], "name a script, or a module"),
        (["generate"], "there is no script 'generate': the commands are in eagle3-llama"),
        (["--eagle", "no.gguf", "-m", "this"], "no such file: no.gguf"),
    ],
)
def test_programs_that_cannot_be_run(folder, words, why):
    assert why in python(folder, "-m", "eagle3_llama", *words, code=2)[1]


def test_each_library_has_a_snippet():
    assert {name for name in SNIPPETS} == {
        *("In your libraries", "LangChain", "llama_cpp.server", "outlines", "guidance", "instructor"),
        *("LlamaIndex", "FastAPI", "Notebooks"),
    }


ASKED = {  # of the snippets that make an application
    "FastAPI": ("/ask", {"params": {"question": "abc"}}),
    "llama_cpp.server": ("/v1/completions", {"json": {"prompt": "abc", "max_tokens": 8}}),
}
CHECK = """
import gc
from eagle3_llama import EagleLlama
models = [x for x in gc.get_objects() if issubclass(type(x), EagleLlama)]
print("drafted", sum(llm.stats.drafted for llm in models), [llm._eagle_path for llm in models])
"""


def needed(code):
    """The modules that a snippet imports."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def is_there(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package around it
        return False


@pytest.mark.parametrize("name", each(SNIPPETS, ["In your libraries"]))
def test_snippets_draft(folder, name):
    """Each with the real library, and the tiny model, which has all a snippet names but sense."""
    code = SNIPPETS[name].replace('"head.gguf"', '"head.gguf", n_max=2')
    modules = {"starlette_context"} if name == "llama_cpp.server" else set(needed(code)) - {"llama_cpp"}
    if missing := sorted(module for module in modules if not is_there(module)):
        pytest.skip(f"needs {missing[0]}, in an environment of its own")
    if name in ASKED:
        pytest.importorskip("httpx")
        path, body = ASKED[name]
        code += "\nfrom fastapi.testclient import TestClient\n"
        code += f"answer = TestClient(app).post({path!r}, **{body!r})\n"
        code += "assert answer.is_success, answer.text\n"
    out, err = python(folder, "-c", code + CHECK)
    drafted, head = re.search(r"drafted (\d+) \['(.+)'\]", out).groups()
    assert head.endswith("head.gguf") and (int(drafted) > 0) == (name != "guidance"), out
    assert ("guidance takes this model's context" in err) == (name == "guidance")
