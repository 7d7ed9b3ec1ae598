#!/usr/bin/env python3
"""Says which operations of our graphs each device computes. What it does not compute, the processor does.

    scripts/device/operations.py

A run of the tests on a machine with a device has tested the device only as far as this says. GitHub's macOS
runners have a GPU that multiplies no matrices. There the last line is a warning that its pages show.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eagle3_llama.runtime import devices, hook, library

F32, F16, Q8_0, Q4_K, I32, I64 = 0, 1, 8, 12, 26, 27  # ggml_type
NEEDED = "MUL_MAT Q4_K"  # without it, a device computes nothing that counts


class _Parameters(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("memory", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def main() -> int:
    asked, tested = ggml(), False
    for i, device in enumerate(devices.devices(asked.folder)):
        if device.type == "CPU":
            continue
        answers = {name: asked.computes(i, tensor) for name, tensor in asked.graph()}
        of = lambda wanted, answers=answers: ", ".join(n for n, is_so in answers.items() if is_so == wanted)
        print(device, f"  computes {of(True) or 'nothing'}", sep="\n")
        print(f"  does not compute {of(False) or 'nothing'}")
        tested = tested or answers[NEEDED]
    if not tested:
        words = "no device computed a product: this run tested the processor alone"
        print(f"::warning::{words}" if os.environ.get("GITHUB_ACTIONS") else words)
    return 0


def ggml() -> Ggml:
    library.load()
    folder = library.find_lib_dir()
    assert folder is not None
    return Ggml(folder)


class Ggml:
    """What is called of libggml. Tensors have no data: only their shapes and types are asked about."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("ggml-base", "ggml"):
            self.lib = ctypes.CDLL(str(folder / f"lib{name}{hook.SUFFIX}"), ctypes.RTLD_GLOBAL)
        self.lib.ggml_init.argtypes, self.lib.ggml_init.restype = [_Parameters], ctypes.c_void_p
        self.context = ctypes.c_void_p(self.lib.ggml_init(_Parameters(1 << 20, None, True)))

    def __getattr__(self, name: str) -> Any:
        """ggml_NAME with the context before its arguments. Its result is a tensor."""
        function = getattr(self.lib, f"ggml_{name}")
        function.restype = ctypes.c_void_p
        return lambda *given: ctypes.c_void_p(function(self.context, *given))

    def tensor(self, kind: int, *size: int) -> ctypes.c_void_p:
        sizes = [ctypes.c_int64(n) for n in (*size, 1, 1, 1)[:4]]
        return self.new_tensor_4d(ctypes.c_int(kind), *sizes)

    def computes(self, index: int, tensor: ctypes.c_void_p) -> bool:
        self.lib.ggml_backend_dev_get.restype = ctypes.c_void_p
        self.lib.ggml_backend_dev_supports_op.restype = ctypes.c_bool
        device = ctypes.c_void_p(self.lib.ggml_backend_dev_get(ctypes.c_size_t(index)))
        return bool(self.lib.ggml_backend_dev_supports_op(device, tensor))

    def graph(self) -> Iterator[tuple[str, ctypes.c_void_p]]:
        """The operations of a head of 1,024 with heads of 128, and of its target, by their names."""
        n, d, rows, vocabulary, cells = 1024, 128, 4, 32000, 256
        number, real = ctypes.c_int, ctypes.c_float
        x, ids = self.tensor(F32, n, rows), self.tensor(I32, rows)
        for name, kind in (("F16", F16), ("Q8_0", Q8_0), ("Q4_K", Q4_K)):
            matrix = self.tensor(kind, n, vocabulary)
            yield f"GET_ROWS {name}", self.get_rows(matrix, ids)
            yield f"MUL_MAT {name}", self.mul_mat(matrix, x)
        yield "ADD", self.add(x, x)
        yield "MUL", self.mul(x, self.tensor(F32, n))
        yield "RMS_NORM", self.rms_norm(x, real(1e-5))
        yield "CONCAT", self.concat(x, x, number(0))
        yield "GLU", self.swiglu_split(x, x)
        yield "ROPE", self.rope(self.tensor(F32, d, 8, rows), ids, number(d), number(0))
        yield "SET_ROWS", self.set_rows(self.tensor(F16, n, cells), x, self.tensor(I64, rows))
        q, k, v = self.tensor(F32, d, rows, 8), self.tensor(F16, d, cells, 2), self.tensor(F16, d, cells, 2)
        mask = self.tensor(F16, cells, rows)
        yield "FLASH_ATTN_EXT", self.flash_attn_ext(q, k, v, mask, real(0.1), real(0), real(0))
        logits = self.tensor(F32, vocabulary, rows)
        yield "SOFT_MAX", self.soft_max(logits)
        yield "REPEAT", self.repeat(self.tensor(F32, n, 1), x)
        yield "CPY", self.cast(self.tensor(F32, cells, rows), number(F16))
        yield "ARGMAX", self.argmax(logits)
        yield "TOP_K", self.top_k(logits, number(10))


if __name__ == "__main__":
    sys.exit(main())
