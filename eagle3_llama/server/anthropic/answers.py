"""The answers of Anthropic's API, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class AnthropicUsage(BaseModel):
    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicCount(BaseModel):
    input_tokens: int


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorDetail
