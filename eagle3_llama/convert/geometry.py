"""A head's sizes, measured on its tensors and held against config.json and the target."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import EagleError, ErrorKind
from .config import Config
from .layouts.base import Layout
from .safetensors_file import FLOATS, HeadTensor
from .target import Target

_OPTIONAL = {"token_embd.weight", "output.weight", "d2t", "t2d", "enc.output_norm.weight"}


@dataclass(frozen=True)
class Geometry:
    hidden: int
    target_hidden: int
    n_features: int  # captured layers
    n_head: int
    n_head_kv: int
    head_dim: int
    ffn: int
    draft_vocab: int
    target_vocab: int

    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """GGUF name -> (shape as in the checkpoint, rows first; the same in words)."""
        h, q, kv = self.hidden, self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        features = self.n_features * self.target_hidden
        norm = ((h,), "hidden_size")
        key_value = ((kv, 2 * h), "num_key_value_heads * head_dim, 2 * hidden_size")
        up = ((self.ffn, h), "intermediate_size, hidden_size")
        return {
            "fc.weight": ((h, features), "hidden_size, layers * target's hidden size"),
            "enc.output_norm.weight": ((features,), "layers * target's hidden size"),
            "blk.0.attn_norm.weight": norm,
            "blk.0.attn_norm_2.weight": norm,
            "blk.0.attn_q.weight": ((q, 2 * h), "num_attention_heads * head_dim, 2 * hidden_size"),
            "blk.0.attn_k.weight": key_value,
            "blk.0.attn_v.weight": key_value,
            "blk.0.attn_output.weight": ((h, q), "hidden_size, num_attention_heads * head_dim"),
            "blk.0.ffn_norm.weight": norm,
            "blk.0.ffn_gate.weight": up,
            "blk.0.ffn_up.weight": up,
            "blk.0.ffn_down.weight": ((h, self.ffn), "hidden_size, intermediate_size"),
            "output_norm.weight": norm,
            "output.weight": ((self.draft_vocab, h), "draft vocabulary, hidden_size"),
            "token_embd.weight": ((self.target_vocab, h), "target's vocabulary, hidden_size"),
            "d2t": ((self.draft_vocab,), "draft vocabulary"),
            "t2d": ((self.target_vocab,), "target's vocabulary"),
        }


def measure(config: Config, layout: Layout, tensors: dict[str, HeadTensor], target: Target) -> Geometry:
    """`tensors` by GGUF name. Raises EagleError naming the tensor or key: MISSING_TENSOR, WRONG_SHAPE, BAD_CONFIG,
    BAD_VALUE (dtype), HEAD_MISMATCH or VOCAB_MISMATCH (another target's head)."""
    hidden, rows = config.integer("hidden_size"), _matrix(layout, tensors, "fc.weight")[0]
    if hidden != rows:
        raise EagleError(ErrorKind.WRONG_SHAPE, f"tensor {layout.source_name('fc.weight')} has {rows} rows, but key hidden_size "
                         f"of config.json is {hidden}")  # fmt: skip
    target_hidden = _target_hidden(config, hidden, tensors, target)
    target_vocab = config.integer("vocab_size", target.n_vocab)
    if target_vocab != target.n_vocab:
        raise EagleError(ErrorKind.VOCAB_MISMATCH, f"key vocab_size of config.json is {target_vocab}, but the "
                         f"target has {target.n_vocab} tokens: give this head's own target")  # fmt: skip
    n_head, n_head_kv, head_dim = _heads(config, layout, tensors)
    g = Geometry(hidden, target_hidden, _n_features(layout, tensors, target_hidden), n_head, n_head_kv, head_dim,
                 _ffn(config, layout, tensors), _draft_vocab(config, layout, tensors, target_vocab), target_vocab)  # fmt: skip
    _check_all(g, layout, tensors)
    _check_shared(g, layout, tensors)
    return g


def _matrix(layout: Layout, tensors: dict[str, HeadTensor], name: str) -> tuple[int, int]:
    tensor = tensors.get(name)
    if tensor is None:
        raise EagleError(ErrorKind.MISSING_TENSOR, f"tensor {layout.source_name(name)} is missing: download the head again")
    if len(tensor.shape) != 2:
        raise EagleError(ErrorKind.WRONG_SHAPE, f"tensor {tensor.name} has shape {list(tensor.shape)}, expected a matrix")
    return tensor.shape  # type: ignore[return-value]


def _target_hidden(config: Config, hidden: int, tensors: dict[str, HeadTensor], target: Target) -> int:
    given = config.integer("target_hidden_size", None)
    if given is not None and given != target.n_embd:
        raise EagleError(ErrorKind.HEAD_MISMATCH, f"key target_hidden_size of config.json is {given}, but the "
                         f"target's hidden size is {target.n_embd}: give this head's own target")  # fmt: skip
    if given is None and hidden != target.n_embd and "token_embd.weight" not in tensors:
        raise EagleError(ErrorKind.HEAD_MISMATCH, f"key hidden_size of config.json is {hidden}, but the target's "
                         f"hidden size is {target.n_embd}: give this head's own target")  # fmt: skip
    return target.n_embd


def _n_features(layout: Layout, tensors: dict[str, HeadTensor], target_hidden: int) -> int:
    width = _matrix(layout, tensors, "fc.weight")[1]
    if width == 0 or width % target_hidden:
        raise EagleError(ErrorKind.WRONG_SHAPE, f"tensor {layout.source_name('fc.weight')} takes {width} values, "
                         f"no multiple of the target's hidden size {target_hidden}: give this head's own target")  # fmt: skip
    return width // target_hidden


def _heads(config: Config, layout: Layout, tensors: dict[str, HeadTensor]) -> tuple[int, int, int]:
    """(heads, heads of keys and values, head_dim); an explicit head_dim need not be hidden_size / heads."""
    q_rows = _matrix(layout, tensors, "blk.0.attn_q.weight")[0]
    k_rows = _matrix(layout, tensors, "blk.0.attn_k.weight")[0]
    n_head = config.integer("num_attention_heads")
    n_head_kv = config.integer("num_key_value_heads", n_head)
    head_dim = config.integer("head_dim", None) or q_rows // n_head
    for key, n, name, rows in (("num_attention_heads", n_head, "blk.0.attn_q.weight", q_rows),
                               ("num_key_value_heads", n_head_kv, "blk.0.attn_k.weight", k_rows)):  # fmt: skip
        if n * head_dim != rows or rows == 0:
            raise EagleError(ErrorKind.WRONG_SHAPE, f"tensor {layout.source_name(name)} has {rows} rows, but "
                             f"{key} {n} * head_dim {head_dim} is {n * head_dim}")  # fmt: skip
    if n_head % n_head_kv:
        raise EagleError(ErrorKind.BAD_CONFIG, f"num_attention_heads {n_head} is no multiple of num_key_value_heads {n_head_kv}")
    if head_dim % 2:
        raise EagleError(ErrorKind.BAD_CONFIG, f"head_dim {head_dim} is odd, which rotary positions do not allow")
    return n_head, n_head_kv, head_dim


def _ffn(config: Config, layout: Layout, tensors: dict[str, HeadTensor]) -> int:
    rows = _matrix(layout, tensors, "blk.0.ffn_gate.weight")[0]
    given = config.integer("intermediate_size", rows if rows else 1)
    if given != rows:
        raise EagleError(ErrorKind.WRONG_SHAPE, f"tensor {layout.source_name('blk.0.ffn_gate.weight')} has {rows} "
                         f"rows, but intermediate_size is {given}")  # fmt: skip
    return rows


def _draft_vocab(config: Config, layout: Layout, tensors: dict[str, HeadTensor], target_vocab: int) -> int:
    d2t = tensors.get("d2t")
    if d2t is not None:
        n = d2t.shape[0] if len(d2t.shape) == 1 else 0
        if not 1 <= n <= target_vocab:
            raise EagleError(ErrorKind.WRONG_SHAPE, f"tensor {d2t.name} has shape {list(d2t.shape)}, expected "
                             f"1..{target_vocab} entries, one a draft token")  # fmt: skip
    else:
        n = _matrix(layout, tensors, "output.weight")[0] if "output.weight" in tensors else target_vocab
        if n != target_vocab:
            raise EagleError(ErrorKind.MISSING_TENSOR, f"tensor {layout.source_name('d2t')} is missing, and "
                             f"lm_head.weight has {n} rows, not the target's {target_vocab}: download the head "
                             "again")  # fmt: skip
    given = config.integer("draft_vocab_size", n)
    if given != n:
        raise EagleError(ErrorKind.WRONG_SHAPE, f"key draft_vocab_size of config.json is {given}, but tensor "
                         f"{layout.source_name('d2t') if d2t else 'lm_head.weight'} stands for {n} tokens")  # fmt: skip
    return n


def _check_all(g: Geometry, layout: Layout, tensors: dict[str, HeadTensor]) -> None:
    for name, (shape, words) in g.shapes().items():
        tensor = tensors.get(name)
        if tensor is None:
            if name in _OPTIONAL:
                continue
            raise EagleError(ErrorKind.MISSING_TENSOR, f"tensor {layout.source_name(name)} is missing: download the head again")
        if tensor.shape != shape:
            raise EagleError(ErrorKind.WRONG_SHAPE, f"tensor {tensor.name} has shape {list(tensor.shape)}, "
                             f"expected {list(shape)} ({words})")  # fmt: skip
        if (tensor.dtype in FLOATS) != (name not in ("d2t", "t2d")):
            raise EagleError(ErrorKind.BAD_VALUE, f"tensor {tensor.name} has dtype {tensor.dtype}, expected "
                             f"{'integers' if tensor.dtype in FLOATS else 'F32, F16 or BF16'}")  # fmt: skip


def _check_shared(g: Geometry, layout: Layout, tensors: dict[str, HeadTensor]) -> None:
    """That the target can lend what the head has not."""
    if "output.weight" not in tensors and g.draft_vocab != g.target_vocab:
        raise EagleError(ErrorKind.MISSING_TENSOR, f"tensor {layout.source_name('output.weight')} is missing, and "
                         f"the target's has {g.target_vocab} rows, not {g.draft_vocab}")  # fmt: skip
    for name in ("token_embd.weight", "output.weight"):
        if name not in tensors and g.hidden != g.target_hidden:
            raise EagleError(ErrorKind.MISSING_TENSOR, f"tensor {layout.source_name(name)} is missing, and the "
                             f"target's has width {g.target_hidden}, not {g.hidden}")  # fmt: skip
