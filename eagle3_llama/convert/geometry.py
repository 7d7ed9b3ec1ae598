"""A head's sizes, inferred from its tensors and checked against its config and its target."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ..errors import EagleError, ErrorKind
from .layouts import Layout
from .source import Head
from .target import Target


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Sizes of a head; d2t are absolute target ids [n_vocab_draft] or None where it drafts the whole vocabulary."""

    n_embd: int
    n_embd_target: int
    n_layers_captured: int
    n_head: int
    n_head_kv: int
    n_embd_head: int
    n_ff: int
    n_vocab_draft: int
    norm_eps: float
    rope_theta: float
    n_ctx: int
    d2t: np.ndarray | None
    has_output: bool
    has_embeddings: bool


def number(config: dict[str, Any], key: str, default: float | None = None, least: float = 1, kind: type = int) -> Any:
    """A number of config.json, checked; EagleError BAD_CONFIG names the key."""
    value = config.get(key, default)
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and np.isfinite(value) and least <= value < 1e12
    if not ok or (kind is int and value != int(value)):
        what = "missing" if key not in config else f"{value!r}"
        raise EagleError(ErrorKind.BAD_CONFIG, f"config.json: key {key} is {what}, expected a number of at least {least}")
    return kind(value)


def read_geometry(head: Head, layout: Layout, target: Target) -> Geometry:
    """Infers and checks; EagleError names the tensor or key and both sides of a contradiction."""
    c = head.config
    shape = lambda ours: _matrix(head, layout.tensor(ours))  # noqa: E731
    n_embd, fc_in = shape("fc")
    n_head = number(c, "num_attention_heads")
    n_head_kv = number(c, "num_key_value_heads", n_head)
    n_q, n_kv, n_ff = shape("wq")[0], shape("wk")[0], shape("ffn_gate")[0]
    if n_head % n_head_kv or n_q % n_head or n_kv % n_head_kv:
        raise EagleError(ErrorKind.BAD_CONFIG, f"num_attention_heads {n_head} and num_key_value_heads {n_head_kv} do not divide "
                         f"the {n_q} rows of {layout.tensor('wq')} and {n_kv} of {layout.tensor('wk')}")
    d = n_q // n_head
    n_target = number(c, "target_hidden_size", n_embd)
    _agree("hidden_size", number(c, "hidden_size"), layout.tensor("fc"), n_embd)
    _agree("head_dim", number(c, "head_dim", d), layout.tensor("wq"), d)
    _agree("head_dim", d, layout.tensor("wk"), n_kv // n_head_kv)
    _agree("intermediate_size", number(c, "intermediate_size"), layout.tensor("ffn_gate"), n_ff)
    if d % 2:
        raise EagleError(ErrorKind.WRONG_SHAPE, f"tensor {layout.tensor('wq')} has heads of {d} rows, an odd number")
    if n_target != target.n_embd:
        raise EagleError(ErrorKind.HEAD_MISMATCH, f"the head is for a target of hidden size {n_target}, this target has {target.n_embd}")
    if fc_in % n_target or fc_in == 0:
        raise EagleError(ErrorKind.WRONG_SHAPE, f"tensor {layout.tensor('fc')} takes {fc_in} values, no multiple of the target's hidden size {n_target}")
    if number(c, "num_hidden_layers", 1) != 1:
        raise EagleError(ErrorKind.UNSUPPORTED, "config.json: key num_hidden_layers is not 1: deeper heads are not supported yet")
    _shapes(head, layout, n_embd, n_q, n_kv, n_ff)
    n_draft, d2t = _vocabulary(head, target)
    has_output, has_embeddings = (layout.tensor(k) in head.entries for k in ("output", "tok_embd"))
    _outer_shapes(head, layout, target, n_embd, n_draft, has_output, has_embeddings)
    return Geometry(n_embd, n_target, fc_in // n_target, n_head, n_head_kv, d, n_ff, n_draft,
                    number(c, "rms_norm_eps", 1e-5, 0, float), number(c, "rope_theta", 10000.0, 1, float),
                    number(c, "max_position_embeddings", 2048), d2t, has_output, has_embeddings)


def _matrix(head: Head, name: str) -> tuple[int, int]:
    shape = head.shape(name)
    if len(shape) != 2 or 0 in shape:
        raise EagleError(ErrorKind.WRONG_SHAPE, f"tensor {name} has shape {list(shape)}, expected a matrix")
    return shape  # type: ignore[return-value]


def _agree(key: str, config: int, name: str, found: int) -> None:
    if config != found:
        raise EagleError(ErrorKind.WRONG_SHAPE, f"config.json: key {key} is {config}, but tensor {name} says {found}")


def _expect(head: Head, name: str, *shape: int) -> None:
    if head.shape(name) != shape:
        raise EagleError(ErrorKind.WRONG_SHAPE, f"tensor {name} has shape {list(head.shape(name))}, expected {list(shape)}")


def _shapes(head: Head, layout: Layout, n_embd: int, n_q: int, n_kv: int, n_ff: int) -> None:
    for ours in ("attn_norm", "hidden_norm", "ffn_norm", "output_norm"):
        _expect(head, layout.tensor(ours), n_embd)
    for ours, rows, columns in (("wq", n_q, 2 * n_embd), ("wk", n_kv, 2 * n_embd), ("wv", n_kv, 2 * n_embd), ("wo", n_embd, n_q),
                                ("ffn_gate", n_ff, n_embd), ("ffn_up", n_ff, n_embd), ("ffn_down", n_embd, n_ff)):
        _expect(head, layout.tensor(ours), rows, columns)


def _outer_shapes(head: Head, layout: Layout, target: Target, n_embd: int, n_draft: int, has_output: bool, has_embeddings: bool) -> None:
    if has_output:
        _expect(head, layout.tensor("output"), n_draft, n_embd)
    elif n_draft != target.n_vocab:
        raise EagleError(ErrorKind.MISSING_TENSOR, f"tensor {layout.tensor('output')} is missing, and the draft vocabulary is not the target's")
    if has_embeddings:
        _expect(head, layout.tensor("tok_embd"), target.n_vocab, n_embd)
    elif n_embd != target.n_embd:
        raise EagleError(ErrorKind.MISSING_TENSOR, f"tensor {layout.tensor('tok_embd')} is missing, and the target's has width "
                         f"{target.n_embd} instead of {n_embd}")


def _vocabulary(head: Head, target: Target) -> tuple[int, np.ndarray | None]:
    """Size of the draft vocabulary and target ids; d2t holds offsets: target id = i + d2t[i]."""
    n_vocab = number(head.config, "vocab_size")
    if n_vocab != target.n_vocab:
        raise EagleError(ErrorKind.VOCAB_MISMATCH, f"config.json: key vocab_size is {n_vocab}, the target's vocabulary has {target.n_vocab} tokens")
    n_draft = number(head.config, "draft_vocab_size", n_vocab)
    if "d2t" not in head.entries:
        if n_draft != n_vocab:
            raise EagleError(ErrorKind.MISSING_TENSOR, f"tensor d2t is missing, but draft_vocab_size is {n_draft} of {n_vocab}")
        return n_draft, None
    _expect(head, "d2t", n_draft)
    ids = head.integers("d2t") + np.arange(n_draft)
    bad = np.flatnonzero((ids < 0) | (ids >= n_vocab))
    if len(bad):
        raise EagleError(ErrorKind.BAD_VALUE, f"tensor d2t: entry {bad[0]} names target token {ids[bad[0]]}, outside 0..{n_vocab - 1}")
    values, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise EagleError(ErrorKind.BAD_VALUE, f"tensor d2t: target token {values[counts > 1][0]} is named {counts.max()} times (are these offsets?)")
    if "t2d" in head.entries:
        _expect(head, "t2d", n_vocab)
        if not np.array_equal(np.flatnonzero(head.integers("t2d")), values):
            raise EagleError(ErrorKind.BAD_VALUE, "tensor t2d marks other tokens than d2t names")
    return n_draft, ids
