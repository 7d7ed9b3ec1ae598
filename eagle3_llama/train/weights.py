"""Dequantised weights of a target of the llama family: embeddings, output matrix, last layer, norms."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np

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
    """Reads tensors of a GGUF as float32. Raises EagleError BAD_FILE, BAD_CONFIG, MISSING_TENSOR."""

    def __init__(self, path: str | Path) -> None:
        try:
            self.reader = gguf.GGUFReader(str(path))
        except (OSError, ValueError, KeyError, IndexError) as e:
            raise EagleError(ErrorKind.BAD_FILE, f"{path} is not a readable GGUF: {e}") from e
        self.path, self.tensors = str(path), {t.name: t for t in self.reader.tensors}
        self.arch = str(self._field("general.architecture"))
        self.shape = self._shape()

    def _field(self, key: str, default: object = None) -> Any:
        field = self.reader.get_field(key)
        if field is None:
            if default is None:
                raise EagleError(ErrorKind.BAD_CONFIG, f"{self.path} has no key {key}")
            return default
        return field.contents()

    def _shape(self) -> TargetSizes:
        get = lambda key, default=None: self._field(f"{self.arch}.{key}", default)
        n_embd, n_head = int(get("embedding_length")), int(get("attention.head_count"))
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None:
            raise EagleError(ErrorKind.MISSING_TENSOR, f"{self.path} has no token_embd.weight")
        return TargetSizes(
            n_embd,
            n_head,
            int(get("attention.head_count_kv", n_head)),
            int(get("attention.key_length", n_embd // n_head)),
            int(get("feed_forward_length")),
            int(get("block_count")),
            int(embedding.shape[1]),
            float(get("attention.layer_norm_rms_epsilon")),
            float(get("rope.freq_base", 10000.0)),
            int(get("context_length")),
        )

    def get(self, name: str) -> np.ndarray | None:
        """A tensor as float32, rows first. None if the model does not have it."""
        t = self.tensors.get(name)
        return None if t is None else self.rows(name)

    def rows(self, name: str, rows: np.ndarray | None = None) -> np.ndarray:
        """Some rows of a matrix, or all of them."""
        t = self.tensors[name]
        data = t.data if rows is None else t.data[rows]
        return np.array(gguf.quants.dequantize(data, t.tensor_type), np.float32)

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
