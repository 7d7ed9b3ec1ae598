"""Finds and loads the native libraries: our libllama for llama_cpp, and libeagle3.

llama_cpp opens a libllama once, when it is first imported. Importing eagle3_llama installs a hook (hook.py)
so that it opens ours. load() checks this before it opens libeagle3: with two copies of libllama in one
process, each would use handles that the other one created.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..errors import EagleError, ErrorKind
from . import guards, hook, machine, strangers, variants

_NAME = f"libeagle3{hook.SUFFIX}"
_KINDS = {
    -1: ErrorKind.BAD_ARGUMENT,
    -2: ErrorKind.BAD_FILE,
    -3: ErrorKind.BAD_VALUE,
    -4: ErrorKind.HEAD_MISMATCH,
    -5: ErrorKind.MEMORY,
    -6: ErrorKind.DECODE,
    -7: ErrorKind.UNSUPPORTED,
    -8: ErrorKind.NATIVE,
}


def find_lib_dir() -> Path | None:
    """The folder with libeagle3, libllama, ggml and eagle3.h. None if the native libraries are not installed.

    It is EAGLE3_LLAMA_LIB_DIR if set, else lib/ in the package, else lib/ of the editable installation.
    """
    if named := os.environ.get("EAGLE3_LLAMA_LIB_DIR"):
        return Path(named).expanduser().absolute()
    beside = Path(__file__).resolve().parents[1] / "lib"
    if (beside / _NAME).is_file():
        return beside
    import importlib.metadata  # slow to import, and rarely needed

    try:
        installed = Path(str(importlib.metadata.distribution("eagle3-llama").locate_file("eagle3_llama/lib")))
    except importlib.metadata.PackageNotFoundError:
        return None
    return installed if (installed / _NAME).is_file() else None


def prefer_our_libllama() -> None:
    """Makes a later `import llama_cpp` open our libllama. Loads nothing itself."""
    if named := os.environ.get("EAGLE3_LLAMA_LIB_DIR"):  # whatever folder the process enters later
        os.environ["EAGLE3_LLAMA_LIB_DIR"] = os.path.abspath(os.path.expanduser(named))
    hook.install(find_lib_dir, _prepare, complete)


def _prepare(lib_dir: Path) -> None:
    """Before llama_cpp opens libllama, which brings the others."""
    strangers.open_ours(lib_dir)
    variants.load(lib_dir)


def complete(lib_dir: Path | None = None) -> None:
    """Compiles libmtmd and libe3chat if the installation left them for later, as a checkout's does.

    lib_dir: of the libraries, find_lib_dir() by default. It takes a minute or two and shows its progress on
    stderr. Raises EagleError LIBRARY if that fails.
    """
    lib_dir = lib_dir or find_lib_dir()
    if lib_dir is None or "later" not in record(lib_dir):
        return
    script = Path(__file__).resolve().parents[2] / "native" / "later.py"
    if not script.is_file():
        raise _error(f"{lib_dir} lacks libraries, and {script} is not there to build them: reinstall it")
    done = subprocess.run([sys.executable, script, lib_dir], stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise _error("libmtmd and libe3chat could not be compiled: see above")


@functools.lru_cache(maxsize=1)
def load() -> tuple[Any, Any]:
    """(ffi, lib) of libeagle3. The first call loads it.

    Raises EagleError LIBRARY if it is not installed, if another libllama is loaded already, or if the
    versions of library and header differ.
    """
    lib_dir = find_lib_dir()
    if lib_dir is None:
        raise _error(
            "the native libraries are not installed: install the package with pip, or set "
            "EAGLE3_LLAMA_LIB_DIR to their folder (python native/build.py --print-dir builds and prints it)"
        )
    for name in (_NAME, "eagle3.h"):
        if not (lib_dir / name).is_file():
            raise _error(
                f"{name} is missing from {lib_dir}: reinstall eagle3-llama, or correct EAGLE3_LLAMA_LIB_DIR"
            )
    _refuse_another_processor(lib_dir)
    _import_llama_cpp(lib_dir)
    # Both are done already, unless llama_cpp was imported before the hook was installed.
    _prepare(lib_dir)
    _guard(lib_dir)
    return open_library(lib_dir / _NAME, lib_dir / "eagle3.h", "EAGLE3", "eagle3_abi_version")


def _guard(lib_dir: Path) -> None:
    for module, opened in (("llama_cpp.llama_cpp", "_lib"), ("llama_cpp.mtmd_cpp", "_libmtmd")):
        if module in sys.modules:
            guards.put(lib_dir / _NAME, vars(sys.modules[module])[opened])


def record(lib_dir: Path) -> dict[str, Any]:
    """The record of native/build.py about the library: instruction sets, compiler, versions. May be {}."""
    try:
        found = json.loads((lib_dir / "proof.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _refuse_another_processor(lib_dir: Path) -> None:
    """An instruction that the processor does not have would end the process.

    Compared is what Linux said of the processor when the library was built, with what it says now.
    """
    built = record(lib_dir)
    here = machine.sets()
    needed = set(built.get("used", ())) & set(built.get("processor_sets", ()))
    if missing := sorted(needed - here) if here else []:
        raise _error(
            f"the library in {lib_dir} was built on a processor with {', '.join(missing)}, and this one has "
            "no such instructions: build it here (pip install --force-reinstall --no-deps eagle3-llama), or, "
            "for machines that share it, with CMAKE_ARGS=-DGGML_NATIVE=OFF"
        )


def _import_llama_cpp(lib_dir: Path) -> None:
    try:
        import llama_cpp.llama_cpp as binding
    except ModuleNotFoundError as error:
        if error.name != "llama_cpp":
            raise _error(f"llama_cpp cannot be imported: {error}") from error
        raise _error(
            "llama-cpp-python is not installed. Without a compiler, install it from the folder with this "
            "package's wheel: pip install --find-links FOLDER eagle3-llama (scripts/release/build_wheels.py "
            "in a checkout makes both wheels)"
        ) from error
    except (ImportError, OSError, RuntimeError, FileNotFoundError) as error:
        raise _error(f"llama_cpp cannot be imported with the libllama in {lib_dir}: {error}") from error
    loaded = Path(binding._lib._name).resolve().parent
    if loaded != lib_dir.resolve():
        raise _error(
            f"llama_cpp has already loaded another libllama, from {loaded}: start a new process, and "
            "import eagle3_llama before llama_cpp, or run the program with python -m eagle3_llama PROGRAM. "
            f"LLAMA_CPP_LIB_PATH={lib_dir} in the environment serves any order"
        )


def error_of(code: int) -> EagleError:
    """The error for a code below 0 that a call of libeagle3 returned in this thread, with its message."""
    ffi, lib = load()
    message = ffi.string(lib.eagle3_last_error()).decode("utf-8", "replace")
    return EagleError(_KINDS.get(code, ErrorKind.NATIVE), message)


def checked(code: int) -> int:
    """The result of a call of libeagle3. Raises EagleError if it is the code of a failure."""
    if code < 0:
        raise error_of(code)
    return code


def open_library(path: Path, header: Path, prefix: str, version: str) -> tuple[Any, Any]:
    """(ffi, lib) of one of our libraries, by its header. version: its call that returns PREFIX_ABI_VERSION.

    Raises EagleError LIBRARY.
    """
    import cffi

    cdef, expected = parse_header(header.read_text(encoding="utf-8"), prefix)
    ffi = cffi.FFI()
    try:
        ffi.cdef(cdef)
        if hasattr(os, "add_dll_directory"):  # Windows does not look for a library's libraries beside it
            os.add_dll_directory(str(path.parent))
        lib = ffi.dlopen(str(path))
        found = getattr(lib, version)()
    except (cffi.CDefError, cffi.FFIError, OSError, AttributeError) as error:
        raise _error(f"cannot load {path} ({error}): reinstall eagle3-llama") from error
    if found != expected:
        raise _error(f"{path} has ABI version {found}, its header has {expected}: reinstall eagle3-llama")
    return ffi, lib


def parse_header(text: str, prefix: str = "EAGLE3") -> tuple[str, int]:
    """The declarations between the cdef marks of a header, and its PREFIX_ABI_VERSION."""
    version = re.search(rf"^#define {prefix}_ABI_VERSION (\d+)", text, re.MULTILINE)
    marked = re.search(r"^// cdef-begin$(.*)^// cdef-end$", text, re.MULTILINE | re.DOTALL)
    if version is None or marked is None:
        raise _error(f"a header has no {prefix}_ABI_VERSION or no cdef marks: reinstall eagle3-llama")
    lines = [line for line in marked[1].splitlines() if not line.lstrip().startswith("#")]
    return "\n".join(lines), int(version[1])


def _error(message: str) -> EagleError:
    return EagleError(ErrorKind.LIBRARY, message)


def __getattr__(name: str) -> Any:
    if name in ("ffi", "lib"):
        return load()[name == "lib"]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
