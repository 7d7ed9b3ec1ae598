"""Loading: one clear error for each way it can go wrong."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_llama._library import find_lib_dir, parse_header
from eagle3_llama.errors import EagleError, ErrorKind

LIB = find_lib_dir()


def run(code, **env):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env})
    return done.returncode, done.stdout + done.stderr


LOAD = "import eagle3_llama\ntry: eagle3_llama.EagleLlama\nexcept eagle3_llama.EagleError as e: print(e.kind.value, e)\nelse: print('loaded')"


def copy(to):
    shutil.copytree(LIB, to)
    return to


def test_loads():
    assert run(LOAD)[1].strip() == "loaded"


def test_llama_cpp_imported_after_is_ours():
    code, out = run("import eagle3_llama, llama_cpp.llama_cpp as c; print(c._lib._name)")
    assert Path(out.strip()).parent.resolve() == LIB.resolve()


def test_foreign_libllama(tmp_path):
    other = copy(tmp_path / "lib")
    out = run("import llama_cpp\n" + LOAD, LLAMA_CPP_LIB_PATH=str(other))[1]
    assert out.startswith("library") and "another libllama" in out and "import eagle3_llama before llama_cpp" in out


def test_wrong_abi(tmp_path):
    other = copy(tmp_path / "lib")
    header = other / "eagle3.h"
    header.write_text(re.sub(r"(define EAGLE3_ABI_VERSION) \d+", r"\1 999", header.read_text()))
    out = run(LOAD, EAGLE3_LLAMA_LIB_DIR=str(other))[1]
    assert out.startswith("library") and "999" in out and "reinstall" in out


def test_not_installed(tmp_path):
    out = run(LOAD, EAGLE3_LLAMA_LIB_DIR=str(tmp_path))[1]
    assert out.startswith("library") and "missing" in out


def test_converter_needs_no_library(tmp_path):
    code, out = run("import eagle3_llama.convert, sys; print('llama_cpp' in sys.modules)", EAGLE3_LLAMA_LIB_DIR=str(tmp_path))
    assert code == 0 and out.strip() == "False"


def test_header_without_marks():
    with pytest.raises(EagleError) as e:
        parse_header("int x;")
    assert e.value.kind is ErrorKind.LIBRARY
