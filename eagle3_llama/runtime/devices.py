"""Devices that ggml can put layers on: those of the loaded library, with their kind and memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .hook import SUFFIX

# ggml_backend_dev_type, in its order
_TYPES = ("CPU", "GPU", "integrated GPU", "accelerator", "several devices")
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "ggml_backend_dev_count": (ctypes.c_size_t, []),
    "ggml_backend_dev_get": (ctypes.c_void_p, [ctypes.c_size_t]),
    "ggml_backend_dev_name": (ctypes.c_char_p, [ctypes.c_void_p]),
    "ggml_backend_dev_description": (ctypes.c_char_p, [ctypes.c_void_p]),
    "ggml_backend_dev_type": (ctypes.c_int, [ctypes.c_void_p]),
    "ggml_backend_dev_memory": (None, [ctypes.c_void_p] * 3),
}


class Device(NamedTuple):
    """name: ggml's, such as CUDA0. description: the model. free, total: bytes, 0 if it does not tell."""

    name: str
    description: str
    type: str
    free: int
    total: int

    def __str__(self) -> str:
        size = f", {self.free / 2**30:.1f} of {self.total / 2**30:.1f} GiB free" if self.total else ""
        return f"{self.name} ({self.type}): {self.description}{size}"


def devices(lib_dir: Path) -> list[Device]:
    """All that ggml sees, the processor too. The library must be loaded already; [] if it cannot be asked."""
    try:
        return list(_devices(ctypes.CDLL(str(lib_dir / f"libggml{SUFFIX}"))))
    except (OSError, AttributeError):
        return []


def _devices(ggml: ctypes.CDLL) -> Iterator[Device]:
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(ggml, name)
        function.restype, function.argtypes = result, arguments
    for i in range(ggml.ggml_backend_dev_count()):
        device = ggml.ggml_backend_dev_get(i)
        number = ggml.ggml_backend_dev_type(device)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        ggml.ggml_backend_dev_memory(device, ctypes.addressof(free), ctypes.addressof(total))
        yield Device(
            _text(ggml.ggml_backend_dev_name(device)),
            _text(ggml.ggml_backend_dev_description(device)),
            _TYPES[number] if 0 <= number < len(_TYPES) else f"type {number}",
            free.value,
            total.value,
        )


def _text(found: bytes | None) -> str:
    return (found or b"").decode("utf-8", "replace")


def beside_the_processor(lib_dir: Path) -> list[str]:
    """Lines for people: what layers can be put on. Empty where there is the processor alone."""
    return [str(device) for device in devices(lib_dir) if device.type != "CPU"]
