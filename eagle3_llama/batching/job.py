"""The exchange of a request and the batcher's thread: a job with its outputs."""

from __future__ import annotations

import collections
import dataclasses
import enum
import logging
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..common.sampling_budget import SamplingBudget
from ..errors import EagleError, ErrorKind
from ..llama.loop import Output
from ..llama.processors import GuardedProcessors
from ..runtime.params import EagleParams
from .candidates import Candidates
from .logprobs import TopRow

log = logging.getLogger("eagle3_llama.batching")


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
class BatchOutput(Output):
    """An Output with what the batcher's thread kept of the rows, which the next batch overwrites.

    logits: of the copied rows, if the request reads them. tops: the most likely tokens of the rows that the
    tokens were sampled from, and before: of the prompt's rows, if it asks for logprobs. of_prompt: the output
    is not of a round but of the prompt.
    """

    tops: Sequence[TopRow] = ()
    before: Sequence[TopRow] = ()
    of_prompt: bool = False


class JobState(enum.Enum):
    """The states of a job, and what they mean."""

    QUEUED = "waits for a slot"
    PROMPT = "has a slot, which does not hold its whole prompt yet"
    GENERATING = "its reader wants tokens"
    PAUSED = "its reader has enough tokens for now"
    ENDED = "has no slot any more"


HAS_WORK = (JobState.PROMPT, JobState.GENERATING)  # the states of jobs for which there is something to decode


@dataclasses.dataclass
class JobTimes:
    """When a job came to each of its states: values of time.monotonic(), None if it has not."""

    queued: float = dataclasses.field(default_factory=time.monotonic)
    started: float | None = None  # it got a slot
    first: float | None = None  # its first token was sampled
    ended: float | None = None
    alone: float = 0.0  # seconds that the batcher's thread worked for it alone

    def spans(self) -> dict[str, float]:
        """Seconds queued, prompt (slot to first token) and generation; one that goes on ends now."""
        now = self.ended or time.monotonic()
        started = self.started or now
        first = self.first or now
        return {"queued": started - self.queued, "prompt": first - started, "generation": now - first}


@dataclasses.dataclass(eq=False)
class Job:
    """A generation that waits for a slot or has one.

    The batcher's thread writes it. The request's thread reads `outputs`.
    """

    prompt: list[int]
    sampler: Any  # llama_cpp's LlamaSampler; kept alive here
    params: EagleParams
    read_ahead_to: int  # tokens to generate before the reader asks for more
    room: int  # tokens that fit into the context after the prompt: the generation ends there
    max_tokens: int  # tokens at which a completion usually ends: nothing is drafted beyond
    deadline: float | None  # a value of time.monotonic()
    keep_logits: bool = False  # copy the rows that its tokens are sampled from, because the reader wants them
    n_top: int | None = None  # number of most likely tokens to keep of each row, for logprobs
    echo: bool = False  # keep those of the prompt's rows too
    candidates: Candidates | None = None  # makes the rows of what the samplers leave
    request_id: str = ""
    client: str = ""  # whose earlier texts it may be drafted from
    only_slot: int | None = None  # the one that it waits for; None: any
    slot: int = -1  # that it got
    processors: RequestProcessors | None = None
    budget: SamplingBudget | None = None  # a grammar's; the caller's own processors take what they take
    outputs: queue.SimpleQueue[BatchOutput | BaseException | None] = dataclasses.field(
        default_factory=queue.SimpleQueue
    )
    # set when the reader need not wait: no further output comes before it asks for more
    ready: threading.Event = dataclasses.field(default_factory=threading.Event)
    cancelled: str | None = None  # a reason
    prompt_at: int = 0  # prompt tokens that the slot holds
    reused: int = 0  # prompt tokens that the slot had when the job got it
    cached: int = (
        0  # those of them that it does not decode again: a recurrent state goes back to a checkpoint
    )
    token: int = -1  # sampled last
    n_tokens: int = 0  # generated, and handed to the reader
    times: JobTimes = dataclasses.field(default_factory=JobTimes)

    @property
    def state(self) -> JobState:
        """The present state."""
        if self.times.ended is not None:
            return JobState.ENDED
        if self.times.started is None:
            return JobState.QUEUED
        if self.prompt_at < len(self.prompt):
            return JobState.PROMPT
        return JobState.GENERATING if self.n_tokens < self.read_ahead_to else JobState.PAUSED

    @property
    def next_token(self) -> int:
        """The token that a round decodes: the last one sampled, before that the prompt's last."""
        return self.prompt[-1] if self.state is JobState.PROMPT else self.token

    def lacks_last_token(self) -> bool:
        """True if its slot holds its prompt but for the last token. A round of others can take that along."""
        return 0 < self.prompt_at == len(self.prompt) - 1 and not self.echo

    def end_reason(self, now: float) -> str | None:
        """Why the request has to end, None if it does not. now: of time.monotonic()."""
        return self.cancelled or ("deadline" if self.deadline is not None and now >= self.deadline else None)

    def take_error(self) -> BaseException | None:
        """An exception of a logits processor, once. It is not raised: the batcher serves other requests."""
        return self.processors.take_error() if self.processors is not None else None

    def free_sampler(self) -> None:
        """Frees what it sampled with, when no round uses it any more. Raises nothing: others wait too."""
        try:
            for owned in (self.sampler, self.candidates):
                if owned is not None:  # a sampler refers to itself: its 600 KB would wait for the collector
                    owned.close()
        except Exception:
            log.exception("a sampler could not be freed")
        self.sampler = self.processors = self.candidates = None


class RequestProcessors(GuardedProcessors):
    """Logits processors that the batcher's thread runs. They read the text before their row.

    ids: the tokens that the slot holds.
    """

    def __init__(self, processors: Sequence[Any], prompt: Sequence[int]) -> None:
        super().__init__(processors, lambda: np.array(self.ids, np.intc))
        self.ids = list(prompt)


def in_turn(waiting: Iterable[Job], running: Iterable[Job]) -> list[Job]:
    """The waiting jobs, in the order in which they get slots: of each client the next one by how many it has.

    So a client that sends many at once does not keep the others waiting for all of them.
    """
    counts = collections.Counter(job.client for job in running)
    numbered = list[tuple[int, Job]]()
    for job in waiting:
        numbered.append((counts[job.client], job))
        counts[job.client] += 1
    return [job for _, job in sorted(numbered, key=lambda pair: pair[0])]
