"""NVIDIA's compiler and libraries from pip, in a folder of the cache, and the flags that build with them.

Only Linux on x86-64 and arm64 has these packages. They are never installed into the project's environment.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "native"))

from fetch import BuildError, cache_dir, say
from locks import locked
from toolchain import cores

__all__ = ["BuildError", "cache_dir", "cores", "environment", "options", "say", "toolkit"]

# From CCCL 3.2 on, ggml's top-k selects; with the 3.0 of CUDA 13.0 it sorts whole rows.
PACKAGES = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.2.86",
    "nvidia-cublas==13.0.2.14",
)
_MEGABYTES = 480  # to download; 840 unpacked
_LIBRARIES = ("cudart", "cublas", "cublasLt")


def toolkit() -> Path:
    """The folder of the toolkit, with bin/nvcc, include and lib. pip downloads it once. Raises BuildError."""
    name = hashlib.sha256(" ".join(PACKAGES).encode()).hexdigest()[:8]
    place = cache_dir() / "cuda" / f"toolkit-{name}"
    place.parent.mkdir(parents=True, exist_ok=True)
    found = place / "nvidia" / "cu13"
    with locked(place.with_suffix(".lock"), "waiting for another download of NVIDIA's compiler"):
        if not place.is_dir():
            _install(place)
    if not (found / "bin" / "nvcc").is_file():
        raise BuildError(f"{place} has no compiler: delete the folder, and try again")
    return found


def _install(place: Path) -> None:
    say(f"downloading NVIDIA's compiler ({_MEGABYTES} MB)")
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".toolkit-") as tmp:
        fresh = Path(tmp) / "toolkit"
        command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]
        command += ["--progress-bar", "off", "--only-binary", ":all:", "--target", str(fresh), *PACKAGES]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise BuildError(
                "pip cannot install NVIDIA's compiler (see above): check the network and pip's index "
                "settings. The packages are there for Linux alone",
                done.stdout,
            )
        _name_libraries(fresh / "nvidia" / "cu13")
        os.rename(fresh, place)


def _name_libraries(folder: Path) -> None:
    """The names that CMake looks for, which the packages have not."""
    (folder / "lib64").symlink_to("lib")
    for name in _LIBRARIES:
        (folder / "lib" / f"lib{name}.so").symlink_to(f"lib{name}.so.13")


def options(folder: Path, architecture: str) -> dict[str, str]:
    """The CMake variables of a build for one architecture, such as "90" for H100 and H200.

    GGML_CUDA_NO_VMM: without it the library needs libcuda.so, and loads nowhere without a driver.
    GGML_NATIVE is off, because the machine with the card has another processor.
    """
    return {
        "GGML_CUDA": "ON",
        "CMAKE_CUDA_COMPILER": str(folder / "bin" / "nvcc"),
        "CUDAToolkit_ROOT": str(folder),
        "CMAKE_CUDA_ARCHITECTURES": f"{architecture}-real",
        "GGML_CUDA_NO_VMM": "ON",
        "GGML_CUDA_NCCL": "OFF",
        "GGML_NATIVE": "OFF",
    }


def environment(folder: Path, options: dict[str, str], jobs: int) -> dict[str, str]:
    """The variables for native/build.py: its flags, NVIDIA's libraries, and ccache where it is installed."""
    env = {**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs)}
    env["CMAKE_ARGS"] = " ".join(f"-D{name}={value}" for name, value in options.items())
    env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (str(folder / "lib"), env.get("LD_LIBRARY_PATH"))))
    if shutil.which("ccache"):
        for language in ("C", "CXX", "CUDA"):
            env.setdefault(f"CMAKE_{language}_COMPILER_LAUNCHER", "ccache")
        # so the unpatched build takes the objects of the patched one
        env.setdefault("CCACHE_BASEDIR", str(cache_dir()))
        env.setdefault("CCACHE_NOHASHDIR", "1")
    return env
