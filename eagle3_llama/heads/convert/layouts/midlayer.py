"""The layouts whose one decoder layer is called `midlayer`: SafeAILab, SpecForge, AngelSlim."""

from __future__ import annotations

from .base import Layout


def _layout(name: str, architecture: str, **more) -> Layout:
    def matches(config, names) -> bool:
        return (
            any(n.removeprefix("model.").startswith("midlayer.") for n in names)
            and architecture in config.architectures()
        )

    return Layout(name, matches, ("midlayer",), **more)


ANGELSLIM = _layout("AngelSlim", "Eagle3LlamaForCausalLM")
SPECFORGE = _layout("SpecForge", "LlamaForCausalLMEagle3", norm_output_gates=True)
SAFEAILAB = _layout("SafeAILab", "LlamaForCausalLM")
