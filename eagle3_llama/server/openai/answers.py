"""The answers of completions and of what describes the model, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class PredictionTokens(BaseModel):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class CachedTokens(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: PredictionTokens
    prompt_tokens_details: CachedTokens


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str = ""
    tool_calls: list[dict[str, Any]] = []


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: dict[str, Any] | None


class TextChoice(BaseModel):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: dict[str, Any] | None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    timings: dict[str, float] | list[dict[str, float]]


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage
    timings: dict[str, float] | list[dict[str, float]]


class AboutEagle(BaseModel):
    head: bool
    text: bool
    n_ctx: int
    n_parallel: int


class ModelMeta(BaseModel):
    vocab_type: int
    n_vocab: int
    n_ctx: int
    n_ctx_train: int
    n_embd: int
    n_params: int
    size: int


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: int
    max_model_len: int
    context_window: int
    max_context_length: int
    meta: ModelMeta
    eagle: AboutEagle


class Props(BaseModel):
    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    chat_template: str
    bos_token: str
    eos_token: str


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]
