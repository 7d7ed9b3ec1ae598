"""Loading: one clear error for each way it can go wrong."""

import json
import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from commands import run as run_command

from eagle3_llama.errors import EagleError, ErrorKind
from eagle3_llama.runtime import checking, hook
from eagle3_llama.runtime.hook import SUFFIX
from eagle3_llama.runtime.library import find_lib_dir, parse_header

LIB = find_lib_dir()


def run(code, **env):
    done = run_command([sys.executable, "-c", code], None, env={**os.environ, **env})
    return done.returncode, done.stdout + done.stderr


def load(**env):
    """What a process says that asks for EagleLlama and then ends in order."""
    code, out = run(LOAD, **env)
    assert code == 0, out
    return out


LOAD = (
    "import eagle3_llama\ntry: eagle3_llama.EagleLlama\n"
    "except eagle3_llama.EagleError as e: print(e.kind.value, e)\nelse: print('loaded')"
)


def copy(to):
    shutil.copytree(LIB, to)
    return to


def test_loads():
    assert load().strip() == "loaded"


def test_llama_cpp_imported_after_is_ours():
    code, out = run("import eagle3_llama, llama_cpp.llama_cpp as c; print(c._lib._name)")
    assert code == 0 and Path(out.strip()).parent.resolve() == LIB.resolve()


def test_foreign_libllama(tmp_path):
    other = copy(tmp_path / "lib")
    code, out = run("import llama_cpp\n" + LOAD, LLAMA_CPP_LIB_PATH=str(other))
    assert code == 0 and (
        out.startswith("library")
        and "another libllama" in out
        and "import eagle3_llama before llama_cpp" in out
    )


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process has")
def test_another_ggml(tmp_path):
    """It is not used where it is found first. One that is there already is named, before it is called."""
    other = copy(tmp_path / "their lib")
    show = "\nfrom eagle3_llama.runtime import strangers\nprint(*strangers.mapped(), sep='\\n')"
    code, out = run(LOAD + show, LD_LIBRARY_PATH=str(other))
    assert code == 0 and out.startswith("loaded") and str(other) not in out, out
    for name in ("libggml-base", "libggml-cpu", "libggml", "libllama"):
        if (LIB / f"{name}{SUFFIX}").is_file():
            assert f"/{name}{SUFFIX}\n" in out
    base = str(other / f"libggml-base{SUFFIX}")
    earlier = f"import ctypes\nctypes.CDLL({base!r})\n"
    for code, env in ((LOAD, {"LD_PRELOAD": base.replace(" ", "")}), (earlier + LOAD, {})):
        if env:  # its words are divided at spaces
            shutil.copytree(other, Path(env["LD_PRELOAD"]).parent)
        out = load_with(code, env)
        named = env.get("LD_PRELOAD", base)
        assert out.startswith("library") and f"this process has {named}, another build of" in out, out
        assert "LD_LIBRARY_PATH, LD_PRELOAD" in out and out.count("\n") == 1


def load_with(code, env):
    status, out = run(code, **env)
    assert status == 0, out
    return out


def test_an_attribute_that_cannot_be_had(tmp_path):
    """Each way to ask for the class says why there is none. What needs no library is there."""
    other = copy(tmp_path / "lib")
    ask = "try: {}\nexcept eagle3_llama.EagleError as e: print(e.kind.value, e)\n"
    ways = (
        "from eagle3_llama import EagleLlama",
        "eagle3_llama.EagleLlama",
        "hasattr(eagle3_llama, 'EagleLlama')",
    )
    code, out = run(
        "import llama_cpp, eagle3_llama\n"
        "from eagle3_llama import EagleParams\n"
        "print(hasattr(eagle3_llama, 'EagleParams'))\n" + "".join(map(ask.format, ways)),
        LLAMA_CPP_LIB_PATH=str(other),
    )
    lines = out.splitlines()
    assert code == 0 and lines[0] == "True", out
    assert len(lines) == 4 and all(
        line.startswith("library llama_cpp has already loaded another libllama") for line in lines[1:]
    )


CHILD = (
    "import subprocess, sys; show = 'import llama_cpp.llama_cpp as c; print(c._lib._name)'; "
    "print(subprocess.run([sys.executable, '-c', show], capture_output=True, text=True).stdout)"
)


def test_the_variable_is_the_users_own(tmp_path):
    """A child process has the user's library, this process has ours, and a warning says so."""
    other = copy(tmp_path / "theirs")
    show = (
        "import os; print(os.environ.get('LLAMA_CPP_LIB_PATH')); "
        "import llama_cpp.llama_cpp as c; print(c._lib._name)\n"
    )
    code, out = run(
        "import eagle3_llama; eagle3_llama.EagleLlama\n" + show + CHILD, LLAMA_CPP_LIB_PATH=str(other)
    )
    assert code == 0 and out.count("RuntimeWarning: LLAMA_CPP_LIB_PATH names") == 1, out
    warning = next(line for line in out.splitlines() if "RuntimeWarning" in line)
    assert str(other) in warning and str(LIB) in warning and "unset LLAMA_CPP_LIB_PATH" in warning
    said = [line for line in out.splitlines() if line.startswith(str(tmp_path)) or line.startswith(str(LIB))]
    assert (
        said == [str(other), str(LIB / said[1].rpartition("/")[2]), str(other / said[2].rpartition("/")[2])]
        and "libllama" in said[2]
    )


def test_the_variable_stays_unset():
    env = {k: v for k, v in os.environ.items() if k != "LLAMA_CPP_LIB_PATH"}
    code = (
        "import os, eagle3_llama; eagle3_llama.EagleLlama; import llama_cpp; "
        "print('LLAMA_CPP_LIB_PATH' in os.environ)"
    )
    done = run_command([sys.executable, "-W", "error", "-c", code], env=env)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("where", ["installed", "named"])
def test_a_gpu_that_is_lost_is_said(tmp_path, where):
    """With llama-cpp-python built for a GPU, its library is not opened, so n_gpu_layers has no effect."""
    package = Path(__import__("llama_cpp").__file__).parent
    site = tmp_path / "site"
    shutil.copytree(package, site / "llama_cpp")
    theirs = site / "llama_cpp" / "lib" if where == "installed" else tmp_path / "named"
    theirs.mkdir(exist_ok=True)
    for name in ("base", "cpu", "cuda"):
        (theirs / f"libggml-{name}{SUFFIX}").touch()
    env = {"LLAMA_CPP_LIB_PATH": str(theirs)} if where == "named" else {"PYTHONPATH": str(site)}
    code, out = run(
        "import eagle3_llama; eagle3_llama.EagleLlama; import llama_cpp; print(llama_cpp.__file__)", **env
    )
    assert (
        code == 0
        and out.count("supports a GPU (cuda)") == 1
        and "-DGGML_CUDA=on" in out
        and str(theirs) in out
    ), out
    (theirs / f"libggml-cuda{SUFFIX}").unlink()
    code, out = run("import eagle3_llama; eagle3_llama.EagleLlama", **env)
    assert code == 0 and "GPU" not in out


def test_without_libmtmd_no_other_one(tmp_path):
    """llama-cpp-python's own would bring a second libllama, which knows nothing of our models."""
    for path in copy(tmp_path / "lib").glob("libmtmd*"):
        path.unlink()
    code = f"{LOAD}\ntry: from llama_cpp import mtmd_cpp\nexcept ImportError as e: print(e)"
    status, out = run(code, EAGLE3_LLAMA_LIB_DIR=str(tmp_path / "lib"), MTMD_CPP_LIB=str(LIB))
    lines = out.strip().splitlines()
    assert status == 0 and lines[0] == "loaded" and "LLAMA_BUILD_MTMD=OFF: build" in lines[1]


def test_libmtmd_that_was_left_for_later(tmp_path):
    """It is there when it is first imported, with a line that says so; or the reason is told."""
    folder = copy(tmp_path / "lib")
    for path in folder.glob("libmtmd*"):
        path.unlink()
    record = json.loads((folder / "proof.json").read_text())
    code = f"{LOAD}\nfrom llama_cpp import mtmd_cpp\nprint(mtmd_cpp.mtmd_default_marker())"
    for sources in ("of another checkout", record["sources"]):
        (folder / "proof.json").write_text(json.dumps({**record, "later": {}, "sources": sources}))
        status, out = run(code, EAGLE3_LLAMA_LIB_DIR=str(folder))
        assert "which is compiled now, once" in out
        said = "could not be compiled" if status else "b'<__media__>'"
        assert (status == 0) == (sources == record["sources"]) and said in out, out
    assert json.loads((folder / "proof.json").read_text()) == record


def test_wrong_abi(tmp_path):
    other = copy(tmp_path / "lib")
    header = other / "eagle3.h"
    header.write_text(re.sub(r"(define EAGLE3_ABI_VERSION) \d+", r"\1 999", header.read_text()))
    out = load(EAGLE3_LLAMA_LIB_DIR=str(other))
    assert out.startswith("library") and "999" in out and "reinstall" in out


def test_a_library_of_another_processor(tmp_path):
    """It is refused before an instruction that is not there ends the process."""
    other = copy(tmp_path / "lib")
    record = {"used": ["avx4096", "avx2"], "processor_sets": ["avx4096"]}
    (other / "proof.json").write_text(json.dumps(record))
    out = run(LOAD, EAGLE3_LLAMA_LIB_DIR=str(other))[1]
    assert out.startswith("library") and "a processor with avx4096," in out and "build it here" in out
    # what its kernel did not name then may have no name here either
    (other / "proof.json").write_text(json.dumps({**record, "processor_sets": []}))
    assert run(LOAD, EAGLE3_LLAMA_LIB_DIR=str(other))[1].strip() == "loaded"
    (other / "proof.json").write_text("{")
    assert run(LOAD, EAGLE3_LLAMA_LIB_DIR=str(other))[1].strip() == "loaded"


def test_not_installed(tmp_path):
    out = load(EAGLE3_LLAMA_LIB_DIR=str(tmp_path))
    assert out.startswith("library") and "missing" in out


def test_converter_needs_no_library(tmp_path):
    code, out = run(
        "import eagle3_llama.heads.convert, sys; print('llama_cpp' in sys.modules)",
        EAGLE3_LLAMA_LIB_DIR=str(tmp_path),
    )
    assert code == 0 and out.strip() == "False"


def test_header_without_marks():
    with pytest.raises(EagleError) as e:
        parse_header("int x;")
    assert e.value.kind is ErrorKind.LIBRARY


def test_the_names_of_libraries_and_programs(monkeypatch):
    """As each system calls them; CMake gives all of our libraries the prefix "lib"."""
    for system, suffix in (("linux", ".so"), ("darwin", ".dylib"), ("win32", ".dll")):
        monkeypatch.setattr(sys, "platform", system)
        assert runpy.run_path(hook.__file__)["SUFFIX"] == suffix
        program = runpy.run_path(checking.__file__)["FILE"]
        assert program == ("eagle3-proof.exe" if system == "win32" else "eagle3-proof")


def test_windows_looks_beside_the_library(tmp_path):
    """For the libraries that it needs, where the search path for them can be told."""
    (copy(tmp_path / "lib") / f"libeagle3{SUFFIX}").rename(tmp_path / "lib" / "libeagle3.dll")
    code = (
        "import os, sys; from pathlib import Path; import eagle3_llama.runtime.library as library\n"
        "os.add_dll_directory = lambda path: print('looks in', path)\n"
        "library._NAME = 'libeagle3.dll'; folder = Path(sys.argv[1])\n"
        "found = folder / library._NAME, folder / 'eagle3.h', 'EAGLE3', 'eagle3_abi_version'\n"
        "_, lib = library.open_library(*found)\n"
        "print(library.find_lib_dir() == folder, lib.eagle3_abi_version())"
    )
    env = {**os.environ, "EAGLE3_LLAMA_LIB_DIR": str(tmp_path / "lib")}
    done = run_command([sys.executable, "-c", code, tmp_path / "lib"], env=env)
    lines = done.stdout.splitlines()
    assert (
        lines[0] == f"looks in {tmp_path / 'lib'}" and lines[1].startswith("True ") and int(lines[1][5:]) > 0
    )
