"""Packs the libraries of build_cuda.py into one small archive for a machine with a card and no network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "native"))

import _env
from fetch import patched_tree
from toolkit import BuildError, say

MOST_MEGABYTES = 60.0
WIDTHS = "widths_test"  # in native/tests
CUDA, CALLS = "libggml-cuda.so", "libcuda_calls.so"
# What run_on_card.py, eagle3_llama and llama_cpp import. NumPy is large, and comes with PyTorch.
PACKAGES = tuple(
    "cffi pycparser diskcache gguf tqdm pyyaml rich jinja2 markupsafe typing-extensions safetensors".split()
)
# pip compares the names of systems letter by letter
_SYSTEMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")


def pack(archive: Path, ours: Path, upstream: Path, python: str) -> float:
    """Writes `archive` and returns its size in megabytes. python: the version of the other machine's."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=archive.parent, prefix=".pack-") as tmp:
        top = Path(tmp) / "top"
        copy_libraries(ours, top / "lib")
        compile_calls(top / "lib" / CALLS)
        compile_widths(top / "lib")
        # of the compiler, found beside the others; systems without a compiler may lack it
        openmp = run(["g++", "-print-file-name=libgomp.so.1"]).strip()
        shutil.copy2(openmp, top / "lib")
        copy_libraries(upstream, top / "upstream")
        # compiled of the same files: one copy travels
        (top / "upstream" / CUDA).unlink(missing_ok=True)
        for name in (CUDA, Path(openmp).name):
            (top / "upstream" / name).symlink_to(f"../lib/{name}")
        python_packages(top / "python", python)
        say("packing")
        part = Path(tmp) / "archive"
        # 9: its window of 64 MB sees that both sets of libraries are nearly the same
        with tarfile.open(part, "w:xz", preset=9) as tar:
            tar.add(top, ".")
        os.replace(part, archive)
    return archive.stat().st_size / 1e6


def copy_libraries(source: Path, target: Path) -> None:
    """Libraries and programs without their symbols, and the small files beside them."""
    target.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        copy = Path(shutil.copy2(path, target))
        if path.suffix == ".so" or os.access(path, os.X_OK):
            run(["strip", "--strip-unneeded", str(copy)])


def compile_calls(target: Path) -> None:
    """The library that counts calls of NVIDIA's, for LD_PRELOAD."""
    source = str(Path(__file__).resolve().parent / "cuda_calls.c")
    run(["gcc", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", source, "-o", str(target), "-ldl"])


def compile_widths(libraries: Path) -> None:
    """The native test that prints which numbers of rows a device computes alike, beside these libraries."""
    tree, _ = patched_tree(os.environ.get("EAGLE3_LLAMA_CPP_DIR"))
    native = _env.ROOT / "native"
    folders = (native / "include", native / "tests", tree / "include", tree / "ggml" / "include")
    command = ["g++", "-std=c++17", "-O1", *(f"-I{folder}" for folder in folders)]
    command += [str(native / "tests" / f"{WIDTHS}.cpp"), "-o", str(libraries / WIDTHS), f"-L{libraries}"]
    command += [f"-l{name}" for name in ("eagle3", "llama", "ggml", "ggml-cpu", "ggml-base", "dl")]
    # NVIDIA's libraries are found where it runs
    run([*command, "-Wl,-rpath,$ORIGIN", "-Wl,--allow-shlib-undefined"])


def python_packages(target: Path, python: str) -> None:
    """Wheels for the other machine's Python, and llama-cpp-python's Python part as it is installed here."""
    say(f"downloading packages for Python {python}")
    command = [str(_env.PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--python-version", python, "--implementation", "cp"]
    command += [word for system in _SYSTEMS for word in ("--platform", system)]
    run([*command, "--no-compile", "--target", str(target), *PACKAGES])
    probe = "import importlib.util as u; print(u.find_spec('llama_cpp').submodule_search_locations[0])"
    folder = Path(run([str(_env.PYTHON), "-c", probe]).strip())
    shutil.copytree(folder, target / "llama_cpp", ignore=shutil.ignore_patterns("lib", "__pycache__"))


def run(command: list[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise BuildError(f"{command[0]} failed (see above)", done.stdout)
    return done.stdout
