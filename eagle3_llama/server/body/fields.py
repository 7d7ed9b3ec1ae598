"""Parts that the bodies of requests share: kinds of values, and the fields of both kinds of completion."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, Optional, TypeVar, Union

from annotated_types import Ge
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    create_model,
    model_validator,
)

from ...common.limits import MAX_DRAFT
from ..errors import from_validation
from ..settings import ServerSettings
from .field_names import field_names
from .other_servers import OtherServers
from .samplers import Samplers

M = TypeVar("M", bound=BaseModel)
# The first two are what clients send times ten. What stop strings cost grows with their characters.
MAX_STOP, MAX_STOP_LENGTH, MAX_STOP_TOTAL = 256, 4096, 16_384
MAX_BIAS = 16_384
MAX_CHOICES = 4096  # texts of guided_choice
NEVER = -1e9  # a bias with which a token comes only where a grammar allows no other
MAX_GRAMMAR = 65_536  # characters
MAX_NESTING, MAX_VALUES = 24, 10_000  # in a JSON schema
MAX_IDS = 1_000_000


def _plain_json(value: Any) -> Any:
    """A free-form value that can be written as JSON again: finite numbers, limited depth, limited size."""
    left, level = MAX_VALUES, [value]
    for _ in range(MAX_NESTING):
        below: list[Any] = []
        for v in level:
            if isinstance(v, float) and not math.isfinite(v) or isinstance(v, int) and abs(v) > 1 << 63:
                raise ValueError("it has a number that is too large or not finite")
            below += v.values() if isinstance(v, dict) else v if isinstance(v, list) else ()
        left -= len(below)
        if left < 0:
            raise ValueError(f"it has more than {MAX_VALUES} values")
        if not below:
            return value
        level = below
    raise ValueError(f"it is nested deeper than {MAX_NESTING} levels")


def _tree_shape(value: str) -> str:
    if not re.fullmatch(_TREE, value):
        raise ValueError(f"expected NODESxDEPTHxWIDTH, such as 60x6x10, or false; not {value!r:.40}")
    return value


def _stops(texts: list[str]) -> list[str]:
    """Without empty ones, which end no text."""
    if (size := sum(map(len, texts))) > MAX_STOP_TOTAL:
        raise ValueError(f"they have {size} characters together, at most {MAX_STOP_TOTAL} are allowed")
    return [text for text in texts if text]


def length(most: int, least: int | None = None) -> Any:
    """The length of a list. Its validation stops at the first error, not after a million of them."""
    return Field(min_length=least, max_length=most, fail_fast=True)


def entries(most: int) -> Any:
    """The number of a dictionary's entries, checked before each of them is: each wrong one is an error."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"it has {len(value)} entries, at most {most} are allowed")
        return value

    return BeforeValidator(check)


_TREE = r"^[1-9][0-9]?x[1-9][0-9]?x[1-9][0-9]?$"
# the pattern is for the OpenAPI document: pydantic's own error would show it to the client
TreeShape = Annotated[str, AfterValidator(_tree_shape), WithJsonSchema({"type": "string", "pattern": _TREE})]
Object = Annotated[dict[str, Any], AfterValidator(_plain_json)]
Word = Annotated[str, Field(max_length=512)]
Tag = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TagList = Annotated[
    list[Annotated[str, Field(max_length=MAX_STOP_LENGTH)]], length(MAX_STOP), AfterValidator(_stops)
]
Stops = Union[
    Annotated[str, Field(max_length=MAX_STOP_LENGTH), AfterValidator(lambda text: text or None)], TagList
]
GREEDY = "below 0.001: greedy sampling"
# limits of sampling, which bodies of more than one API have
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Temperature = Annotated[float, Field(ge=0, le=10)]
Share = Annotated[float, Field(ge=0, le=1)]
TopK = Annotated[int, Field(ge=-1, le=1 << 30)]
Penalty = Annotated[float, Field(ge=0.01, le=10)]
Gbnf = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR)]


def text_alone(*known: str) -> Any:
    """Refuses in words what a part of a message may be elsewhere. known: the types of parts here."""

    def check(part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in known:
            if (media := media_of(part)) is None:
                raise ValueError(f"there are no parts of type {kind!r:.60}, only {', '.join(known)}")
            why = "" if media == "files" else f", and loads no mmproj file for {media}"
            raise ValueError(f"this server reads text alone{why}: leave the part of type {kind!r:.60} out")
        return part

    return BeforeValidator(check)


def media_of(part: Any) -> str | None:
    """The kind of a part of a message, in words, if it is no text; None for anything else."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        return None
    return next((what for name, what in _MEDIA.items() if name in kind), None)


_MEDIA = {"image": "images", "screenshot": "images", "audio": "audio", "video": "video"}
_MEDIA |= {"document": "files", "file": "files"}


class Body(BaseModel):
    """Strict: refuses true or "1" for 1, NaN, and unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Echo(Body):
    """A part that clients send back, with fields of other services. Unknown ones are ignored."""

    model_config = ConfigDict(extra="ignore")


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Speculative(Body):
    """Speculative decoding of this request. By default the planner chooses drafts by measured cost."""

    enabled: bool = Field(default=True, description="false: plain decoding, with the same text")
    n_max: int | None = Field(
        default=None, ge=0, le=MAX_DRAFT, description="draft tokens per round, as a chain"
    )
    p_min: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="end a chain before a less probable token; in a tree, leave out a node whose whole path"
        " is less probable. Needs n_max or tree",
    )
    tree: TreeShape | Literal[False] | None = Field(
        default=None, description="NODESxDEPTHxWIDTH, such as 60x6x10; false: the planner drafts no trees"
    )
    text: bool | None = Field(
        default=None, description="false: no drafts from the slot's own text; null: as the server was started"
    )
    report: bool = Field(
        default=False, description="streamed chunks say how each token was produced; the last one has timings"
    )


class Generation(Body):
    """The fields that all requests for an answer share. Absent or null: llama-cpp-python's default."""

    model: Word | None = Field(None, description="any name, because the server has only one model")
    stop: Stops | None = None
    seed: Seed | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = Field(None, description=GREEDY)
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    repeat_penalty: Penalty | None = None
    repetition_penalty: Penalty | None = Field(None, description="vLLM's name of the same")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    mirostat_mode: int | None = Field(None, ge=0, le=2)
    mirostat_tau: float | None = Field(None, ge=0, le=10)
    mirostat_eta: float | None = Field(None, ge=0.001, le=1)
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            entries(MAX_BIAS),
            Field(max_length=MAX_BIAS),
        ]
        | None
    ) = None
    grammar: Gbnf | None = Field(None, description="GBNF")
    speculative: Speculative | None = None
    # accepted for clients of OpenAI and of other servers, without any effect
    user: Word | None = None
    keep_alive: Word | float | None = None
    cache_prompt: bool | None = None
    return_progress: bool | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, Word], entries(16), Field(max_length=16)] | None = None
    service_tier: Word | None = None
    safety_identifier: Word | None = None
    prompt_cache_key: Word | None = None
    prompt_cache_retention: Word | None = None


class Sampling(Generation, Samplers, OtherServers):
    """The fields that both kinds of completion share."""

    random_seeds: ClassVar[tuple[int, ...]] = ()  # that stand for a random one

    max_tokens: int | None = Field(None, ge=1)
    n_predict: int | None = Field(
        None, ge=-1, description="llama-server's name of max_tokens; -1: until the slot is full"
    )
    n: int | None = Field(None, ge=1, description="choices; choice i is generated with seed + i")
    timings_per_token: bool | None = Field(None, description="each event of a stream has `timings`")
    ignore_eos: bool | None = Field(None, description="no token ends the answer, unless a grammar does")
    id_slot: int | None = Field(
        None, ge=-1, lt=1 << 31, description="the slot to wait for and to use; -1: any, as by default"
    )
    json_schema: Object | None = Field(
        None, description="llama-server's name of a strict schema in response_format"
    )
    guided_json: Object | None = Field(None, description="vLLM's name of json_schema")
    guided_choice: Annotated[list[Annotated[str, Field(min_length=1)]], length(MAX_CHOICES, 1)] | None = (
        Field(None, description="the answer is one of these texts: a grammar of them")
    )
    guided_decoding_backend: Word | None = Field(None, description="no effect")

    @model_validator(mode="after")
    def _take_guides(self) -> Sampling:
        grammar = None if self.guided_choice is None else any_of(self.guided_choice)
        pairs = ("guided_json", "json_schema", self.guided_json), ("guided_choice", "grammar", grammar)
        for theirs, ours, value in pairs:
            if value is not None and getattr(self, ours) not in (None, value):
                raise ValueError(f"{theirs}: it is another name of {ours}; give only one of them")
            setattr(self, ours, getattr(self, ours) if value is None else value)
        return self

    @model_validator(mode="after")
    def _take_n_predict(self) -> Sampling:
        if self.n_predict is not None and self.max_tokens not in (None, self.n_predict):
            raise ValueError("n_predict: it differs from max_tokens; give only one of them")
        self.max_tokens = self.max_tokens if self.n_predict is None else self.n_predict
        if self.max_tokens == -1:  # by either name
            self.max_tokens, self.n_predict = None, -1
        return self

    def limit_field(self) -> str:
        """The name by which the request limits its tokens."""
        return "max_tokens" if self.n_predict is None else "n_predict"

    def biases(self) -> Iterator[tuple[int | str, float | Literal[False]]]:
        """(token id, what is added to its logit)."""
        return ((int(token), value) for token, value in (self.logit_bias or {}).items())


def any_of(texts: Sequence[str]) -> str:
    """A grammar in GBNF that allows these texts alone. Raises ValueError for one that is too long."""
    plain = lambda c: c not in '"\\' and c.isprintable()
    escaped = lambda c: c if plain(c) else f"\\U{ord(c):08X}"
    made = "root ::= " + " | ".join(f'"{"".join(map(escaped, text))}"' for text in texts)
    if len(made) > MAX_GRAMMAR:
        raise ValueError(
            f"guided_choice: its texts are too long: a grammar has at most {MAX_GRAMMAR} characters"
        )
    return made


def bounded(model: type[BaseModel], settings: ServerSettings) -> type[BaseModel]:
    """The same body with this server's limits, so that the OpenAPI document shows them."""
    about, own = f"an answer has at most {settings.most_tokens} tokens", model.model_fields
    names = [n for n in ("max_tokens", "max_completion_tokens", "max_output_tokens") if n in own]
    least = lambda name: next(m.ge for m in own[name].metadata if isinstance(m, Ge))
    fields: dict[str, Any] = {
        n: (Optional[int], Field(None, ge=least(n), description=own[n].description or about)) for n in names
    }
    for name in ("n", "n_cmpl"):
        if name in own:
            n_choices = Field(None, ge=1, le=settings.most_choices, description=own[name].description)
            fields[name] = (Optional[int], n_choices)
    return create_model(model.__name__, __base__=model, __doc__=model.__doc__, **fields)


def validated(model: type[M], given: Any) -> M:
    """`given`, made from a body, as another model. Raises ApiError 400 with the field at fault.

    It may be wrong although the body is right: what is one list here may be several there.
    """
    try:
        return model.model_validate(given)
    except ValidationError as e:
        raise from_validation(e, functools.partial(field_names, model)) from None
