"""The bodies of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .fields import MAX_IDS, Body, TokenId, length


class TokenizeBody(Body):
    """POST /tokenize, as in llama.cpp's server."""

    content: str
    add_special: bool = Field(False, description="add the model's BOS token, if it has one")
    parse_special: bool = Field(True, description="turn the names of special tokens into these tokens")


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: Annotated[list[TokenId], length(MAX_IDS)]
