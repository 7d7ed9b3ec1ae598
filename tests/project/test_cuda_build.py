"""scripts/device/build_cuda.py, as far as no compiler of NVIDIA's is needed: flags, checks, and what travels.

That building takes NVIDIA's compiler, half an hour and 480 MB: it is run by hand.
"""

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from commands import run
from paths import ROOT

sys.path.insert(0, str(ROOT / "native"))
sys.path.insert(0, str(ROOT / "scripts" / "device"))
import build_cuda
import fetch
import pack
import toolchain
import toolkit

from eagle3_llama.runtime import devices
from eagle3_llama.runtime.library import find_lib_dir

SCRIPT = ROOT / "scripts" / "device" / "build_cuda.py"


@functools.cache
def named(path, folders):
    """The files of the tree that this source includes."""
    found = re.findall(r'^\s*#\s*include\s+["<]([^">]+)[">]', path.read_text(), re.MULTILINE)
    places = [[path.parent / name, *(folder / name for folder in folders)] for name in found]
    return [next((p.resolve() for p in each if p.is_file()), None) for each in places]


def read_by(source, folders):
    """The same, directly or not, and the source itself."""
    found, left = set(), [source]
    while left:
        path = left.pop()
        if path is not None and path not in found:
            found.add(path)
            left += named(path, folders)
    return found


def test_a_changed_patch_does_not_compile_cuda_again():
    """The 144 CUDA files take half an hour. What patches touch of ggml's headers, two of them read."""
    tree = fetch.patched_tree(os.environ.get("EAGLE3_LLAMA_CPP_DIR"))[0].resolve()
    cuda = tree / "ggml" / "src" / "ggml-cuda"
    folders = (tree / "ggml" / "include", tree / "ggml" / "src", cuda)
    read = {source: read_by(source, folders) for source in cuda.rglob("*.cu")}
    assert len(read) > 140 and all(tree / "ggml" / "include" / "ggml.h" in files for files in read.values())
    patched = {
        tree / name
        for patch in fetch.PATCHES.glob("*.patch")
        for name in re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), re.MULTILINE)
    }
    assert len(patched) > 20 and not patched & {cuda / "CMakeLists.txt", tree / "ggml" / "CMakeLists.txt"}
    again = {source.name for source, files in read.items() if files & patched}
    assert again <= {"ggml-cuda.cu", "allreduce.cu"}


def test_flags_reach_the_build(tmp_path, monkeypatch):
    """Those of one architecture, as native/build.py reads them, and NVIDIA's libraries for its check."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    env = toolkit.environment(tmp_path, toolkit.options(tmp_path, "89"), 2)
    monkeypatch.setenv("CMAKE_ARGS", env["CMAKE_ARGS"])
    options = toolchain.cmake_options(False, toolchain.cmake_args())
    assert options["CMAKE_CUDA_ARCHITECTURES"] == "89-real" and options["GGML_CUDA_NO_VMM"] == "ON"
    assert options["CMAKE_CUDA_COMPILER"] == str(tmp_path / "bin" / "nvcc")
    assert env["LD_LIBRARY_PATH"] == f"{tmp_path / 'lib'}:/mine" and env["CMAKE_BUILD_PARALLEL_LEVEL"] == "2"
    other = toolkit.options(tmp_path, "90")
    assert toolchain.key(toolchain.cmake_options(False, other)) != toolchain.key(options)


def test_names_with_hyphens_are_understood():
    """CMake names a package's folder by the package's name."""
    found = toolchain.parse_defines(["-DSPIRV-Headers_DIR:PATH=/a", "-D", "B=1"], "CMAKE_ARGS")
    assert found == {"SPIRV-Headers_DIR": "/a", "B": "1"}


def test_a_build_without_cuda_is_refused(tmp_path):
    with pytest.raises(fetch.BuildError, match="has no libggml-cuda.so: the build had no CUDA"):
        build_cuda.check(tmp_path, dict(os.environ))


def test_libraries_that_do_not_load_are_told(tmp_path):
    (tmp_path / pack.CUDA).touch()
    with pytest.raises(fetch.BuildError, match="do not load") as told:
        build_cuda.check(tmp_path, dict(os.environ))
    assert "libeagle3" in told.value.log


def test_libraries_that_load_are_told_with_their_devices(tmp_path, capsys):
    """This machine's libraries stand for those with CUDA."""
    shutil.copytree(find_lib_dir(), tmp_path / "ours")
    (tmp_path / "ours" / pack.CUDA).touch()
    build_cuda.check(tmp_path / "ours", dict(os.environ))
    found = ", ".join(devices.beside_the_processor(find_lib_dir())).split(",")[0] or "none"
    assert f"the libraries load; devices: {found}" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="build_cuda.py is for Linux")
def test_what_travels_loads_elsewhere(tmp_path, monkeypatch):
    """This machine's libraries stand for those with CUDA. Packages are this environment's: no network."""
    ours = tmp_path / "ours"
    shutil.copytree(find_lib_dir(), ours)
    (ours / pack.CUDA).touch()
    monkeypatch.setattr(pack, "run", without_strip_of(ours / pack.CUDA, pack.run))
    monkeypatch.setattr(pack, "python_packages", lambda folder, python: folder.mkdir())
    archive = tmp_path / "dist" / "a.tar.xz"
    megabytes = pack.pack(archive, ours, ours, "3.12")
    assert [path.name for path in archive.parent.iterdir()] == ["a.tar.xz"]
    assert megabytes == archive.stat().st_size / 1e6 < 25
    shutil.rmtree(ours)
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "there", filter="tar")
    lib = tmp_path / "there" / "lib"
    env = {**os.environ, "EAGLE3_LLAMA_LIB_DIR": str(lib)}
    probe = "from eagle3_llama.runtime import library; library.load(); print(library.find_lib_dir())"
    assert run([sys.executable, "-c", probe], env=env, cwd=ROOT).stdout.strip() == str(lib)
    symbols = run(["nm", lib / "libllama.so"], code=None).stderr
    assert "no symbols" in symbols
    assert (tmp_path / "there" / "upstream" / pack.CUDA).resolve() == lib / pack.CUDA
    needed = run(["ldd", lib / "libggml-cpu.so"]).stdout
    assert f"libgomp.so.1 => {lib}/libgomp.so.1" in needed and "not found" not in needed


def without_strip_of(cuda, really):
    """pack.run(), but the empty file that stands for the CUDA library is nothing to strip."""
    stands = lambda command: command[0] == "strip" and Path(command[-1]).name == cuda.name
    return lambda command: "" if stands(command) else really(command)


FAKE = """
int cudaMalloc(void ** out, unsigned long size) { *out = 0; return size == 7 ? 2 : 0; }
int cudaMemcpyAsync(void * a, const void * b, unsigned long n, int kind, void * s) { return 0; }
int cudaStreamSynchronize(void * s) { return 0; }
"""
CALLER = """
import ctypes, sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import card_tools
backend = ctypes.CDLL(sys.argv[3])
with card_tools.counted() as counts:
    assert [backend.allocate(n) for n in (1, 7)] == [0, 2]
    backend.copy(1, 100), backend.copy(2, 40), backend.copy(2, 2), backend.copy(3, 5)
print({what: n for what, n in counts.items() if n and not what.endswith("_us")})
"""
BACKEND = """
int cudaMalloc(void **, unsigned long);
int cudaMemcpyAsync(void *, const void *, unsigned long, int, void *);
int cudaStreamSynchronize(void *);
int allocate(int n) { void * p; return cudaMalloc(&p, n); }
int copy(int kind, int n) { return cudaMemcpyAsync(0, 0, n, kind, 0) + cudaStreamSynchronize(0); }
"""


@pytest.mark.skipif(sys.platform != "linux", reason="build_cuda.py is for Linux")
def test_calls_of_nvidias_library_are_counted(tmp_path):
    """With a library of that name in its place, which is loaded behind another one, as libggml-cuda.so is."""
    compiled = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o"]
    run([*compiled, tmp_path / "libcudart.so.13", "-Wl,-soname,libcudart.so.13"], input=FAKE)
    backend = tmp_path / "libbackend.so"
    link = ["-Wl,-rpath,$ORIGIN", f"-L{tmp_path}", "-l:libcudart.so.13"]
    run([*compiled, backend, "-x", "none", *link], input=BACKEND)
    pack.compile_calls(tmp_path / pack.CALLS)
    env = {**os.environ, "LD_PRELOAD": str(tmp_path / pack.CALLS)}
    folders = [ROOT / "scripts" / "device", ROOT / "tests" / "kit"]
    told = run([sys.executable, "-c", CALLER, *folders, backend], env=env, cwd=ROOT).stdout
    assert ast.literal_eval(told) == {
        "copies_in": 1, "copies_out": 2, "copies_on_device": 1, "stream_waits": 4, "allocations": 2,
        "copies_in_bytes": 100, "copies_out_bytes": 42, "copies_on_device_bytes": 5,
    }  # fmt: skip


def test_wrong_options_are_named():
    said = run([sys.executable, SCRIPT, "--architecture", "9.0"], code=2).stderr
    assert "--architecture is a number such as 90" in said
    assert "half an hour" in run([sys.executable, SCRIPT, "--help"]).stdout


def test_in_the_background_its_progress_is_in_a_file(tmp_path):
    """It goes on without this terminal, and a failure is the last line of the file."""
    script = tmp_path / "scripts" / "device"
    shutil.copytree(ROOT / "scripts" / "device", script)
    shutil.copy(ROOT / "scripts" / "_env.py", tmp_path / "scripts")
    shutil.copytree(ROOT / "native", tmp_path / "native", ignore=shutil.ignore_patterns("tests", "kernels"))
    shutil.copytree(ROOT / "eagle3_llama" / "runtime", tmp_path / "eagle3_llama" / "runtime")
    env = {**os.environ, "EAGLE3_LLAMA_CACHE": str(tmp_path / "cache")}
    log = Path(run([sys.executable, script / "build_cuda.py", "--background"], env=env).stdout.strip())
    assert log.parent == tmp_path / "cache" / "cuda" and log.name == "build-sm90.log"
    follow = ["timeout", "60", "sh", "-c", f"until grep -q error: {log}; do sleep 0.1; done; cat {log}"]
    assert subprocess.check_output(follow, text=True, timeout=120).startswith(
        "error: there is no .venv yet: run python3"
    )
