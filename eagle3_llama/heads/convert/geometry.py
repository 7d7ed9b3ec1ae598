"""The sizes of a head, taken from its tensors and checked against config.json and the target."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...errors import EagleError, ErrorKind
from .config import Config
from .layouts.base import Layout
from .safetensors_file import FLOATS, HeadTensor
from .target import TargetFile
from .variant import Variant

_VOCABULARY = ("token_embd.weight", "output.weight", "d2t", "t2d")
_OPTIONAL = (*_VOCABULARY, "enc.output_norm.weight", "rope_freqs.weight", "fc2.bias")
_OPTIONAL_ENDS = (".bias", "attn_q_norm.weight", "attn_k_norm.weight")


@dataclass(frozen=True)
class Geometry:
    arch: str  # eagle3, or eagle for EAGLE-1
    hidden: int
    target_hidden: int
    n_features: int  # captured layers
    n_head: int
    n_head_kv: int
    head_dim: int
    ffn: int
    draft_vocab: int
    target_vocab: int
    reads_token: tuple[bool, ...]  # for each decoder layer: its attention input includes the token embedding
    final_norm: bool
    projected: bool  # fc2 computes the state that enters the first layer
    last_state: bool  # the one feature is the target's last state after its final norm

    @property
    def fuses(self) -> bool:
        """True if fc makes one state of the features. Without it the one feature is this state."""
        return self.arch == "eagle3" and not self.last_state

    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """GGUF name -> (shape with rows first, the same in words), in the order of the file."""
        h, features = self.hidden, self.n_features * self.target_hidden
        out: dict[str, tuple[tuple[int, ...], str]]
        doubled = ((h, 2 * h), "hidden_size, 2 * hidden_size")
        fused = ((h, features), "hidden_size, layers * target's hidden size")
        bias, norm = ((h,), "hidden_size"), ((self.target_hidden,), "target's hidden size")
        out = {}
        if self.fuses or self.arch == "eagle":
            out = {"fc.weight": fused if self.fuses else doubled, "fc.bias": bias}
        if self.projected:
            out.update({"fc2.weight": doubled, "fc2.bias": bias})
        if self.fuses:
            out["enc.output_norm.weight"] = ((features,), "layers * target's hidden size")
            out.update({f"fc_norm.{i}.weight": norm for i in range(self.n_features)})
            out["fc_norm.weight"] = ((self.n_features, self.target_hidden), "layers, target's hidden size")
        out["rope_freqs.weight"] = ((self.head_dim // 2,), "head_dim / 2")
        for i, reads_token in enumerate(self.reads_token):
            out.update({f"blk.{i}.{name}": shape for name, shape in self._block(reads_token).items()})
        if self.final_norm:
            out["output_norm.weight"] = ((h,), "hidden_size")
        return {
            **out,
            "output.weight": ((self.draft_vocab, h), "draft vocabulary, hidden_size"),
            "token_embd.weight": ((self.target_vocab, h), "target's vocabulary, hidden_size"),
            "d2t": ((self.draft_vocab,), "draft vocabulary"),
            "t2d": ((self.target_vocab,), "target's vocabulary"),
        }

    def _block(self, reads_token: bool) -> dict[str, tuple[tuple[int, ...], str]]:
        h, q, kv = self.hidden, self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        width, width_words = (2 * h, "2 * hidden_size") if reads_token else (h, "hidden_size")
        query, key_value = "num_attention_heads * head_dim", "num_key_value_heads * head_dim"
        norm = ((h,), "hidden_size")
        return {
            "attn_norm.weight": norm,
            **({"attn_norm_2.weight": norm} if reads_token else {}),
            "attn_q.weight": ((q, width), f"{query}, {width_words}"),
            "attn_q.bias": ((q,), query),
            "attn_k.weight": ((kv, width), f"{key_value}, {width_words}"),
            "attn_k.bias": ((kv,), key_value),
            "attn_v.weight": ((kv, width), f"{key_value}, {width_words}"),
            "attn_v.bias": ((kv,), key_value),
            "attn_q_norm.weight": ((self.head_dim,), "head_dim"),
            "attn_k_norm.weight": ((self.head_dim,), "head_dim"),
            "attn_output.weight": ((h, q), f"hidden_size, {query}"),
            "attn_output.bias": norm,
            "ffn_norm.weight": norm,
            "ffn_gate.weight": ((self.ffn, h), "intermediate_size, hidden_size"),
            "ffn_gate.bias": ((self.ffn,), "intermediate_size"),
            "ffn_up.weight": ((self.ffn, h), "intermediate_size, hidden_size"),
            "ffn_up.bias": ((self.ffn,), "intermediate_size"),
            "ffn_down.weight": ((h, self.ffn), "hidden_size, intermediate_size"),
            "ffn_down.bias": norm,
        }

    def optional(self, name: str) -> bool:
        """True if a head can lack this tensor: only some variants have it, or the target can lend it."""
        bare_input = self.arch == "eagle" and name == "blk.0.attn_norm.weight"
        return name in _OPTIONAL or name.endswith(_OPTIONAL_ENDS) or name.startswith("fc_norm.") or bare_input


def measure(
    config: Config, layout: Layout, tensors: dict[str, HeadTensor], target: TargetFile, variant: Variant
) -> Geometry:
    """Measures a head. tensors: by GGUF name.

    Raises EagleError, which names the tensor or key: MISSING_TENSOR, WRONG_SHAPE, BAD_CONFIG, BAD_VALUE
    (dtype), HEAD_MISMATCH or VOCAB_MISMATCH (the head was trained for another target).
    """
    hidden, has_fc = config.integer("hidden_size"), layout.arch == "eagle" or not variant.last_state
    measured = "fc.weight" if has_fc else "blk.0.attn_output.weight"
    rows = _matrix(layout, tensors, measured)[0]
    if hidden != rows:
        raise EagleError(
            ErrorKind.WRONG_SHAPE,
            f"tensor {layout.source_name(measured)} has {rows} rows, but key hidden_size "
            f"of config.json is {hidden}",
        )
    target_hidden = _target_hidden(config, hidden, tensors, target, variant.last_state)
    target_vocab = config.integer("vocab_size", target.n_vocab)
    if target_vocab != target.n_vocab:
        raise EagleError(
            ErrorKind.VOCAB_MISMATCH,
            f"key vocab_size of config.json is {target_vocab}, but the "
            f"target has {target.n_vocab} tokens: give this head's own target",
        )
    n_head, n_head_kv, head_dim = _heads(config, layout, tensors)
    g = Geometry(
        layout.arch,
        hidden,
        target_hidden,
        1 if variant.last_state else _n_features(layout, tensors, target_hidden),
        n_head,
        n_head_kv,
        head_dim,
        _ffn(config, layout, tensors),
        _draft_vocab(config, layout, tensors, target_vocab),
        target_vocab,
        _blocks(config, layout, tensors),
        variant.final_norm,
        "fc2.weight" in tensors,
        variant.last_state,
    )
    _check_all(g, layout, tensors)
    _check_shared(g, layout, tensors)
    return g


def _matrix(layout: Layout, tensors: dict[str, HeadTensor], name: str) -> tuple[int, int]:
    tensor = tensors.get(name)
    if tensor is None:
        raise EagleError(
            ErrorKind.MISSING_TENSOR, f"tensor {layout.source_name(name)} is missing: download the head again"
        )
    if len(tensor.shape) != 2:
        raise EagleError(
            ErrorKind.WRONG_SHAPE, f"tensor {tensor.name} has shape {list(tensor.shape)}, expected a matrix"
        )
    return tensor.shape[0], tensor.shape[1]


def _blocks(config: Config, layout: Layout, tensors: dict[str, HeadTensor]) -> tuple[bool, ...]:
    numbers = {int(found[1]) for name in tensors if (found := re.match(r"blk\.(\d+)\.", name))}
    n = len(numbers)
    if numbers != set(range(n)):
        raise EagleError(
            ErrorKind.MISSING_TENSOR,
            f"the head has decoder layers {sorted(numbers)}: one is missing, download it again",
        )
    given = config.integer("num_hidden_layers", n)
    if given != n:
        raise EagleError(
            ErrorKind.WRONG_SHAPE,
            f"key num_hidden_layers of config.json is {given}, but there are tensors for {n} "
            f"decoder layers, up to {layout.source_name(f'blk.{n - 1}.attn_q.weight')}",
        )
    first = layout.arch == "eagle3" and "fc2.weight" not in tensors
    return tuple(first and i == 0 or f"blk.{i}.attn_norm_2.weight" in tensors for i in range(n))


def _target_hidden(
    config: Config, hidden: int, tensors: dict[str, HeadTensor], target: TargetFile, last_state: bool
) -> int:
    given = config.integer("target_hidden_size", None)
    if given is not None and given != target.n_embd:
        raise EagleError(
            ErrorKind.HEAD_MISMATCH,
            f"key target_hidden_size of config.json is {given}, but the "
            f"target's hidden size is {target.n_embd}: give this head's own target",
        )
    if hidden != target.n_embd and (last_state or given is None and "token_embd.weight" not in tensors):
        raise EagleError(
            ErrorKind.HEAD_MISMATCH,
            f"key hidden_size of config.json is {hidden}, but the target's "
            f"hidden size is {target.n_embd}: give this head's own target",
        )
    return target.n_embd


def _n_features(layout: Layout, tensors: dict[str, HeadTensor], target_hidden: int) -> int:
    width = _matrix(layout, tensors, "fc.weight")[1]
    if width == 0 or width % target_hidden:
        raise EagleError(
            ErrorKind.WRONG_SHAPE,
            f"tensor {layout.source_name('fc.weight')} has {width} columns, which is not "
            f"a multiple of the target's hidden size {target_hidden}: give this head's own target",
        )
    return width // target_hidden


def _heads(config: Config, layout: Layout, tensors: dict[str, HeadTensor]) -> tuple[int, int, int]:
    """(attention heads, key/value heads, head_dim). A given head_dim may differ from hidden_size / heads."""
    q_rows = _matrix(layout, tensors, "blk.0.attn_q.weight")[0]
    k_rows = _matrix(layout, tensors, "blk.0.attn_k.weight")[0]
    n_head = config.integer("num_attention_heads")
    n_head_kv = config.integer("num_key_value_heads", n_head)
    head_dim = config.integer("head_dim", None) or q_rows // n_head
    for key, n, name, rows in (
        ("num_attention_heads", n_head, "blk.0.attn_q.weight", q_rows),
        ("num_key_value_heads", n_head_kv, "blk.0.attn_k.weight", k_rows),
    ):
        if n * head_dim != rows or rows == 0:
            raise EagleError(
                ErrorKind.WRONG_SHAPE,
                f"tensor {tensors[name].name} has {rows} rows, but "
                f"{key} {n} * head_dim {head_dim} is {n * head_dim}",
            )
    if n_head % n_head_kv:
        raise EagleError(
            ErrorKind.BAD_CONFIG,
            f"num_attention_heads {n_head} is not a multiple of num_key_value_heads {n_head_kv}",
        )
    if head_dim % 2:
        raise EagleError(
            ErrorKind.BAD_CONFIG, f"head_dim {head_dim} is odd, but rotary embeddings need an even one"
        )
    return n_head, n_head_kv, head_dim


def _ffn(config: Config, layout: Layout, tensors: dict[str, HeadTensor]) -> int:
    rows = _matrix(layout, tensors, "blk.0.ffn_gate.weight")[0]
    given = config.integer("intermediate_size", rows if rows else 1)
    if given != rows:
        raise EagleError(
            ErrorKind.WRONG_SHAPE,
            f"tensor {tensors['blk.0.ffn_gate.weight'].name} has {rows} "
            f"rows, but intermediate_size is {given}",
        )
    return rows


def _draft_vocab(config: Config, layout: Layout, tensors: dict[str, HeadTensor], target_vocab: int) -> int:
    d2t = tensors.get("d2t")
    if d2t is not None:
        n = d2t.shape[0] if len(d2t.shape) == 1 else 0
        if not 1 <= n <= target_vocab:
            raise EagleError(
                ErrorKind.WRONG_SHAPE,
                f"tensor {d2t.name} has shape {list(d2t.shape)}, expected "
                f"1..{target_vocab} entries, one per draft token",
            )
    else:
        n = _matrix(layout, tensors, "output.weight")[0] if "output.weight" in tensors else target_vocab
        if n != target_vocab:
            raise EagleError(
                ErrorKind.MISSING_TENSOR,
                f"tensor {layout.source_name('d2t')} is missing, and "
                f"lm_head.weight has {n} rows, not the target's {target_vocab}: download the head again",
            )
    given = config.integer("draft_vocab_size", n)
    if given != n:
        raise EagleError(
            ErrorKind.WRONG_SHAPE,
            f"key draft_vocab_size of config.json is {given}, but tensor "
            f"{layout.source_name('d2t') if d2t else 'lm_head.weight'} has {n} tokens",
        )
    return n


def _check_all(g: Geometry, layout: Layout, tensors: dict[str, HeadTensor]) -> None:
    shapes = g.shapes()
    for name in tensors:
        if name not in shapes:
            raise EagleError(
                ErrorKind.UNSUPPORTED,
                f"tensor {tensors[name].name} does not belong to a known variant: the head is not supported",
            )
    for name, (shape, words) in shapes.items():
        tensor = tensors.get(name)
        if tensor is None:
            if g.optional(name):
                continue
            raise EagleError(
                ErrorKind.MISSING_TENSOR,
                f"tensor {layout.source_name(name)} is missing: download the head again",
            )
        if tensor.shape != shape:
            raise EagleError(
                ErrorKind.WRONG_SHAPE,
                f"tensor {tensor.name} has shape {list(tensor.shape)}, expected {list(shape)} ({words})",
            )
        if (tensor.dtype in FLOATS) != (name not in ("d2t", "t2d")):
            raise EagleError(
                ErrorKind.BAD_VALUE,
                f"tensor {tensor.name} has dtype {tensor.dtype}, expected "
                f"{'integers' if tensor.dtype in FLOATS else 'F32, F16 or BF16'}",
            )
    _check_pairs(g, layout, tensors)


def _check_pairs(g: Geometry, layout: Layout, tensors: dict[str, HeadTensor]) -> None:
    """Checks that tensors which belong together are all there, or all missing."""
    together = [[f"fc_norm.{i}.weight" for i in range(g.n_features)]]
    for i in range(len(g.reads_token)):
        together += [
            [f"blk.{i}.attn_{x}_norm.weight" for x in "qk"],
            [f"blk.{i}.attn_{x}.bias" for x in "qkv"],
            [f"blk.{i}.ffn_{x}.bias" for x in ("gate", "up", "down")],
        ]
    for names in together:
        missing = [n for n in names if n not in tensors]
        if missing and len(missing) < len(names):
            there = next(n for n in names if n in tensors)
            raise EagleError(
                ErrorKind.MISSING_TENSOR,
                f"tensor {layout.source_name(missing[0])} is missing, but {tensors[there].name} is there: "
                "download the head again",
            )


def _check_shared(g: Geometry, layout: Layout, tensors: dict[str, HeadTensor]) -> None:
    """Checks that the target's matrices fit where the head has none of its own."""
    if "output.weight" not in tensors and g.draft_vocab != g.target_vocab:
        raise EagleError(
            ErrorKind.MISSING_TENSOR,
            f"tensor {layout.source_name('output.weight')} is missing, and the target's output matrix "
            f"has {g.target_vocab} rows, not {g.draft_vocab}: download the head again",
        )
    for name in ("token_embd.weight", "output.weight"):
        if name not in tensors and g.hidden != g.target_hidden:
            raise EagleError(
                ErrorKind.MISSING_TENSOR,
                f"tensor {layout.source_name(name)} is missing, and the target's tensor "
                f"has {g.target_hidden} columns, not {g.hidden}: download the head again",
            )
