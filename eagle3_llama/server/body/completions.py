"""The body of POST /v1/completions: one prompt or several, as text or as token ids."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from .fields import MAX_IDS, Sampling, TokenId, length

MAX_PROMPTS = 64

Text = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[TokenId], length(MAX_IDS, 1)]


class CompletionBody(Sampling):
    """POST /v1/completions."""

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], length(MAX_PROMPTS, 1)]
        | Annotated[list[TokenIds], length(MAX_PROMPTS, 1)]
    )
    suffix: str | None = None
    max_tokens: int | None = Field(None, ge=0, description="0: the prompt alone, with echo")
    echo: bool | None = Field(None, description="the answer begins with the prompt")
    logprobs: Annotated[int, Field(ge=0, le=20)] | bool | None = Field(None, description="true: 1")
    n_probs: int | None = Field(None, ge=0, le=20, description="llama-server's name of logprobs")
    best_of: Literal[1] | None = None

    default_tokens: ClassVar[int | None] = 16  # tokens of an answer if the request names no number; None: all
    llama_form: ClassVar[bool] = False  # whether the answer has what that of llama.cpp's server has

    @model_validator(mode="after")
    def _take_n_probs(self) -> CompletionBody:
        if self.logprobs is True:
            self.logprobs = self.n_probs or 1
        if self.n_probs and self.logprobs is None:
            self.logprobs = self.n_probs
        return self

    def after_sampling(self) -> bool:
        """True if logprobs are of the probabilities that the samplers leave."""
        return False

    def prompts(self) -> list[Any]:
        """Each prompt: a text or token ids."""
        return (
            self.prompt
            if isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
            else [self.prompt]
        )
