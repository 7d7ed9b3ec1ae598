"""What a request and the batcher's thread exchange: a job with its pieces of text."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..common.sampling_budget import SamplingBudget
from ..errors import EagleError, ErrorKind
from ..llama.loop import Piece
from ..llama.processors import GuardedProcessors
from ..runtime.params import EagleParams
from .logprobs import Logprobs, TopRow


class RequestCancelled(EagleError):
    """The request ended before its text was complete. reason: cancelled, deadline or shutdown."""

    def __init__(self, reason: str) -> None:
        texts = {"deadline": "the request's time is up", "shutdown": "the server is shutting down"}
        super().__init__(ErrorKind.BAD_ARGUMENT, texts.get(reason, "the request was cancelled"))
        self.reason = reason


def busy_in_round() -> EagleError:
    """The error of a logits processor that waits for its own batcher."""
    return EagleError(
        ErrorKind.BUSY,
        "the batcher is in the middle of a round: a logits processor cannot wait for another of its requests;"
        " use another model, or a stopping criterion, which runs in the request's own thread",
    )


@dataclasses.dataclass(frozen=True)
class BatchPiece(Piece):
    """A Piece with what the batcher's thread kept of the rows, which the next batch overwrites.

    logits: of the copied rows, if the request reads them. tops: the most likely tokens of the rows that the
    tokens were sampled from, and before: of the prompt's rows, if it asks for logprobs. of_prompt: the piece
    is not of a round but of the prompt.
    """

    tops: Sequence[TopRow] = ()
    before: Sequence[TopRow] = ()
    of_prompt: bool = False


@dataclasses.dataclass(eq=False)
class CompletionOptions:
    """What a completion asks of its generation, besides the arguments of generate().

    before, writer: where the generation puts the rows for the logprobs.
    """

    bias: dict[int, float] = dataclasses.field(default_factory=dict)
    top: int | None = None
    echo: bool = False
    writer: Logprobs | None = None
    before: list[TopRow] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Job:
    """A generation that waits for a slot or has one.

    The batcher's thread writes it. The request's thread reads `pieces`.
    """

    prompt: list[int]
    sampler: Any  # llama_cpp's LlamaSampler; kept alive here
    params: EagleParams
    wanted: int  # tokens to generate before the reader asks for more
    limit: int  # tokens that there is room for
    deadline: float | None  # of time.monotonic()
    rows: bool = False  # whether the reader reads the logits
    top: int | None = None  # number of most likely tokens to keep of each row, for logprobs
    echo: bool = False  # keep those of the prompt's rows too
    request_id: str = ""
    client: str = ""  # whose earlier texts it may be drafted from
    processors: RequestProcessors | None = None
    budget: SamplingBudget | None = None  # of a grammar; the caller's own processors take what they take
    usual: int = 0  # tokens at which a completion usually ends
    pieces: queue.SimpleQueue[BatchPiece | BaseException | None] = dataclasses.field(
        default_factory=queue.SimpleQueue
    )
    # set when no further piece comes before the reader asks for more
    due: threading.Event = dataclasses.field(default_factory=threading.Event)
    cancelled: str | None = None  # a reason
    prompt_at: int = 0  # prompt tokens that the slot holds
    reused: int = 0
    token: int = -1  # sampled last
    n_tokens: int = 0
    queued_at: float = dataclasses.field(default_factory=time.monotonic)
    started_at: float | None = None
    first_at: float | None = None
    ended_at: float | None = None

    def wants_more(self) -> bool:
        return self.prompt_at < len(self.prompt) or self.n_tokens < self.wanted

    def over(self, now: float) -> str | None:
        """Why the request has to end, None if it does not. now: of time.monotonic()."""
        return self.cancelled or ("deadline" if self.deadline is not None and now >= self.deadline else None)

    def take_error(self) -> BaseException | None:
        """What a logits processor raised, once. It is not raised: the batcher serves other requests."""
        return self.processors.take_error() if self.processors is not None else None


class RequestProcessors(GuardedProcessors):
    """Logits processors that the batcher's thread runs. They read the text before their row.

    ids: the tokens that the slot holds.
    """

    def __init__(self, processors: Sequence[Any], prompt: Sequence[int]) -> None:
        super().__init__(processors, lambda: np.array(self.ids, np.intc))
        self.ids = list(prompt)
