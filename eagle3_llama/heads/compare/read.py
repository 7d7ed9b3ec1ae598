"""Reads a GGUF head, and the weights that its target lends it, for the NumPy reference."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np

from ...common.gguf_reader import Gguf, read_gguf
from ...common.model_reader import read_model
from ...errors import EagleError, ErrorKind
from .reference import ReferenceHead, ReferenceRope

_SHARED = {
    "token_embd.weight": ("token_embd.weight",),
    "output.weight": ("output.weight", "token_embd.weight"),
}


def read_reference(head: Path, target: Path) -> ReferenceHead:
    """Raises EagleError if the file is not a head, or if neither file has a tensor that the head needs."""
    file, lender = read_gguf(head), read_model(target)
    arch = file.string("general.architecture")
    if arch not in ("eagle3", "eagle"):
        raise EagleError(
            ErrorKind.HEAD_MISMATCH, f"{head} is not a head: its general.architecture is {arch!r:.40}"
        )
    n_head = file.size_of(f"{arch}.attention.head_count")
    n_head_kv = file.size_of(f"{arch}.attention.head_count_kv", n_head)
    w = {name: file.floats(name) for name in file.tensors if name not in ("d2t", "rope_freqs.weight")}
    for name, theirs in _SHARED.items():
        if name not in w:
            w[name] = lender.floats(next((n for n in theirs if n in lender.tensors), name))
    if "blk.0.hidden_norm.weight" in w:
        w["blk.0.attn_norm_2.weight"] = w.pop("blk.0.hidden_norm.weight")
    if arch == "eagle":
        w.update({f"fc2.{kind}": w.pop(f"fc.{kind}") for kind in ("weight", "bias") if f"fc.{kind}" in w})
    eps = file.get(f"{arch}.feature_norm_epsilon", 0.0)
    feature_norm = (lender.floats("output_norm.weight"), eps) if eps else None
    if not file.get(f"{arch}.norm_before_fc", False):
        w.pop("enc.output_norm.weight", None)
    head_dim = file.size_of(
        f"{arch}.attention.key_length", file.size_of(f"{arch}.embedding_length") // n_head
    )
    n_dims = file.size_of(f"{arch}.rope.dimension_count", head_dim)
    for name in w:
        if ".attn_q" in name or ".attn_k" in name:
            heads = 1 if "_norm" in name else n_head if ".attn_q." in name else n_head_kv
            w[name] = _half_split(w[name], heads, n_dims)
    return ReferenceHead(
        w,
        n_head,
        n_head_kv,
        head_dim,
        file.get(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5),
        dataclasses.replace(_rope(file, arch), n_dims=n_dims),
        bool(file.get(f"{arch}.norm_before_residual", False)),
        bool(file.get(f"{arch}.norm_output", False)),
        feature_norm,
    )


def _rope(file: Gguf, arch: str) -> ReferenceRope:
    get = lambda key, default: file.get(f"{arch}.rope.{key}", default)
    base, factor = get("freq_base", 10000.0), get("scaling.factor", 1.0)
    if "rope_freqs.weight" in file.tensors:
        return ReferenceRope(base, "llama3", divisors=file.floats("rope_freqs.weight"))
    kind = file.string(f"{arch}.rope.scaling.type", "none")
    context = get("scaling.original_context_length", file.get(f"{arch}.context_length", 4096))
    attention = get("scaling.attn_factor", 1.0) * (1 + 0.1 * math.log(factor) if factor > 1 else 1.0)
    return ReferenceRope(
        base,
        kind if kind in ("linear", "yarn") else None,
        factor,
        context,
        get("scaling.yarn_beta_fast", 32.0),
        get("scaling.yarn_beta_slow", 1.0),
        attention,
    )


def _half_split(w: np.ndarray, n_head: int, n_dims: int) -> np.ndarray:
    """Reorders the rows of q or k, [n_head * d, ...], for rotary embeddings of the first n_dims of d rows.

    llama.cpp rotates the pairs (2i, 2i + 1), Hugging Face (i, i + n_dims / 2).
    """
    heads = w.reshape(n_head, w.shape[0] // n_head, -1)
    turned = [heads[:, first:n_dims:2] for first in (0, 1)]
    return np.concatenate([*turned, heads[:, n_dims:]], axis=1).reshape(w.shape)
