"""NVIDIA ModelOpt: Hugging Face's names (layers.N) or Megatron's (midlayer, midlayer.N).

d2t and lm_head are optional.
"""

from __future__ import annotations

from ..config import Config
from .base import Layout

# use_aux_hidden_state is in SpecForge's configs too, and in those of this project's training
_OWN_KEYS = ("use_input_layernorm_in_first_layer", "use_last_layernorm")


def _matches(config: Config, names: set[str]) -> bool:
    nested = config.data.get("eagle_config")
    own = isinstance(nested, dict) and any(key in nested for key in _OWN_KEYS)
    numbered = any(n.removeprefix("model.").startswith(("layers.", "midlayer.0.")) for n in names)
    reads_token = any(n.endswith("hidden_norm.weight") for n in names)  # EAGLE-1 heads do not have it
    return "LlamaForCausalLMEagle3" in config.architectures() and reads_token and (own or numbered)


# nvidia/Llama-3.3-70B-Instruct-Eagle3 lists none: 1% acceptance with EAGLE's rule (vLLM, pull request 50170)
MODELOPT = Layout("ModelOpt", _matches, ("midlayer", "midlayer.{i}", "layers.{i}"), lists_layers=True)
