"""The body of POST /completion, in the form of llama.cpp's server, and what its fields come to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ..body.completions import MAX_PROMPTS, CompletionBody, Text, TokenIds
from ..body.fields import MAX_BIAS, MAX_IDS, Echo, Gbnf, Tag, TokenId, Word, entries, length


def _none_of_empty(value: Any) -> Any:
    return None if value == "" else value


def _no_indent(value: int | None) -> int | None:
    if value:
        raise ValueError("this server has no indentation: leave it out, or turn it off")
    return value


def _no_media(value: Any) -> Any:
    if value:
        raise ValueError("this server reads text alone, and loads no mmproj file for images: leave it out")
    return value


class PromptObject(Echo):
    """A prompt with its images, of which this server takes none."""

    prompt_string: Text
    multimodal_data: Annotated[Any, AfterValidator(_no_media)] = None


Pieces = Annotated[list[Text | TokenId], length(MAX_IDS, 1)]
# false is equal to 0, which would be read as false
Bias = Annotated[
    Annotated[float, Field(ge=-1e6, le=1e6)] | Literal[False],
    BeforeValidator(lambda x: float(x) if type(x) is int and abs(x) <= 1e6 else x),
]


class LlamaBody(CompletionBody):
    """POST /completion. What would change nothing is taken, what this server has not is refused."""

    default_tokens: ClassVar[int | None] = None
    llama_form: ClassVar[bool] = True
    random_seeds: ClassVar[tuple[int, ...]] = (-1, (1 << 32) - 1)

    prompt: (  # type: ignore[assignment]
        Text
        | TokenIds
        | PromptObject
        | Annotated[list[Text | TokenId | PromptObject | Pieces], length(MAX_IDS, 1)]
    )
    max_tokens: int | None = Field(None, ge=-1)
    n_cmpl: int | None = Field(None, ge=1, description="n")
    return_tokens: bool | None = Field(None, description="`tokens` has the ids; those of a stream always do")
    response_fields: Annotated[list[Word], length(64)] | None = Field(
        None, description="the answer has these fields alone; a/b is field b of a"
    )
    post_sampling_probs: bool | None = Field(
        None, description="n_probs after the samplers; not with penalties, mirostat, a grammar or echo"
    )
    logit_bias: (
        Annotated[list[tuple[TokenId | Tag, Bias]], length(MAX_BIAS)]
        | Annotated[dict[Tag, Bias], entries(MAX_BIAS), Field(max_length=MAX_BIAS)]
        | None
    ) = None  # type: ignore[assignment]
    mirostat: int | None = Field(None, ge=0, le=2, description="mirostat_mode")
    grammar: Annotated[Gbnf | None, BeforeValidator(_none_of_empty)] = Field(None, description="GBNF")
    n_indent: Annotated[int | None, AfterValidator(_no_indent)] = None

    @model_validator(mode="after")
    def _in_our_names(self) -> LlamaBody:
        for theirs, ours in (("n_cmpl", "n"), ("mirostat", "mirostat_mode")):
            given, other = getattr(self, theirs), getattr(self, ours)
            if given is not None and other not in (None, given):
                raise ValueError(f"{theirs} differs from {ours}; give only one of them")
            setattr(self, ours, other if given is None else given)
        if self.post_sampling_probs and self.logprobs is not None and self.logprobs is not False:
            self._check_post_sampling()
        several = len(self.prompts()) * (self.n or 1) > 1
        if several and self.speculative is not None and self.speculative.report:
            raise ValueError("speculative: a report is of one answer, but these are several: leave it out")
        return self

    def after_sampling(self) -> bool:
        return bool(self.post_sampling_probs)

    def _check_post_sampling(self) -> None:
        known = {"a grammar": bool(self.grammar), "json_schema": self.json_schema is not None}
        known |= {"mirostat": bool(self.mirostat_mode), "penalties": self.penalised()}
        if beside := [name for name, used in known.items() if used]:
            message = (
                f"post_sampling_probs: with {beside[0]} a token's probability depends on those before it"
            )
            raise ValueError(f"{message}: leave one of them out; n_probs alone has the model's own")
        if self.echo:
            raise ValueError("post_sampling_probs: no sampler chose the prompt's tokens: leave echo out")

    def prompts(self) -> list[Any]:
        """Each prompt: a text, token ids, or both mixed. Raises ValueError for a list of prompts and ids."""
        given = self.prompt
        if not isinstance(given, list):
            return [_text(given)]
        kinds = {type(one) for one in given}
        if int in kinds and kinds <= {int, str}:
            return [given]
        if int in kinds:
            raise ValueError("prompt: a list of prompts has token ids as lists of their own")
        if len(given) > MAX_PROMPTS:
            raise ValueError(f"prompt: it has {len(given)} prompts, at most {MAX_PROMPTS} are allowed")
        return [_text(one) for one in given]

    def biases(self) -> Iterator[tuple[int | str, float | Literal[False]]]:
        """(token id or text, what is added to its logit; False: it never comes)."""
        if isinstance(self.logit_bias, dict):
            for key, value in self.logit_bias.items():
                yield (int(key) if key.isdecimal() and key.isascii() else key), value
        else:
            yield from self.logit_bias or ()


def _text(prompt: Any) -> Any:
    return prompt.prompt_string if isinstance(prompt, PromptObject) else prompt
