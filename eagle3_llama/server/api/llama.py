"""The body of POST /completion, in the form of llama.cpp's server, and what its fields come to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from .completions import MAX_PROMPTS, CompletionBody, Text, TokenIds
from .fields import MAX_BIAS, MAX_IDS, Echo, Gbnf, Tag, TokenId, Word, entries, length

LAST_N = 64  # tokens that penalties look at, as with llama-cpp-python
# The samplers, in the order in which they are applied: llama.cpp's names, and the fields that turn each off.
ORDER: dict[str, dict[str, Any]] = {
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
}
_LETTERS = {"e": "penalties", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p", "t": "temperature"}
_LETTERS |= {"d": "dry", "s": "top_n_sigma", "x": "xtc"}
_OFF = ("dry", "top_n_sigma", "xtc")  # samplers that are always off here
Samplers = Literal[
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "typical_p", "top_p", "min_p", "xtc", "temperature"
]


def _without(name: str, is_off: Callable[[Any], bool]) -> Any:
    """A field of what this server has not: a value that turns it off is taken, as clients send all fields."""

    def check(value: Any) -> Any:
        if value is not None and not is_off(value):
            raise ValueError(f"this server has no {name}: leave it out, or turn it off")
        return value

    return AfterValidator(check)


def _none_of_empty(value: Any) -> Any:
    return None if value == "" else value


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
    samplers: Annotated[list[Samplers], length(16)] | Annotated[str, Field(max_length=16)] | None = Field(
        None, description="what is not named is off"
    )
    mirostat: int | None = Field(None, ge=0, le=2, description="mirostat_mode")
    repeat_last_n: int | None = Field(None, ge=-1, description=f"{LAST_N}, or 0: no penalties")
    grammar: Annotated[Gbnf | None, BeforeValidator(_none_of_empty)] = Field(None, description="GBNF")
    # other samplers and limits: those values alone that turn them off
    min_keep: Annotated[int | None, Field(ge=0), _without("min_keep", lambda x: x <= 1)] = None
    dynatemp_range: Annotated[float | None, _without("dynamic temperature", lambda x: x == 0)] = None
    dynatemp_exponent: float | None = None
    xtc_probability: Annotated[float | None, _without("XTC", lambda x: x == 0)] = None
    xtc_threshold: float | None = None
    top_n_sigma: Annotated[float | None, _without("top_n_sigma", lambda x: x <= 0)] = None
    dry_multiplier: Annotated[float | None, _without("DRY", lambda x: x == 0)] = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: Annotated[list[Word], length(64)] | None = None
    adaptive_target: Annotated[float | None, _without("adaptive sampler", lambda x: x < 0)] = None
    adaptive_decay: float | None = None
    n_indent: Annotated[int | None, _without("indentation", lambda x: x == 0)] = None
    t_max_predict_ms: Annotated[int | None, _without("such time limit", lambda x: x <= 0)] = None
    lora: Annotated[list[Any] | None, _without("choice of adapters", lambda x: not x)] = None
    # without effect: a context is never shifted, and the text is the same with a cache and without
    n_keep: int | None = Field(None, ge=-1, description="no effect, as n_discard and n_cache_reuse")
    n_discard: int | None = None
    n_cache_reuse: int | None = None
    sse_ping_interval: int | None = None
    backend_sampling: bool | None = None
    verbose: bool | None = None

    @model_validator(mode="after")
    def _in_our_names(self) -> LlamaBody:
        for theirs, ours in (("n_cmpl", "n"), ("mirostat", "mirostat_mode")):
            given, other = getattr(self, theirs), getattr(self, ours)
            if given is not None and other not in (None, given):
                raise ValueError(f"{theirs} differs from {ours}; give only one of them")
            setattr(self, ours, other if given is None else given)
        for name in ORDER.keys() - self.used():
            for field, value in ORDER[name].items():
                setattr(self, field, value)
        penalties = any(getattr(self, field) not in (None, off) for field, off in ORDER["penalties"].items())
        if penalties and self.repeat_last_n not in (None, LAST_N):
            raise ValueError(f"repeat_last_n: penalties look at the last {LAST_N} tokens here: leave it out")
        if self.post_sampling_probs and self.logprobs is not None and self.logprobs is not False:
            self._check_post_sampling(penalties)
        several = len(self.prompts()) * (self.n or 1) > 1
        if several and self.speculative is not None and self.speculative.report:
            raise ValueError("speculative: a report is of one answer, but these are several: leave it out")
        return self

    def _check_post_sampling(self, penalties: bool) -> None:
        known = {"a grammar": bool(self.grammar), "json_schema": self.json_schema is not None}
        known |= {"mirostat": bool(self.mirostat_mode), "penalties": penalties}
        if beside := [name for name, used in known.items() if used]:
            message = (
                f"post_sampling_probs: with {beside[0]} a token's probability depends on those before it"
            )
            raise ValueError(f"{message}: leave one of them out; n_probs alone has the model's own")
        if self.echo:
            raise ValueError("post_sampling_probs: no sampler chose the prompt's tokens: leave echo out")

    def used(self) -> list[str]:
        """The samplers that take part. Raises ValueError for an order that is not this server's."""
        if self.samplers is None:
            return list(ORDER) if self.repeat_last_n != 0 else list(ORDER)[1:]
        named: Sequence[str] = self.samplers
        if isinstance(named, str):
            if odd := [c for c in named if c not in _LETTERS]:
                raise ValueError(
                    f"samplers: there is no sampler {odd[0]!r} here, known are {''.join(_LETTERS)}"
                )
            named = [_LETTERS[c] for c in named]
        own = ["typ_p" if name == "typical_p" else name for name in named if name not in _OFF]
        if own != [name for name in ORDER if name in own]:
            raise ValueError(f"samplers: they are applied in the order {', '.join(ORDER)}: name them so")
        return [name for name in own if name != "penalties" or self.repeat_last_n != 0]

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
