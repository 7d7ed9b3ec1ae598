"""Layouts with one decoder layer, called `midlayer`: SafeAILab, SpecForge, AngelSlim.

Other projects name the architecture in their own way, such as Eagle3Qwen3vlForCausalLM for a vision target or
LlamaForCausalLMEEagle3: what says eagle3 and reads the token is read as AngelSlim's.
"""

from __future__ import annotations

from ..config import Config
from .base import Layout


def _layout(name: str, architecture: str, norm_output_gates: bool = False) -> Layout:
    def matches(config: Config, names: set[str]) -> bool:
        midlayer = any(n.removeprefix("model.").startswith("midlayer.") for n in names)
        return midlayer and architecture in config.architectures()

    return Layout(name, matches, ("midlayer",), norm_output_gates=norm_output_gates)


def _says_eagle3(config: Config, names: set[str]) -> bool:
    reads_token = any(n.endswith("hidden_norm.weight") for n in names)  # EAGLE-1 heads do not have it
    return reads_token and any("eagle3" in a.lower() for a in config.architectures())


ANGELSLIM = Layout("AngelSlim", _says_eagle3, ("layers.{i}", "midlayer"))
SPECFORGE = _layout("SpecForge", "LlamaForCausalLMEagle3", norm_output_gates=True)
SAFEAILAB = _layout("SafeAILab", "LlamaForCausalLM")
