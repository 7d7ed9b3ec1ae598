"""Makes llama_cpp open this package's libraries.

A module of llama_cpp that opens a library reads the library's folder from an environment variable when it is
imported. The hook sets the variable only during that import. Afterwards the process and its child processes
have the user's own value again. Then it guards the functions of that library (guards.py). The hook also
watches the class Llama (llama_class.py).
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")  # every name begins with "lib"
_OPENERS = {
    "llama_cpp.llama_cpp": ("LLAMA_CPP_LIB_PATH", "libllama"),
    "llama_cpp.mtmd_cpp": ("MTMD_CPP_LIB", "libmtmd"),
}
_CLASS = "llama_cpp.llama"  # the module with Llama
_OURS = f"libeagle3{SUFFIX}"
_Step = Callable[[Path], None]
_NO_GPU = ("base", "cpu", "blas", "rpc", "zdnn")  # libggml-* backends that are not for GPUs


class OurLibraries:
    """A finder at the front of sys.meta_path. It wraps the loaders of modules that the other finders find."""

    def __init__(self, lib_dir: Callable[[], Path | None], prepare: _Step, complete: _Step) -> None:
        self._lib_dir = lib_dir
        self._prepare, self._complete = prepare, complete

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        variable, library = _OPENERS.get(name, ("", ""))
        lib_dir = self._lib_dir() if variable or name == _CLASS else None
        if lib_dir is None or not (lib_dir / f"libllama{SUFFIX}").is_file():
            return None
        others = (f for f in sys.meta_path if f is not self and hasattr(f, "find_spec"))
        spec = next((s for f in others if (s := f.find_spec(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None and not variable:
            _watch(spec.loader)
        elif spec is not None and spec.loader is not None and spec.origin:
            own = Path(spec.origin).parent / "lib"
            complete = self._complete if library == "libmtmd" else lambda _: None
            _wrap(spec.loader, variable, lib_dir, library, own, self._prepare, complete)
        return spec


def install(lib_dir: Callable[[], Path | None], prepare: _Step, complete: _Step) -> None:
    """Makes a later `import llama_cpp` open the libraries in lib_dir(). Loads nothing itself.

    prepare: is called with that folder before they are opened. complete: before libmtmd is looked for in it.
    """
    if not any(type(f).__name__ == OurLibraries.__name__ for f in sys.meta_path):
        sys.meta_path.insert(0, OurLibraries(lib_dir, prepare, complete))


def _watch(loader: Any) -> None:
    run = loader.exec_module

    def exec_module(module: Any) -> None:
        from .llama_class import watch

        run(module)
        watch(module.Llama)

    loader.exec_module = exec_module


def _wrap(
    loader: Any, variable: str, lib_dir: Path, library: str, own: Path, prepare: _Step, complete: _Step
) -> None:
    run = loader.exec_module

    def exec_module(module: Any) -> None:
        from . import guards

        complete(lib_dir)
        # llama-cpp-python's own library would load a second libllama
        if not (lib_dir / f"{library}{SUFFIX}").is_file():
            raise ImportError(
                f"{lib_dir} has no {library}, because it was built with LLAMA_BUILD_MTMD=OFF: "
                "build eagle3-llama without that flag"
            )
        prepare(lib_dir)
        before = os.environ.get(variable)
        os.environ[variable] = str(lib_dir)
        try:
            run(module)
        finally:
            if before is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = before
        guards.put(lib_dir / _OURS, vars(module)["_lib" if library == "libllama" else "_libmtmd"])
        if variable == "LLAMA_CPP_LIB_PATH":
            _tell(before, lib_dir, own)

    loader.exec_module = exec_module


def _tell(named: str | None, lib_dir: Path, own: Path) -> None:
    """Warns about features of another libllama that is not used now.

    named: the folder in LLAMA_CPP_LIB_PATH. own: the folder of the installed llama-cpp-python.
    """
    build = "pip install --force-reinstall --no-deps eagle3-llama"
    if named is not None and Path(named).resolve() != lib_dir.resolve():
        own = Path(named)
        _warn(
            f"LLAMA_CPP_LIB_PATH names {named}, but eagle3_llama needs its own libllama, so llama_cpp uses "
            f"the one in {lib_dir}: unset LLAMA_CPP_LIB_PATH for this program, or build eagle3-llama with "
            f"the flags of your library (CMAKE_ARGS=... {build})"
        )
    theirs = gpu_backends(own)
    if theirs and not gpu_backends(lib_dir):
        _warn(
            f"llama-cpp-python's library in {own} supports a GPU ({', '.join(theirs)}), but eagle3_llama's, "
            f"in {lib_dir}, replaces it and does not, so n_gpu_layers has no effect. To build it with GPU "
            f"support: CMAKE_ARGS=-DGGML_{theirs[0].upper()}=on {build}"
        )


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def gpu_backends(folder: Path) -> list[str]:
    """The GPU backends in a folder, from its file names. Asking the library would load a second libllama."""
    files = sorted(folder.glob(f"libggml-*{SUFFIX}"))
    names = (f.name.removeprefix("libggml-").partition(".")[0] for f in files)
    return [name for name in names if name.partition("-")[0] not in _NO_GPU]
