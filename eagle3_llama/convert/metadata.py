"""The keys of a head's GGUF: upstream llama.cpp's `eagle3` architecture, and the target's tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

import gguf
from gguf import GGUFValueType as T

from ..errors import EagleError, ErrorKind
from .config import Config
from .geometry import Geometry
from .layouts.base import Layout
from .rope import Rope
from .safetensors_file import HeadTensor
from .target import Target, Value

ARCH = "eagle3"
FILE_TYPES = {"f32": gguf.LlamaFileType.ALL_F32, "f16": gguf.LlamaFileType.MOSTLY_F16, "bf16": gguf.LlamaFileType.MOSTLY_BF16,
              "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0, "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0}  # fmt: skip
_SCALING_TYPES = {str: T.STRING, int: T.UINT32, float: T.FLOAT32}


def check_variant(config: Config, layout: Layout, tensors: dict[str, HeadTensor]) -> None:
    """Refuse what the graph does not compute. Raises EagleError UNSUPPORTED or MISSING_TENSOR naming key or tensor."""
    act = config.string("hidden_act", "silu")
    for wrong, key, what in (
        (act != "silu", "hidden_act", f"is {act!r:.40}: only silu is supported"),
        (not config.boolean("norm_output", True), "norm_output", "is false: a head without its final norm is not supported"),
        (not config.boolean("eagle_config.use_aux_hidden_state", True), "eagle_config.use_aux_hidden_state",
         "is false: this is no EAGLE-3 head"),
    ):
        if wrong:
            raise EagleError(ErrorKind.UNSUPPORTED, f"key {key} of config.json {what}")
    flag, there = config.boolean("norm_before_fc", False), "enc.output_norm.weight" in tensors
    name = layout.source_name("enc.output_norm.weight")
    if flag and not there:
        raise EagleError(ErrorKind.MISSING_TENSOR, f"tensor {name} is missing, which key norm_before_fc of config.json asks for")
    if there and not flag:
        raise EagleError(ErrorKind.BAD_CONFIG, "key norm_before_fc of config.json is not true, but there is a "
                         f"tensor {name}: correct the key")  # fmt: skip


def build_metadata(name: str, outtype: str, config: Config, g: Geometry, layers: list[int], rope: Rope,
                   target: Target) -> dict[str, Value]:  # fmt: skip
    """Key -> value, in the order of the file, without general.architecture (the writer's own)."""
    out = dict(_general(name, outtype))
    out.update((f"{ARCH}.{key}", value) for key, value in _head(config, g, layers, rope, target))
    return {**out, **target.tokenizer}


def _general(name: str, outtype: str) -> Iterator[tuple[str, Value]]:
    yield "general.type", Value("model", T.STRING)
    yield "general.name", Value(name.encode("utf-8", "replace"), T.STRING)
    yield "general.file_type", Value(int(FILE_TYPES[outtype]), T.UINT32)
    yield "general.quantization_version", Value(gguf.GGML_QUANT_VERSION, T.UINT32)


def _head(config: Config, g: Geometry, layers: list[int], rope: Rope, target: Target) -> Iterator[tuple[str, Value]]:
    context = config.integer("max_position_embeddings", None) or target.n_ctx or 2048
    sizes = {
        "block_count": 1, "context_length": context, "embedding_length": g.hidden, "feed_forward_length": g.ffn,
        "attention.head_count": g.n_head, "attention.head_count_kv": g.n_head_kv,
        "attention.key_length": g.head_dim, "attention.value_length": g.head_dim,
        "rope.dimension_count": g.head_dim, "vocab_size": g.target_vocab, "target_hidden_size": g.target_hidden,
    }  # fmt: skip
    for key, size in sizes.items():
        yield key, Value(size, T.UINT32)
    yield "attention.layer_norm_rms_epsilon", Value(config.number("rms_norm_eps", 1e-6), T.FLOAT32)
    yield "rope.freq_base", Value(rope.freq_base, T.FLOAT32)
    for key, value in rope.scaling.items():
        yield f"rope.scaling.{key}", Value(value, _SCALING_TYPES[type(value)])
    yield "target_layers", Value(layers, T.ARRAY, T.INT32)
    for key in ("norm_before_residual", "norm_before_fc"):
        yield key, Value(config.boolean(key, False), T.BOOL)
