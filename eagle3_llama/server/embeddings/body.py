"""The body and the answer of POST /v1/embeddings."""

from __future__ import annotations

import base64
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, Field

from ..body.completions import TokenIds
from ..body.fields import Body, Word, length

MAX_INPUTS = 2048  # as OpenAI has it
MAX_NUMBERS = 1 << 21  # in all vectors of an answer: some 20 bytes each as JSON


class EmbeddingBody(Body):
    """POST /v1/embeddings."""

    input: (
        str
        | TokenIds
        | Annotated[list[str], length(MAX_INPUTS, 1)]
        | Annotated[list[TokenIds], length(MAX_INPUTS, 1)]
    )
    model: Word | None = Field(None, description="any name, because the server has only one model for it")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: the vector as little-endian float32"
    )
    dimensions: int | None = Field(None, ge=1, description="only the model's own number is possible")
    user: Word | None = None


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def written(vector: np.ndarray, encoding: str | None) -> str:
    """A vector, float32 [n], as JSON. Each number is the shortest that reads as the same float32."""
    if encoding == "base64":
        return f'"{base64.b64encode(vector.astype("<f4").tobytes()).decode()}"'
    return f"[{','.join(vector.astype(str))}]"
