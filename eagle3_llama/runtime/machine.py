"""Which machine this is, as far as it decides what computing costs: homes, and caches in them, are shared."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

from .hook import SUFFIX

_TELLING = ("model name", "flags", "CPU implementer", "CPU part", "Features")  # of /proc/cpuinfo, x86 and ARM


def identity(lib_dir: Path | None) -> list[object]:
    """Processor, cores that may be used, and the devices that the ggml in lib_dir sees."""
    return [
        cpu(),
        cores(),
        os.environ.get("OMP_WAIT_POLICY"),
        devices(lib_dir) if lib_dir is not None else [],
    ]


def cpu(info: Path = Path("/proc/cpuinfo")) -> str:
    """Model and features of the processor's cores. platform.processor() is empty on many Linux machines."""
    try:
        lines = {
            line
            for line in info.read_text(encoding="utf-8", errors="replace").splitlines()
            if line.startswith(_TELLING)
        }
    except OSError:
        lines = set()
    return "\n".join(
        [platform.machine(), *sorted(lines)] if lines else [platform.machine(), platform.processor()]
    )


def cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def devices(lib_dir: Path) -> list[str]:
    """Names that ggml's backends have for their devices, e.g. a GPU's model. The library must be loaded."""
    try:
        ggml = ctypes.CDLL(str(lib_dir / f"libggml{SUFFIX}"))
        ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
        ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
        ggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
        ggml.ggml_backend_dev_description.restype = ctypes.c_char_p
        ggml.ggml_backend_dev_description.argtypes = [ctypes.c_void_p]
        described = [
            ggml.ggml_backend_dev_description(ggml.ggml_backend_dev_get(i))
            for i in range(ggml.ggml_backend_dev_count())
        ]
    except (OSError, AttributeError):
        return []
    return [(text or b"").decode("utf-8", "replace") for text in described]
