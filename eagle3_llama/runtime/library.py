"""Find and load the native libraries: our libllama for llama_cpp, and libeagle3 beside it.

llama_cpp opens a libllama once, when it is first imported. So importing eagle3_llama sees to it that it is ours (_hook.py),
and load() checks that it came to that before libeagle3 is opened, for two copies of libllama in one process would each
believe they own the other's handles.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

from ..errors import EagleError, ErrorKind
from . import hook as _hook

_NAME = f"libeagle3{_hook.SUFFIX}"


def find_lib_dir() -> Path | None:
    """The folder with libeagle3, libllama, ggml and eagle3.h; None where the native part is not installed.

    $EAGLE3_LLAMA_LIB_DIR, else lib/ beside the package, else where the (editable) install put it.
    """
    if named := os.environ.get("EAGLE3_LLAMA_LIB_DIR"):
        return Path(named).expanduser().absolute()
    beside = Path(__file__).resolve().parents[1] / "lib"
    if (beside / _NAME).is_file():
        return beside
    import importlib.metadata  # slow to import, so only where it is needed

    try:
        installed = Path(str(importlib.metadata.distribution("eagle3-llama").locate_file("eagle3_llama/lib")))
    except importlib.metadata.PackageNotFoundError:
        return None
    return installed if (installed / _NAME).is_file() else None


def prefer_our_libllama() -> None:
    """Make a later `import llama_cpp` open our libllama. Loads nothing."""
    _hook.install(find_lib_dir)


@functools.lru_cache(maxsize=1)
def load() -> tuple[Any, Any]:
    """(ffi, lib) of libeagle3, loaded on the first call.

    Raises EagleError of kind LIBRARY: not installed, another libllama is loaded already, or the library and
    its header are of different versions.
    """
    lib_dir = find_lib_dir()
    if lib_dir is None:
        raise _error(
            "the native libraries are not installed; install the package with pip, or name their folder in "
            "EAGLE3_LLAMA_LIB_DIR (python native/build.py --print-dir builds and prints it)"
        )
    for name in (_NAME, "eagle3.h"):
        if not (lib_dir / name).is_file():
            raise _error(
                f"{name} is missing from {lib_dir}; reinstall eagle3-llama or correct EAGLE3_LLAMA_LIB_DIR"
            )
    _import_llama_cpp(lib_dir)
    return _open(lib_dir)


def _import_llama_cpp(lib_dir: Path) -> None:
    try:
        import llama_cpp.llama_cpp as binding
    except (ImportError, OSError, RuntimeError, FileNotFoundError) as error:
        raise _error(f"llama_cpp cannot be imported with the libllama in {lib_dir}: {error}") from error
    loaded = Path(binding._lib._name).resolve().parent
    if loaded != lib_dir.resolve():
        raise _error(
            f"llama_cpp has already loaded another libllama, from {loaded}; "
            "import eagle3_llama before llama_cpp, or start a new process that does"
        )


def _open(lib_dir: Path) -> tuple[Any, Any]:
    import cffi

    cdef, expected = parse_header((lib_dir / "eagle3.h").read_text(encoding="utf-8"))
    ffi = cffi.FFI()
    try:
        ffi.cdef(cdef)
        lib = ffi.dlopen(str(lib_dir / _NAME))
        found = lib.eagle3_abi_version()
    except (cffi.CDefError, cffi.FFIError, OSError, AttributeError) as error:
        raise _error(f"cannot load {lib_dir / _NAME}: {error}; reinstall eagle3-llama") from error
    if found != expected:
        raise _error(
            f"{lib_dir / _NAME} has ABI version {found}, its header has {expected}; reinstall eagle3-llama"
        )
    return ffi, lib


def parse_header(text: str) -> tuple[str, int]:
    """What eagle3.h declares between its cdef marks, and its EAGLE3_ABI_VERSION."""
    version = re.search(r"^#define EAGLE3_ABI_VERSION (\d+)", text, re.MULTILINE)
    marked = re.search(r"^// cdef-begin$(.*)^// cdef-end$", text, re.MULTILINE | re.DOTALL)
    if version is None or marked is None:
        raise _error("eagle3.h holds no EAGLE3_ABI_VERSION or no cdef marks; reinstall eagle3-llama")
    lines = [line for line in marked[1].splitlines() if not line.lstrip().startswith("#")]
    return "\n".join(lines), int(version[1])


def _error(message: str) -> EagleError:
    return EagleError(ErrorKind.LIBRARY, message)


def __getattr__(name: str) -> Any:
    if name in ("ffi", "lib"):
        return load()[name == "lib"]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
