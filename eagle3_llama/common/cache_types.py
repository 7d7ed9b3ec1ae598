"""The types that keys and values can have in a target's KV cache, by llama.cpp's names."""

from __future__ import annotations

from ..errors import EagleError, ErrorKind

# ggml's numbers; loading this reads no native code
CACHE_TYPES = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q8_0": 8,
    "q4_0": 2,
    "q4_1": 3,
    "iq4_nl": 20,
    "q5_0": 6,
    "q5_1": 7,
}
WHOLE = ("f32", "f16", "bf16")  # not quantised


def check_cache_types(k: str, v: str, flash_attn: bool | None) -> None:
    """Raises EagleError BAD_ARGUMENT for unknown types, and for values that need flash attention."""
    for name, given in (("cache_type_k", k), ("cache_type_v", v)):
        if given not in CACHE_TYPES:
            known = ", ".join(CACHE_TYPES)
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"{name} is {given!r:.40}, expected one of {known}")
    if flash_attn is False and v not in WHOLE:
        message = f"cache_type_v is {v}: only flash attention reads quantised values"
        raise EagleError(ErrorKind.BAD_ARGUMENT, f"{message}: leave flash_attn=False out")
