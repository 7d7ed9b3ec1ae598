"""Reads the sizes and the tokenizer that a head takes from its target's GGUF."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gguf import GGUFValueType as T

from ...common.gguf_reader import Value
from ...common.model_files import check_models
from ...common.model_reader import read_model
from ...errors import EagleError, ErrorKind

_TOKENS = "tokenizer.ggml.tokens"


@dataclass(frozen=True)
class TargetFile:
    architecture: str
    n_layer: int  # without layers for multi-token prediction
    n_embd: int
    n_vocab: int
    n_ctx: int | None
    norm_eps: float | None  # epsilon of its RMSNorms, if it has them
    tokenizer: dict[str, Value]


def read_target(path: Path) -> TargetFile:
    """Raises EagleError as read_model(), and HEAD_MISMATCH for a file that is a head."""
    check_models(path, whole=False)
    file = read_model(path)
    arch = file.string("general.architecture")
    tokens = file.keys.get(_TOKENS)
    if tokens is None or tokens.item_type is not T.STRING or not tokens.value:
        raise EagleError(
            ErrorKind.BAD_VALUE, f"key {_TOKENS} of {path} is missing: give the target with its tokenizer"
        )
    n_layer = file.size_of(f"{arch}.block_count") - file.size_of(f"{arch}.nextn_predict_layers", 0)
    keys = {k: v for k, v in file.keys.items() if k.startswith("tokenizer.ggml.")}
    tokenizer = {k: v for k, v in keys.items() if v.type is not T.ARRAY or v.value}
    n_ctx = file.size_of(f"{arch}.context_length", 0)
    eps = file.get(f"{arch}.attention.layer_norm_rms_epsilon")
    return TargetFile(
        arch,
        n_layer,
        file.size_of(f"{arch}.embedding_length"),
        len(tokens.value),
        n_ctx or None,
        eps if type(eps) is float and 0 < eps < 1 else None,
        tokenizer,
    )
