"""NVIDIA ModelOpt: Hugging Face names (layers.N) or Megatron's (midlayer, midlayer.N); d2t and lm_head are optional."""

from __future__ import annotations

from ..config import Config
from .base import Layout

_OWN_KEYS = ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm")


def _matches(config: Config, names: set[str]) -> bool:
    own = isinstance(config.data.get("eagle_config"), dict) and any(
        key in config.data["eagle_config"] for key in _OWN_KEYS
    )
    numbered = any(n.removeprefix("model.").startswith(("layers.", "midlayer.0.")) for n in names)
    reads_token = any(n.endswith("hidden_norm.weight") for n in names)  # else it is EAGLE-1's
    return "LlamaForCausalLMEagle3" in config.architectures() and reads_token and (own or numbered)


MODELOPT = Layout("ModelOpt", _matches, ("midlayer", "midlayer.{i}", "layers.{i}"))
