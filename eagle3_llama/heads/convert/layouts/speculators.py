"""vLLM speculators (RedHatAI): the config of the decoder layers is nested. They are llama or qwen3 layers."""

from __future__ import annotations

from ..config import Config, bad
from .base import Layout

_NESTED = "transformer_layer_config"


def _matches(config: Config, names: set[str]) -> bool:
    return _NESTED in config.data or bool(
        {"Eagle3Speculator", "Eagle3DraftModel"} & set(config.architectures())
    )


def _flatten(config: Config) -> Config:
    nested = config.get(_NESTED)
    if nested is None:
        return config
    if not isinstance(nested, dict):
        raise bad(_NESTED, "is not an object")
    return Config({**nested, **{k: v for k, v in config.data.items() if k != _NESTED and v is not None}})


# The ignored verifier weights are only for training. vLLM assumes norm_before_residual if the key is missing.
SPECULATORS = Layout(
    "speculators",
    _matches,
    ("layers.{i}",),
    flatten=_flatten,
    norm_before_residual=True,
    ignored=("rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight"),
)
