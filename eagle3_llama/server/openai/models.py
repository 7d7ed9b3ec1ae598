"""Descriptions of the model for GET /v1/models and GET /props, in the names that clients read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..settings import ServerSettings, read_template


class ModelCard:
    """The server's only model. name: for clients. created: when the server started, in seconds."""

    def __init__(self, settings: ServerSettings, batcher: Any, name: str, created: int) -> None:
        base, n_ctx, n_parallel = batcher.base, batcher.n_ctx, batcher.n_parallel
        sizes = {"n_ctx": n_ctx, "n_parallel": n_parallel}
        self.model: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "eagle3-llama",
            # tokens of a request, prompt and answer: as OpenRouter, vLLM, Groq and LM Studio call them
            **dict.fromkeys(
                ("context_length", "max_model_len", "context_window", "max_context_length"), n_ctx
            ),
            "meta": _meta(base, n_ctx),  # as llama.cpp's server calls it
            "eagle": {"head": settings.eagle is not None, "text": settings.text, **sizes},
        }
        text = lambda token: base._model.token_get_text(token) if token != -1 else ""
        self.props: dict[str, Any] = {
            "default_generation_settings": {"n_ctx": n_ctx, "params": _defaults(settings)},
            "total_slots": n_parallel,
            "model_alias": name,
            "model_path": Path(settings.model).name,  # where the file is, is not for clients
            "modalities": {"vision": False, "video": False, "audio": False},
            "chat_template": read_template(file)
            if (file := settings.chat_template_file) is not None
            else base.metadata.get("tokenizer.chat_template", ""),
            "bos_token": text(base.token_bos()),
            "eos_token": text(base.token_eos()),
        }


def _defaults(settings: ServerSettings) -> dict[str, Any]:
    """The defaults of requests. seed -1: a random one for each."""
    n_predict = settings.most_tokens if settings.n_predict == -1 else settings.n_predict
    temperature = {} if settings.temp is None else {"temperature": settings.temp}
    return {"n_predict": n_predict, "seed": settings.seed, **temperature}


def _meta(base: Any, n_ctx: int) -> dict[str, int]:
    model = base._model
    return {
        "vocab_type": model.vocab_type(),
        "n_vocab": model.n_vocab(),
        "n_ctx": n_ctx,
        "n_ctx_train": model.n_ctx_train(),
        "n_embd": model.n_embd(),
        "n_params": model.n_params(),
        "size": model.size(),
    }
