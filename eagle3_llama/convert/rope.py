"""Scaled rotary embeddings of a head's config, as GGUF keys or factors.

Source of llama3's rule: Hugging Face transformers, modeling_rope_utils.py.
"""

from __future__ import annotations

import math
from typing import Any

import gguf
import numpy as np

from ..errors import EagleError, ErrorKind


def rope_scaling(config: dict[str, Any], n_dims: int, theta: float) -> tuple[list[tuple[str, Any]], np.ndarray | None]:
    """([(GGUFWriter method, value)], frequency factors [n_dims / 2] or None) of config's rope_scaling."""
    scaling = config.get("rope_scaling")
    if scaling is None:
        return [], None
    kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, dict) else None
    if kind == "default":
        return [], None
    if kind not in ("linear", "yarn", "llama3"):
        raise EagleError(ErrorKind.BAD_CONFIG, f"config.json: key rope_scaling has type {kind!r}, known are linear, yarn, llama3")
    factor = _number(scaling, "factor")
    if kind == "llama3":
        return [], _llama3(scaling, factor, n_dims, theta)
    keys: list[tuple[str, Any]] = [("add_rope_scaling_type", gguf.RopeScalingType(kind)), ("add_rope_scaling_factor", factor)]
    if kind == "yarn":
        keys.append(("add_rope_scaling_orig_ctx_len", int(_number(scaling, "original_max_position_embeddings"))))
        if "beta_fast" in scaling:
            keys.append(("add_rope_scaling_yarn_beta_fast", _number(scaling, "beta_fast")))
        if "beta_slow" in scaling:
            keys.append(("add_rope_scaling_yarn_beta_slow", _number(scaling, "beta_slow")))
    return keys, None


def _number(scaling: dict[str, Any], key: str) -> float:
    value = scaling.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or not 0 < value < 1e9:
        raise EagleError(ErrorKind.BAD_CONFIG, f"config.json: key rope_scaling.{key} is {value!r}, expected a number above 0")
    return float(value)


def _llama3(scaling: dict[str, Any], factor: float, n_dims: int, theta: float) -> np.ndarray:
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    context = _number(scaling, "original_max_position_embeddings")
    if low >= high:
        raise EagleError(ErrorKind.BAD_CONFIG, f"config.json: key rope_scaling.low_freq_factor {low} is not below high_freq_factor {high}")
    wavelength = 2 * math.pi * theta ** (np.arange(0, n_dims, 2) / n_dims)
    smooth = np.clip((context / wavelength - low) / (high - low), 0, 1)  # 0: long waves, slowed down; 1: short ones, kept
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
