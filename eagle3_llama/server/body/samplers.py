"""The samplers of llama.cpp's server: those that this one has, their order, and those that are always off.

Its clients send the settings of all samplers with every request. A value that changes nothing is taken, and
others are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator

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
Names = Literal[
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "typical_p", "top_p", "min_p", "xtc", "temperature"
]


def _without(name: str, is_off: Callable[[Any], bool]) -> Any:
    """A field of what this server has not: a value that turns it off is taken, as clients send all fields."""

    def check(value: Any) -> Any:
        if value is not None and not is_off(value):
            raise ValueError(f"this server has no {name}: leave it out, or turn it off")
        return value

    return AfterValidator(check)


class Samplers(BaseModel):
    """These fields of a body, which has those of ORDER too."""

    samplers: (
        Annotated[list[Names], Field(max_length=16, fail_fast=True)]
        | Annotated[str, Field(max_length=16)]
        | None
    ) = Field(None, description="what is not named is off")
    repeat_last_n: int | None = Field(None, ge=-1, description=f"{LAST_N}, or 0: no penalties")
    typ_p: float | None = Field(None, ge=0, le=1, description="typical_p")
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
    dry_sequence_breakers: (
        Annotated[list[Annotated[str, Field(max_length=512)]], Field(max_length=64, fail_fast=True)] | None
    ) = None
    adaptive_target: Annotated[float | None, _without("adaptive sampler", lambda x: x < 0)] = None
    adaptive_decay: float | None = None
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
    def _turn_off(self) -> Samplers:
        if self.typ_p is not None:
            given = getattr(self, "typical_p", None)
            if given not in (None, self.typ_p):
                raise ValueError("typ_p: it differs from typical_p; give only one of them")
            self._set("typical_p", self.typ_p)
        for name in ORDER.keys() - self.used():
            for field, value in ORDER[name].items():
                self._set(field, value)
        if self.penalised() and self.repeat_last_n not in (None, LAST_N):
            raise ValueError(f"repeat_last_n: penalties look at the last {LAST_N} tokens here: leave it out")
        return self

    def _set(self, field: str, value: Any) -> None:
        setattr(self, field, value)

    def penalised(self) -> bool:
        """True if a penalty has an effect."""
        return any(getattr(self, field) not in (None, off) for field, off in ORDER["penalties"].items())

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
