"""`eagle3-llama info`: describes a GGUF file from its metadata."""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf

from ..common.gguf_reader import Gguf
from ..common.model_files import check_file
from ..common.model_reader import read_model
from ..errors import EagleError, ErrorKind
from .auto import would_find

_TEST = "`eagle3-llama convert {} --model TARGET.gguf --out NEW.gguf --self-test` tells"
_HEADS = {"eagle3": "EAGLE-3 head", "eagle": "EAGLE-1 head"}


def describe(path: str | Path) -> list[tuple[str, str]]:
    """Describes a target or a head as (name, value) rows, without reading its weights.

    All parts of a split model count. Raises EagleError as read_model().
    """
    check_file(path, "model")
    file = read_model(path)
    arch = file.string("general.architecture")
    rows = [
        ("file", f"{Path(path).name}, {file.size / 1e6:.1f} MB{_in_parts(file)}"),
        ("kind", _HEADS.get(arch, f"target, architecture {arch}")),
    ]
    name = file.string("general.name", "")
    rows += [("name", name)] if name else []
    return [
        *rows,
        *(_head(file, arch) if arch in _HEADS else _target(file, arch)),
        ("weights", _weights(file)),
        *(() if arch in _HEADS else _found(Path(path))),
    ]


def _found(target: Path) -> Iterator[tuple[str, str]]:
    """The head that `auto` finds. A file that no head can be for, without a tokenizer say, has no row."""
    with contextlib.suppress(EagleError):
        yield "--eagle auto", would_find(target)


def _in_parts(file: Gguf) -> str:
    n = len({t.path for t in file.tensors.values()} | {file.path})
    return f" in {n} files" if n > 1 else ""


def _target(file: Gguf, arch: str) -> Iterator[tuple[str, str]]:
    n_layer = file.size_of(f"{arch}.block_count") - file.size_of(f"{arch}.nextn_predict_layers", 0)
    yield "layers", str(n_layer)
    yield "hidden size", str(file.size_of(f"{arch}.embedding_length"))
    yield "heads", _heads(file, arch)
    yield "vocabulary", str(_n_vocab(file, arch))
    yield "context", str(file.get(f"{arch}.context_length", "unknown"))
    if n_layer > 5:
        layers = [2, n_layer // 2, n_layer - 3]
        yield "EAGLE-3 heads read", f"the inputs of layers {layers}, unless their configuration lists others"


def _head(file: Gguf, arch: str) -> Iterator[tuple[str, str]]:
    layers = file.get(f"{arch}.target_layers", file.get(f"{arch}.extract_layers"))
    if not isinstance(layers, list) or not layers or not all(type(i) is int for i in layers):
        raise EagleError(
            ErrorKind.BAD_VALUE, f"key {arch}.target_layers of {file.path} is missing or not a list of layers"
        )
    hidden = file.size_of(f"{arch}.embedding_length")
    target_hidden, n_vocab = file.size_of(f"{arch}.target_hidden_size", hidden), _n_vocab(file, arch)
    d2t = file.tensors.get("d2t")
    yield "captured layers", f"{layers} (inputs of target layers)"
    if (doubt := _doubt(arch, layers)) is not None:
        yield "are they right?", f"{doubt}: {_TEST.format(Path(file.path).name)}"
    yield "decoder layers", str(file.size_of(f"{arch}.block_count"))
    yield "hidden size", f"{hidden}, the target's {target_hidden}"
    yield "heads", _heads(file, arch)
    yield "draft vocabulary", f"{math.prod(d2t.shape) if d2t else n_vocab} of {n_vocab}"
    yield "variant", ", ".join(_variant(file, arch)) or "plain"
    own = [
        what
        for what, tensor in (("embeddings", "token_embd.weight"), ("output matrix", "output.weight"))
        if tensor in file.tensors
    ]
    yield "has its own", " and ".join(own) or "nothing: embeddings and output matrix are the target's"
    keys = (f"tokenizer.ggml.{key}" for key in ("model", "pre"))
    tokenizer = "/".join(file.string(key, "") for key in keys if key in file.keys)
    tokens = f"{n_vocab} tokens ({tokenizer})" if tokenizer else f"{n_vocab} tokens"
    depth = f"{'' if arch == 'eagle' and max(layers) else 'at least '}{max(layers)} layers"
    yield "fits a target of", f"hidden size {target_hidden}, {tokens}, {depth}"
    if (cell := _cell_bytes(file, arch)) is not None:
        yield (
            "memory",
            f"{file.size / 1e6:.1f} MB, {cell:,} bytes for each token of context, up to 4 MB of graphs, and a"
            " 12th of what the target's weights and cache take",
        )


def _doubt(arch: str, layers: list[int]) -> str | None:
    """A remark on a head's layers, by EAGLE's rule 2, n/2, n-3 for a target of n layers.

    llama.cpp's converter wrote wrong ones for a while (its issue 27040), and such a head still runs.
    """
    if arch != "eagle3" or len(layers) != 3:
        return None
    n = layers[2] + 3
    if layers == [2, n // 2, n - 3]:
        return None
    n = layers[2] + 4
    if layers == [1, n // 2 - 1, n - 4]:
        return f"{layers} are outputs by EAGLE's rule for {n} layers, and as inputs they are one too low"
    return "EAGLE's rule gives 2, n/2, n-3 for n layers, and these are others"


def _variant(file: Gguf, arch: str) -> Iterator[str]:
    for key in ("norm_before_residual", "norm_before_fc", "norm_output"):
        if file.get(f"{arch}.{key}", False):
            yield key
    if file.get(f"{arch}.final_norm", arch == "eagle3") is not (arch == "eagle3"):
        yield "no final norm" if arch == "eagle3" else "final norm"
    for tensor, what in (
        ("fc_norm.weight", "fc_norm"),
        ("fc2.weight", "two projections"),
        ("fc.bias", "fc bias"),
        ("blk.0.attn_q.bias", "attention bias"),
        ("blk.0.attn_q_norm.weight", "q/k norms"),
        ("rope_freqs.weight", "llama3 rope"),
    ):
        if tensor in file.tensors:
            yield what
    if arch == "eagle3" and "fc.weight" not in file.tensors:
        yield "without fc (its feature is the target's last state)"
    rotated, head_dim = (
        file.get(f"{arch}.{key}") for key in ("rope.dimension_count", "attention.key_length")
    )
    if rotated != head_dim and None not in (rotated, head_dim):
        yield f"partial rope ({rotated} of {head_dim} dimensions)"
    scaling = file.string(f"{arch}.rope.scaling.type", "none")
    if scaling != "none":
        yield f"{scaling} rope"
    if f"{arch}.extract_layers" in file.keys:
        yield "keys from before the merge into llama.cpp (extract_layers)"


def _heads(file: Gguf, arch: str) -> str:
    n: Any = file.get(f"{arch}.attention.head_count", "?")
    n_kv: Any = file.get(f"{arch}.attention.head_count_kv", n)
    both = [
        f"{min(x)}..{max(x)}" if isinstance(x, list) and x and all(type(i) is int for i in x) else str(x)[:20]
        for x in (n, n_kv)
    ]
    d = file.get(f"{arch}.attention.key_length")
    return f"{both[0]}, key/value heads {both[1]}" + (f", head size {d}" if type(d) is int else "")


def _cell_bytes(file: Gguf, arch: str) -> int | None:
    """The bytes of a head's keys and values (F16) for one position; None if its keys do not say."""
    n_heads: Any = file.get(f"{arch}.attention.head_count")
    n_kv: Any = file.get(f"{arch}.attention.head_count_kv", n_heads)
    d: Any = file.get(f"{arch}.attention.key_length")
    if d is None and type(n_heads) is int and n_heads > 0:
        d = file.size_of(f"{arch}.embedding_length") // n_heads
    if type(n_kv) is not int or type(d) is not int:
        return None
    return 4 * file.size_of(f"{arch}.block_count") * n_kv * d


def _n_vocab(file: Gguf, arch: str) -> int:
    tokens = file.keys.get("tokenizer.ggml.tokens")
    if tokens is not None and isinstance(tokens.value, list):
        return len(tokens.value)
    return file.size_of(f"{arch}.vocab_size")


def _weights(file: Gguf) -> str:
    """The number of parameters, and the tensor types that take the most bytes."""
    n = sum(math.prod(t.shape) for t in file.tensors.values())
    of_type: collections.Counter[str] = collections.Counter()
    for t in file.tensors.values():
        of_type[t.qtype.name if t.qtype is not None else "unknown type"] += t.n_bytes
    shares = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in of_type.most_common(4))
    file_type = file.get("general.file_type")
    known = {int(t): t.name.removeprefix("MOSTLY_").removeprefix("ALL_") for t in gguf.LlamaFileType}
    label = f" ({known[file_type]})" if type(file_type) is int and file_type in known else ""
    return f"{len(file.tensors)} tensors, {n / 1e6:.1f} M parameters{label}: {shares}"
