"""Layouts with one decoder layer, called `midlayer`: SafeAILab, SpecForge, AngelSlim."""

from __future__ import annotations

from ..config import Config
from .base import Layout


def _layout(name: str, architecture: str, norm_output_gates: bool = False) -> Layout:
    def matches(config: Config, names: set[str]) -> bool:
        midlayer = any(n.removeprefix("model.").startswith("midlayer.") for n in names)
        return midlayer and architecture in config.architectures()

    return Layout(name, matches, ("midlayer",), norm_output_gates=norm_output_gates)


ANGELSLIM = _layout("AngelSlim", "Eagle3LlamaForCausalLM")
SPECFORGE = _layout("SpecForge", "LlamaForCausalLMEagle3", norm_output_gates=True)
SAFEAILAB = _layout("SafeAILab", "LlamaForCausalLM")
