"""Reads pytorch_model.bin. It is a pickle, so torch must have a safe weights_only loader."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import EagleError, ErrorKind
from .safetensors_file import HeadTensor, widen

_MEND = "or save the head as model.safetensors"
_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def read_pickle(path: Path) -> dict[str, HeadTensor]:
    """The tensors of one file.

    Raises EagleError if torch >= 2.10 is not installed, or if the file contains anything but plain tensors.
    """
    torch = _torch(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:  # torch raises many exception types for a file that it refuses
        raise EagleError(
            ErrorKind.BAD_FILE, f"{path} is a pickle that torch.load refuses: {str(e)[:120]}"
        ) from e
    if not isinstance(state, dict):
        raise EagleError(ErrorKind.BAD_VALUE, f"{path} does not contain a dictionary of tensors")
    return {name: _tensor(torch, path, name, value) for name, value in state.items()}


def _torch(path: Path) -> Any:
    try:
        import torch
    except ImportError as e:
        raise EagleError(
            ErrorKind.BAD_FILE, f"{path} is a pickle: install torch >= 2.10 to read it, {_MEND}"
        ) from e
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if version is None or (int(version[1]), int(version[2])) < (2, 10):
        raise EagleError(
            ErrorKind.BAD_FILE,
            f"{path} is a pickle, which torch {torch.__version__} cannot read safely: "
            f"install torch >= 2.10, {_MEND}",
        )
    return torch


def _tensor(torch: Any, path: Path, name: Any, value: Any) -> HeadTensor:
    dense = (
        isinstance(name, str)
        and isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_quantized
    )
    dtype = _NAMES.get(str(value.dtype).removeprefix("torch.")) if dense else None
    if dtype is None:
        raise EagleError(ErrorKind.BAD_VALUE, f"entry {name!r:.60} of {path} is not a plain tensor")

    def read(lo: int, hi: int) -> np.ndarray:
        part = value.detach()[lo:hi].contiguous()
        return widen(part.view(torch.uint16).numpy() if dtype == "BF16" else part.numpy(), dtype)

    return HeadTensor(name, tuple(value.shape), dtype, read)
