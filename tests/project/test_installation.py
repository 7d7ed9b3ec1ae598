"""The package as pip installs it: the wheel works by itself, and without any extra's packages."""

import os
import re
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from commands import run
from paths import ROOT

from eagle3_llama.common import extras
from eagle3_llama.runtime.library import find_lib_dir

EXTRAS = [
    "anthropic",
    "fastapi",
    "httpx",
    "huggingface_hub",
    "matplotlib",
    "openai",
    "playwright",
    "prometheus_client",
    "pytest",
    "ray",
]
EXTRAS += ["starlette", "torch", "uvicorn"]
# in front of all that is installed, where the editable installation's .pth files are not read
START = """import sys
sys.path[:0], sys.path[len(sys.path):] = {first!r}, {last!r}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""
GENERATES = """
import eagle3_llama
from eagle3_llama import EagleLlama
llm = EagleLlama({target!r}, eagle={head!r}, n_ctx=128, n_max=3, verbose=False)
list(zip(range(20), llm.generate([1, 5, 9], temp=0.0)))
print(eagle3_llama.__file__, llm.stats.drafted)
import llama_cpp.llama_cpp as c
print(c._lib._name)
"""


def python(code, place, *args, status=0, **env):
    """Runs code where the package in `place` is the only one, and no extra is installed."""
    last = [sysconfig.get_paths()[name] for name in ("purelib", "platlib")]
    start = START.format(first=[str(place)], last=last, absent=EXTRAS)
    env = {**os.environ, "EAGLE3_LLAMA_LIB_DIR": str(find_lib_dir()), **env}
    return run([sys.executable, "-S", "-c", start + code, *args], status, env=env, cwd="/")


@pytest.mark.parametrize(
    "args, said",
    [
        (["serve", "-m", "{target}"], "server"),
        (["train", "-m", "{target}", "--out", "{out}"], "train"),
        (["info", "hf:owner/repo"], "hub"),
    ],
)
def test_a_command_names_the_extra_that_it_needs(files, tmp_path, args, said):
    words = [a.format(target=files[0], out=tmp_path / "out") for a in args]
    code = "sys.argv[0] = 'eagle3-llama'\nfrom eagle3_llama.cli.main import main\nmain()"
    done = python(code, ROOT, *words, status=2)
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert re.search(rf"pip install -e '\.\[{said}\]' in|_env\.py --extra {said} in", done.stderr)
    assert not (tmp_path / "out").exists()


def test_the_command_keeps_a_checkout_installed_as_it_is(monkeypatch, tmp_path):
    """In a checkout's .venv, in another environment with a checkout, and where a copy is installed."""
    monkeypatch.setattr(sys, "prefix", str(ROOT / ".venv"))
    assert extras.command("hub") == f"python3 scripts/_env.py --extra hub in {ROOT}"
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert extras.command("hub") == f"pip install -e '.[hub]' in {ROOT}"
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "eagle3_llama" / "common" / "extras.py"))
    assert extras.command("hub").startswith("pip install '.[hub]'")


def test_the_version_that_the_page_installs_is_the_one_that_is_patched():
    page = (ROOT / "eagle3_llama/docs/use.md").read_text()
    wanted = re.search(r'"(llama-cpp-python==[\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert re.findall(r"llama-cpp-python==[\d.]+", page) == [wanted]


def test_without_extras(files):
    done = python(GENERATES.format(target=files[0], head=files[1]), ROOT)
    where, drafted = done.stdout.splitlines()[0].split()
    assert Path(where) == ROOT / "eagle3_llama" / "__init__.py" and int(drafted) > 3


@pytest.mark.thorough
def test_the_wheel(files, tmp_path):
    """pip builds it from the checkout. It carries the libraries, and needs nothing of the checkout."""
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # cmake, ninja
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        ROOT,
    ]
    run(command, env=env)
    [wheel] = tmp_path.glob("eagle3_llama-*.whl")
    assert "-py3-none-" in wheel.name and not wheel.name.endswith("-any.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as z:
        z.extractall(site)
    names = {p.relative_to(site).as_posix() for p in site.rglob("*") if p.is_file()}
    assert {"eagle3_llama/lib/eagle3.h", "eagle3_llama/docs/use.md"} <= names
    assert not [n for n in names if n.startswith(("tests/", "native/")) or "__pycache__" in n]
    assert not [n for n in names if "docs/" in n and not n.endswith(".md") or "measurements" in n]
    shipped = {p.name for p in find_lib_dir().iterdir() if p.name.startswith("lib")}
    assert shipped <= {Path(n).name for n in names}
    done = python(GENERATES.format(target=files[0], head=files[1]), site, EAGLE3_LLAMA_LIB_DIR="")
    (where, drafted), (library,) = (line.split() for line in done.stdout.splitlines()[:2])
    assert Path(where).is_relative_to(site) and int(drafted) > 3 and Path(library).is_relative_to(site)
