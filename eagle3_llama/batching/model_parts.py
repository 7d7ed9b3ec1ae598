"""A request's view of its batcher's model: all that Llama has but for its context and its calls."""

from __future__ import annotations

from typing import Any

from .model import BatchModel

NAMES = (
    "_c_tensor_split _candidates _batch _chat_handlers _context_params _ctx _flash_attn _is_hybrid"
    " _is_recurrent _logits_all _lora_adapter _mirostat_mu _model _n_vocab _token_eos _token_nl cache calls"
    " chat_format chat_handler context_params draft_model kv_overrides last_n_tokens_size lora_base lora_path"
    " lora_scale metadata model_params model_path n_batch n_threads n_threads_batch numa spm_infill"
    " tensor_split tokenizer_ verbose"
).split()


class ModelParts:
    """They are the model's until that is closed: a copy would outlive it."""

    base: BatchModel


class _Part:
    """An attribute of `base`, unless the object has one of its own."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, request: ModelParts, owner: type) -> Any:
        return getattr(request.base, self._name)


for _name in NAMES:
    setattr(ModelParts, _name, _Part(_name))
