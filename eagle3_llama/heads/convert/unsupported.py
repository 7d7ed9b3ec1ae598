"""Heads of other kinds, which are refused by name: MLA heads and P-EAGLE heads.

Their tensors would fail some check anyway, with an error about one tensor. Sources: vLLM's registry of
speculative models (Eagle3DeepseekV2ForCausalLM), SpecForge (DeepseekV3ForCausalLMEagle3), vLLM's speculators
(PEagleDraftModel), verl-SpeCo (LlamaForCausalLMPeagle) and Automodel (parallel_drafting, mask_hidden).
"""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import EagleError, ErrorKind
from .config import Config

_MLA = {
    "Eagle3DeepseekV2ForCausalLM",
    "Eagle3DeepseekV3ForCausalLM",
    "Eagle3DeepSeekV3ForCausalLM",
    "DeepseekV3ForCausalLMEagle3",
}
_MLA_TENSORS = ("kv_a_proj_with_mqa.weight", "kv_b_proj.weight", "kv_a_layernorm.weight")
_PEAGLE = {"PEagleSpeculator", "PEagleDraftModel", "LlamaForCausalLMPeagle"}


def refuse_unsupported(config: Config, names: Iterable[str]) -> None:
    """names: of the tensors. Raises EagleError UNSUPPORTED for an MLA head or a P-EAGLE head."""
    names = list(names)
    if sign := _sign_of_mla(config, names):
        raise EagleError(
            ErrorKind.UNSUPPORTED,
            f"this is an MLA head ({sign}): its attention compresses keys and values into one latent vector,"
            " and heads with this attention are not supported: take a head with Llama's or Qwen's attention",
        )
    if sign := _sign_of_peagle(config, names):
        raise EagleError(
            ErrorKind.UNSUPPORTED,
            f"this is a P-EAGLE head ({sign}): it predicts all draft tokens in one pass, with a placeholder"
            " for the features, and this is not supported: take the target's EAGLE-3 head",
        )


def _sign_of_mla(config: Config, names: list[str]) -> str | None:
    for architecture in config.architectures():
        if architecture in _MLA:
            return f"architecture {architecture}"
    return next((f"tensor {name}" for name in names if name.endswith(_MLA_TENSORS)), None)


def _sign_of_peagle(config: Config, names: list[str]) -> str | None:
    for architecture in config.architectures():
        if architecture in _PEAGLE:
            return f"architecture {architecture}"
    nested = config.data.get("speculators_config")
    algorithm = nested.get("algorithm") if isinstance(nested, dict) else None
    for key, value in (
        ("speculators_model_type", config.data.get("speculators_model_type")),
        ("speculators_config.algorithm", algorithm),
    ):
        if value == "peagle":
            return f"key {key} is peagle"
    if config.data.get("parallel_drafting") is True:
        return "key parallel_drafting is true"
    return next((f"tensor {n}" for n in names if n.removeprefix("model.") == "mask_hidden"), None)
