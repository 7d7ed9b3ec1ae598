"""A head's rotary embeddings, as GGUF keys and, for Llama 3, one factor per frequency."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from ...errors import EagleError, ErrorKind
from .config import Config, bad

_PLAIN = (None, "default", "none", "mrope")  # for text, all sections of mrope have the same position


@dataclass(frozen=True)
class Rope:
    freq_base: float
    n_dims: int  # the first dimensions of a head that are rotated; the others have no position
    scaling: dict[str, str | float | int] = field(default_factory=dict)  # keys after "eagle3.rope.scaling."
    factors: np.ndarray | None = None  # rope_freqs.weight: float32 [n_dims / 2], frequency divisors


def read_rope(config: Config, head_dim: int) -> Rope:
    """Raises EagleError BAD_CONFIG, also for a rope_type that llama.cpp does not have."""
    where = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    base = config.number("rope_theta", None) or config.number(f"{where}.rope_theta", 10000.0)
    n_dims = _rotated_dims(config, where, head_dim)
    kind = config.string(f"{where}.rope_type", None) or config.string(f"{where}.type", None)
    if kind in _PLAIN:
        return Rope(base, n_dims)
    if kind == "linear":
        return Rope(base, n_dims, {"type": "linear", "factor": config.number(f"{where}.factor")})
    if kind == "yarn":
        return Rope(base, n_dims, _yarn(config, where))
    if kind == "llama3":
        return Rope(base, n_dims, factors=_llama3_factors(config, where, base, n_dims))
    raise EagleError(
        ErrorKind.BAD_CONFIG,
        f"key {where}.rope_type of config.json is {kind!r:.40}, expected linear, llama3 or yarn",
    )


def _rotated_dims(config: Config, where: str, head_dim: int) -> int:
    """As transformers counts them: partial_rotary_factor of the head, without a fraction."""
    key = "partial_rotary_factor"
    if config.get(key) is None:
        key = f"{where}.{key}"
    factor = config.number(key, 1.0)
    n = int(head_dim * factor)
    if factor > 1 or n < 2 or n % 2:
        raise bad(key, f"is {factor}: of head_dim {head_dim} it leaves {n}, expected an even number up to it")
    return n


def _yarn(config: Config, where: str) -> dict[str, str | float | int]:
    factor = config.number(f"{where}.factor")
    original = config.integer(f"{where}.original_max_position_embeddings", None) or config.integer(
        "max_position_embeddings"
    )
    out: dict[str, str | float | int] = {
        "type": "yarn",
        "factor": factor,
        "original_context_length": original,
    }
    for key in ("beta_fast", "beta_slow"):
        value = config.number(f"{where}.{key}", None)
        if value is not None:
            out[f"yarn_{key}"] = value
    # ggml itself multiplies by 1 + 0.1 ln(factor), which is the default of transformers
    attention = _attention_factor(config, where, factor) / _mscale(factor, 1.0)
    if not math.isclose(attention, 1.0):
        out["attn_factor"] = attention
    return out


def _attention_factor(config: Config, where: str, factor: float) -> float:
    given = config.number(f"{where}.attention_factor", None)
    scale, all_dim = (
        config.number(f"{where}.{key}", None, zero=True) for key in ("mscale", "mscale_all_dim")
    )
    if given is not None:
        return given
    return _mscale(factor, scale) / _mscale(factor, all_dim) if scale and all_dim else _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 + 0.1 * weight * math.log(factor) if factor > 1.0 else 1.0


def _llama3_factors(config: Config, where: str, base: float, n_dims: int) -> np.ndarray:
    """Divisors, [n_dims / 2]: 1 for short wavelengths, `factor` for long ones, interpolated in between.

    The same as llama3 in transformers.
    """
    factor = config.number(f"{where}.factor")
    low, high = config.number(f"{where}.low_freq_factor"), config.number(f"{where}.high_freq_factor")
    original = config.integer(f"{where}.original_max_position_embeddings")
    if not low < high:
        raise EagleError(
            ErrorKind.BAD_CONFIG,
            f"key {where}.high_freq_factor of config.json is {high}, expected "
            f"more than low_freq_factor {low}",
        )
    wavelength = 2 * math.pi * base ** (np.arange(0, n_dims, 2, dtype=np.float64) / n_dims)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)  # 0 long, 1 short
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)
