"""The metadata keys of a head's GGUF: those of llama.cpp's `eagle3` architecture, and the target's tokenizer.

Three keys are ours. norm_output: the state after the final norm is fed back. final_norm: written if it
differs from the architecture's default. feature_norm_epsilon: the one captured state first passes the
target's final norm, with this epsilon.
"""

from __future__ import annotations

from collections.abc import Iterator

import gguf
from gguf import GGUFValueType as T

from ...common.gguf_reader import Value
from ...errors import EagleError, ErrorKind
from .config import Config
from .geometry import Geometry
from .rope import Rope
from .target import TargetFile
from .variant import Variant

FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}
_SCALING_TYPES = {str: T.STRING, int: T.UINT32, float: T.FLOAT32}


def build_metadata(
    name: str,
    outtype: str,
    config: Config,
    variant: Variant,
    g: Geometry,
    layers: list[int],
    rope: Rope,
    target: TargetFile,
) -> dict[str, Value]:
    """Key -> value in the order of the file. The writer adds general.architecture itself."""
    out = dict(_general(name, outtype))
    out.update((f"{g.arch}.{key}", value) for key, value in _head(config, variant, g, layers, rope, target))
    return {**out, **target.tokenizer}


def _general(name: str, outtype: str) -> Iterator[tuple[str, Value]]:
    yield "general.type", Value("model", T.STRING)
    yield "general.name", Value(name.encode("utf-8", "replace"), T.STRING)
    yield "general.file_type", Value(int(FILE_TYPES[outtype]), T.UINT32)
    yield "general.quantization_version", Value(gguf.GGML_QUANT_VERSION, T.UINT32)


def _head(
    config: Config, variant: Variant, g: Geometry, layers: list[int], rope: Rope, target: TargetFile
) -> Iterator[tuple[str, Value]]:
    context = config.integer("max_position_embeddings", None) or target.n_ctx or 2048
    sizes = {
        "block_count": len(g.reads_token),
        "context_length": context,
        "embedding_length": g.hidden,
        "feed_forward_length": g.ffn,
        "attention.head_count": g.n_head,
        "attention.head_count_kv": g.n_head_kv,
        "attention.key_length": g.head_dim,
        "attention.value_length": g.head_dim,
        "rope.dimension_count": rope.n_dims,
        "vocab_size": g.target_vocab,
        "target_hidden_size": g.target_hidden,
    }
    for key, size in sizes.items():
        yield key, Value(size, T.UINT32)
    yield "attention.layer_norm_rms_epsilon", Value(config.number("rms_norm_eps", 1e-6), T.FLOAT32)
    yield "rope.freq_base", Value(rope.freq_base, T.FLOAT32)
    for key, value in rope.scaling.items():
        yield f"rope.scaling.{key}", Value(value, _SCALING_TYPES[type(value)])
    yield "target_layers", Value(layers, T.ARRAY, T.INT32)
    yield "norm_before_residual", Value(variant.norm_before_residual, T.BOOL)
    yield "norm_before_fc", Value(config.boolean("norm_before_fc", False), T.BOOL)
    if variant.norm_output:
        yield "norm_output", Value(True, T.BOOL)
    if variant.final_norm != (g.arch == "eagle3"):
        yield "final_norm", Value(variant.final_norm, T.BOOL)
    if g.last_state and layers == [target.n_layer]:
        yield "feature_norm_epsilon", Value(_final_norm_epsilon(target), T.FLOAT32)


def _final_norm_epsilon(target: TargetFile) -> float:
    """Heads of one feature were trained on the state after this norm, Hugging Face's last hidden state."""
    if target.norm_eps is None:
        raise EagleError(
            ErrorKind.UNSUPPORTED,
            f"the target's architecture {target.architecture} has no final RMSNorm, whose output "
            "this head reads",
        )
    return target.norm_eps
