"""Which settings of a context a saved state belongs to: those that change keys and values, and no shape.

llama.cpp checks the shapes of a state. Keys that were rotated by other angles would pass, and the text would
be wrong in silence.
"""

from __future__ import annotations

import inspect
from typing import Any

from ..common.loaded_files import check_same
from ..common.model_reader import read_model
from ..errors import EagleError
from ..runtime.binding import Llama, llama_cpp
from .metadata import number

# fields of llama_context_params: by them keys are rotated, or rows attend to others
CHANGES = (
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
    "attention_type",
)
_SHAPE = "llama.cpp compares it, or what follows from it, with the state's"
_SPEED = "it changes how fast a decode is, or how much memory it takes"
_CALLER = "the caller's own, which says nothing of the model"
# the other fields, and why no state depends on them
LEAVES = {
    "n_ctx": "n_tokens is compared with it; where it chooses the model's rope factors, see settings()",
    "n_batch": _SPEED,
    "n_ubatch": _SPEED,
    "n_seq_max": _SHAPE,
    "n_rs_seq": _SPEED,
    "n_outputs_max": _SPEED,
    "n_outputs_max_per_seq": _SPEED,
    "n_threads": _SPEED,
    "n_threads_batch": _SPEED,
    "ctx_type": "neither Llama nor a Batcher sets it",
    "pooling_type": "it reads what the last layer gives",
    "flash_attn_type": _SHAPE,
    "defrag_thold": _SPEED,
    "cb_eval": _CALLER,
    "cb_eval_user_data": _CALLER,
    "type_k": _SHAPE,
    "type_v": _SHAPE,
    "abort_callback": _CALLER,
    "abort_callback_data": _CALLER,
    "embeddings": "it chooses what is read",
    "offload_kqv": _SPEED,
    "no_perf": _SPEED,
    "op_offload": _SPEED,
    "swa_full": _SHAPE,
    "kv_unified": _SHAPE,
    "samplers": "they read what the last layer gives",
    "n_samplers": "the same",
    "ctx_other": "neither Llama nor a Batcher sets it",
}


def settings(llm: Any) -> dict[str, Any]:
    """The settings of an EagleLlama's context that are not the defaults, by name; see CHANGES.

    rope_factors: long if the context is so large that a model with two lists of them uses the long one.
    """
    usual, given = inspect.signature(Llama.__init__).parameters, llm.context_params
    unset = llama_cpp.llama_context_default_params()
    found: dict[str, Any] = {}
    for name in CHANGES:
        default = usual[name].default if name in usual else None
        value = getattr(given, name)
        if value not in (default, getattr(unset, name)):
            found[name] = value
    if _uses_long_factors(llm):
        found["rope_factors"] = "long"
    return found


def _uses_long_factors(llm: Any) -> bool:
    """As get_rope_factors of llama-model.cpp chooses. A file that is gone since the load may have them."""
    about = llm.metadata
    trained = number(about, "rope.scaling.original_context_length") or number(about, "context_length") or 0
    if llama_cpp.llama_n_ctx_seq(llm._ctx.ctx) <= trained:
        return False
    try:
        check_same(llm._files.model)
        return any(name.startswith("rope_factors_long") for name in read_model(llm.model_path).tensors)
    except EagleError:
        return True


def difference(made: dict[str, Any], here: dict[str, Any]) -> str:
    """The differences between the settings() of a state and those of a context; empty if nothing does."""
    names = [name for name in (*CHANGES, "rope_factors") if made.get(name) != here.get(name)]
    return ", ".join(
        f"{name} was {made.get(name, 'unset')} and is {here.get(name, 'unset')} here" for name in names
    )
