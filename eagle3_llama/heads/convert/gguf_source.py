"""Reads a head that is a GGUF already, to change its type or the older keys from before llama.cpp's merge."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from ...common.files import reading
from ...common.gguf_reader import Gguf, TensorInfo, read_gguf
from ...errors import EagleError, ErrorKind
from .config import Config
from .layouts import EAGLE1_GGUF, EAGLE3_GGUF
from .layouts.base import Layout
from .rope import Rope
from .safetensors_file import HeadTensor

_OUTTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16", "Q8_0": "q8_0", "Q4_0": "q4_0"}
_INTEGERS = {"I64": "<i8", "I32": "<i4"}
# GGUF key -> key of config.json
_KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "target_hidden_size": "target_hidden_size",
    "target_layers": "target_layers",
    "extract_layers": "target_layers",
    "norm_before_residual": "norm_before_residual",
    "norm_before_fc": "norm_before_fc",
    "norm_output": "norm_output",
}
_SCALING = ("type", "factor", "original_context_length", "yarn_beta_fast", "yarn_beta_slow", "attn_factor")


def read_gguf_head(path: Path) -> tuple[Config, dict[str, HeadTensor], Layout, Rope, str]:
    """(config with a checkpoint's keys, tensors, layout, rope, type of the matrices).

    Raises EagleError: BAD_FILE, TRUNCATED, BAD_VALUE, HEAD_MISMATCH (not a head).
    """
    file = read_gguf(path)
    arch = file.string("general.architecture")
    if arch not in ("eagle3", "eagle"):
        raise EagleError(
            ErrorKind.HEAD_MISMATCH, f"{path} is not a head: its general.architecture is {arch!r:.40}"
        )
    data = {ours: file.get(f"{arch}.{key}") for key, ours in _KEYS.items() if f"{arch}.{key}" in file.keys}
    final_norm = file.get(f"{arch}.final_norm")
    if final_norm is not None:
        data["eagle_config"] = {"use_last_layernorm": final_norm}
    if arch == "eagle3" and "fc.weight" not in file.tensors:
        data.setdefault("eagle_config", {})["use_aux_hidden_state"] = False
    tensors = {
        name: _tensor(path, info) for name, info in file.tensors.items() if name != "rope_freqs.weight"
    }
    types = [
        info.qtype.name for info in file.tensors.values() if info.qtype is not None and len(info.shape) == 2
    ]
    outtype = _OUTTYPES.get(max(set(types), key=types.count), "f16") if types else "f16"
    return Config(data), tensors, EAGLE3_GGUF if arch == "eagle3" else EAGLE1_GGUF, _rope(file, arch), outtype


def _rope(file: Gguf, arch: str) -> Rope:
    base = file.get(f"{arch}.rope.freq_base", 10000.0)
    if type(base) is not float or not 0 < base < 1e30:
        raise EagleError(
            ErrorKind.BAD_VALUE,
            f"key {arch}.rope.freq_base of {file.path} is {base!r:.40}, expected a positive number",
        )
    head_dim = file.size_of(
        f"{arch}.attention.key_length",
        file.size_of(f"{arch}.embedding_length") // max(1, file.size_of(f"{arch}.attention.head_count")),
    )
    n_dims = file.size_of(f"{arch}.rope.dimension_count", head_dim)
    if not 2 <= n_dims <= head_dim or n_dims % 2:
        raise EagleError(
            ErrorKind.BAD_VALUE,
            f"key {arch}.rope.dimension_count of {file.path} is {n_dims}, expected an even number up to"
            f" {head_dim}, the heads' size",
        )
    prefix = f"{arch}.rope.scaling."
    scaling = {key: file.get(prefix + key) for key in _SCALING if prefix + key in file.keys}
    if "type" in scaling:
        scaling["type"] = file.string(f"{arch}.rope.scaling.type")
    if not all(type(v) in (str, int, float) for v in scaling.values()):
        raise EagleError(ErrorKind.BAD_VALUE, f"keys {arch}.rope.scaling of {file.path} are not numbers")
    factors = file.tensors.get("rope_freqs.weight")
    if factors is None:
        return Rope(base, n_dims, scaling)
    return Rope(base, n_dims, scaling, _tensor(file.path, factors).read_all())


def _tensor(path: Path, info: TensorInfo) -> HeadTensor:
    """A tensor whose entries are read as float32 or int64, whatever its stored type is."""
    qtype = info.qtype
    if qtype is None or not info.shape:
        raise EagleError(
            ErrorKind.UNSUPPORTED, f"tensor {info.name} of {path} has a type that this version does not know"
        )
    dtype, n_rows = qtype.name if qtype.name in _INTEGERS else "F32", info.shape[0]
    block, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
    per_row = info.n_bytes // n_rows if len(info.shape) > 1 and n_rows else block_bytes
    if len(info.shape) == 1 and block != 1:
        raise EagleError(ErrorKind.BAD_VALUE, f"tensor {info.name} of {path} is a quantised vector")

    def read(lo: int, hi: int) -> np.ndarray:
        with reading(path), path.open("rb") as f:
            f.seek(info.offset + lo * per_row)
            data = np.frombuffer(f.read((hi - lo) * per_row), np.uint8)
        if data.size != (hi - lo) * per_row:
            raise EagleError(ErrorKind.TRUNCATED, f"{path} became shorter while it was being read")
        if dtype in _INTEGERS:
            return data.view(_INTEGERS[dtype]).astype(np.int64)
        try:
            shape = (hi - lo, per_row) if len(info.shape) > 1 else -1
            with np.errstate(all="ignore"):  # the writer checks for values that are not finite
                values = gguf.quants.dequantize(data.reshape(shape), qtype)
        except NotImplementedError as e:
            raise EagleError(
                ErrorKind.UNSUPPORTED,
                f"tensor {info.name} of {path} has type {qtype.name}, which the gguf package cannot read",
            ) from e
        return values.astype(np.float32).reshape(hi - lo, *info.shape[1:])

    return HeadTensor(info.name, info.shape, dtype, read)
