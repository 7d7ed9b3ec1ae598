"""Dequantised weights of a target of the llama family: embeddings, output matrix, last layer, norms."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from ..common.model_reader import read_model
from ..errors import EagleError, ErrorKind


@dataclasses.dataclass(frozen=True)
class TargetSizes:
    """The sizes of the target, which its head shares."""

    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_layer: int
    n_vocab: int
    rms_eps: float
    rope_theta: float
    n_ctx: int


class TargetWeights:
    """Reads a model's tensors as float32. Raises EagleError as read_model() does, and MISSING_TENSOR."""

    def __init__(self, path: str | Path) -> None:
        self.file = read_model(path)
        self.path, self.tensors = str(path), self.file.tensors
        self.arch = self.file.string("general.architecture")
        self.shape = self._shape()

    def _shape(self) -> TargetSizes:
        size = lambda key, default=None: self.file.size_of(f"{self.arch}.{key}", default)
        n_embd, n_head = size("embedding_length"), size("attention.head_count")
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None:
            raise EagleError(ErrorKind.MISSING_TENSOR, f"{self.path} has no token_embd.weight")
        return TargetSizes(
            n_embd,
            n_head,
            size("attention.head_count_kv", n_head),
            size("attention.key_length", n_embd // n_head),
            size("feed_forward_length"),
            size("block_count"),
            embedding.shape[0],
            self._number("attention.layer_norm_rms_epsilon"),
            self._number("rope.freq_base", 10000.0),
            size("context_length"),
        )

    def _number(self, key: str, default: float | None = None) -> float:
        value = self.file.get(f"{self.arch}.{key}", default)
        if not isinstance(value, float):
            raise EagleError(
                ErrorKind.BAD_VALUE, f"key {self.arch}.{key} of {self.path} is missing or not a number"
            )
        return value

    def get(self, name: str) -> np.ndarray | None:
        """A tensor as float32, rows first. None if the model does not have it."""
        return self.rows(name) if name in self.tensors else None

    def rows(self, name: str, rows: np.ndarray | None = None) -> np.ndarray:
        """Some rows of a matrix, or all of them."""
        return self.file.floats(name, rows)

    @property
    def output_name(self) -> str:
        """The name of the output matrix. Models with tied weights use the embeddings."""
        return "output.weight" if "output.weight" in self.tensors else "token_embd.weight"

    def last_layer(self) -> dict[str, np.ndarray]:
        """The last layer's tensors by short names, q and k in Hugging Face's half-split rotary layout."""
        prefix, s = f"blk.{self.shape.n_layer - 1}.", self.shape
        names = [n for n in self.tensors if n.startswith(prefix) and n.endswith(".weight")]
        out = {n[len(prefix) : -len(".weight")]: self.rows(n) for n in names}
        if self.arch == "llama":  # the only supported family with llama.cpp's interleaved rotary layout
            for name, heads in (("attn_q", s.n_head), ("attn_k", s.n_head_kv)):
                if name in out:
                    out[name] = half_split(out[name], heads)
        return out


def half_split(w: np.ndarray, n_head: int) -> np.ndarray:
    """Reorders the rows of [n_head * d, n] from llama.cpp's interleaved rotary layout to half-split."""
    d = w.shape[0] // n_head
    return np.ascontiguousarray(w.reshape(n_head, d // 2, 2, -1).swapaxes(1, 2).reshape(w.shape))
