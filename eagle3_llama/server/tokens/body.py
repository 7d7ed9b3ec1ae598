"""The bodies and answers of the routes that show prompts and tokens: templates, counts, /tokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from ..body.chat import ChatBody
from ..body.fields import MAX_IDS, Body, TokenId, length


class TokenizeBody(Body):
    """POST /tokenize, as in llama.cpp's server."""

    content: str
    add_special: bool = Field(False, description="add the model's BOS token, if it has one")
    parse_special: bool = Field(True, description="turn the names of special tokens into these tokens")
    with_pieces: bool = Field(False, description="each token with its text, or its bytes")


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: Annotated[list[TokenId], length(MAX_IDS)]


class TemplateBody(ChatBody):
    """POST /apply-template: a chat request. What does not change its prompt has no effect."""

    add_generation_prompt: bool | None = Field(
        None, description="false: without the words of the template that begin the answer"
    )


class Prompt(BaseModel):
    prompt: str


class TokenPiece(BaseModel):
    id: int
    piece: str | list[int]


class Tokens(BaseModel):
    tokens: list[int] | list[TokenPiece]


class Content(BaseModel):
    content: str


def piece(token: int, raw: bytes) -> dict[str, Any]:
    """A token with its text, or with its bytes as numbers where these are no text."""
    try:
        return {"id": token, "piece": raw.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(raw)}
