"""A turn of the batcher's thread: chunks of prompts, and a round of the slots that generate."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..common.limits import MAX_DRAFT
from ..errors import EagleError
from ..llama.processors import good_rows
from ..llama.text import Logits
from ..runtime.binding import address
from ..runtime.engine import Ask, Engine
from ..runtime.round_tokens import RoundTokens
from .chunks import INVARIANT_ROWS, least_chunk, next_chunk
from .job import BatchOutput, Job, JobState
from .logprobs import TopRow, top_row
from .model import BatchModel

STALL = 0.25  # seconds that the prompts of a turn should take while others wait for their next token


@dataclasses.dataclass(eq=False)
class BatchSlot:
    """A sequence of the context. tokens: what target and head hold of it. client: whose text it is.

    n_prompt: tokens of the last prompt, with which the text begins.
    """

    id: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    client: str = ""
    n_prompt: int = 0
    job: Job | None = None
    used: int = 0  # number of the last request that had it

    def state(self) -> dict[str, Any]:
        """For any thread."""
        job = self.job  # the batcher's thread may take it away meanwhile
        request_id = job.request_id if job is not None else None
        return {"id": self.id, "busy": job is not None, "n_past": len(self.tokens), "request_id": request_id}


def a_slot_is_free(slots: Sequence[BatchSlot], jobs: Iterable[Job]) -> bool:
    """True if a slot is free that one of these jobs takes."""
    free = {s.id for s in slots if s.job is None}
    return bool(free) and any(job.only_slot is None or job.only_slot in free for job in jobs)


Busy = tuple[BatchSlot, Job]
NO_TOKENS = RoundTokens((), (), ())
# copied_tokens and restored_tokens are part of reused_tokens: from another slot, and from the prompt cache
COUNTS = "prompt_tokens reused_tokens copied_tokens restored_tokens saved_texts failures rows drafts"


class Scheduler:
    """Decodes for the slots and hands the tokens to their jobs. free: frees a slot, with an error or None."""

    def __init__(
        self, base: BatchModel, engine: Engine, free: Callable[[BatchSlot, BaseException | None], None]
    ) -> None:
        self._base = base
        self._engine = engine
        self._free = free
        self._n_batch, self._n_ubatch = base.batch_sizes()
        self._step = base.prompt_step()
        self._shared_draft = base.settings.shared_draft
        self._prompt_rate = 0.0  # tokens/s
        self._turn = 0
        self.count = dict.fromkeys(COUNTS.split(), 0)
        self.drafted_at = [0] * MAX_DRAFT
        self.plan: dict[str, float] = {}  # what the planner reported after the last round

    def prompt_rate(self) -> float:
        """Tokens of a prompt that are decoded in a second; 0 before one was long enough to be measured."""
        return self._prompt_rate

    def snapshot(self) -> dict[str, Any]:
        """The counters of Batcher.snapshot() that a round changes. For any thread."""
        st = self._engine.stats
        return {
            **self.count,
            "rounds": st.rounds,
            "tokens": st.tokens,
            "drafted": st.drafted,
            "accepted": st.accepted,
            "accepted_at": list(st.accepted_at),
            "drafted_from": dict(st.drafted_from),
            "accepted_from": dict(st.accepted_from),
            "drafted_at": self.drafted_at[: len(st.accepted_at)],
            "planner": self.plan,
        }

    def turn(self, slots: list[BatchSlot]) -> None:
        """Decodes chunks of the prompts, then one round of the slots whose requests want tokens."""
        chunks, last_tokens = self._choose(slots)
        if chunks:
            self._prompt_chunks(chunks)
        generating = _in_state(JobState.GENERATING, slots)
        if active := sorted(last_tokens + generating, key=lambda busy: busy[0].id):
            self._round(active)

    def _choose(self, slots: list[BatchSlot]) -> tuple[list[Busy], list[Busy]]:
        """The prompts that are decoded in chunks, and those whose last token the round takes along."""
        prompts = _in_state(JobState.PROMPT, slots)
        last_tokens = [(slot, job) for slot, job in prompts if job.lacks_last_token()]
        if len(last_tokens) + len(_in_state(JobState.GENERATING, slots)) < 2:
            last_tokens = []  # a round of one would take as long as a chunk
        return [busy for busy in prompts if busy not in last_tokens], last_tokens

    def _prompt_chunks(self, busy: list[Busy]) -> None:
        """Decodes a chunk of the next slot's prompt, and those of other slots that fit into the time left.

        So, requests that come together start together.
        """
        self._turn += 1
        first = self._turn % len(busy)
        end = time.monotonic() + STALL
        room = min(self._least_chunk(), self._n_batch)
        for i, (slot, job) in enumerate(busy[first:] + busy[:first]):
            n = self._chunk_size(job)
            if i == 0 or (n <= room and time.monotonic() < end):
                room -= n
                start = time.perf_counter()
                self._prompt_chunk(slot, job, n)
                job.times.alone += time.perf_counter() - start

    def _prompt_chunk(self, slot: BatchSlot, job: Job, n: int) -> None:
        """Decodes n tokens of a prompt, samples behind its last one, and delivers what that gives."""
        start = time.perf_counter()
        try:
            before = self._decode_chunk(slot, job, n)
            if done := job.prompt_at == len(job.prompt):
                self._sample_first(job)
        except Exception as e:
            self._free(slot, e)
            return
        if self._failed(slot, job):
            return
        self.count["prompt_tokens"] += n
        if n > INVARIANT_ROWS:
            self._prompt_rate = n / max(time.perf_counter() - start, 1e-6)
        if done:
            kept = self._kept(job, [(-1, job.token)])
            output = BatchOutput(RoundTokens.first(job.token), *kept, before, of_prompt=True)
            self._deliver(slot, job, output)
        elif before:
            job.outputs.put(BatchOutput(NO_TOKENS, before=before, of_prompt=True))

    def _decode_chunk(self, slot: BatchSlot, job: Job, n: int) -> list[TopRow]:
        """Decodes n tokens of a prompt. Returns what the request wants of their rows."""
        chunk = job.prompt[job.prompt_at : job.prompt_at + n]
        self._capture([job])
        self._engine.prefill(chunk, slot.id, all_logits=job.echo)
        slot.tokens += chunk
        job.prompt_at += n
        followed = job.prompt[job.prompt_at - n + 1 : job.prompt_at + 1] if job.echo else []
        return [self._top_row(job, i, token) for i, token in enumerate(followed)]

    def _sample_first(self, job: Job) -> None:
        began = time.thread_time()
        job.token = self._engine.sample(address(job.sampler.sampler))
        job.times.first = time.monotonic()
        if job.budget is not None:
            job.budget.spend(time.thread_time() - began, 1)

    def _chunk_size(self, job: Job) -> int:
        """Tokens of the next chunk of a prompt."""
        done = job.prompt_at - job.reused
        n = len(job.prompt) - job.reused
        return next_chunk(done, n, self._n_batch, self._n_ubatch, self._least_chunk(), self._step)

    def _least_chunk(self) -> int:
        """Tokens of a prompt that take STALL; a chunk may have up to twice as many."""
        return least_chunk(self._prompt_rate * STALL, self._step)

    def _capture(self, jobs: list[Job]) -> None:
        """The drafter is on while a request drafts."""
        if self._engine.drafter:
            self._engine.set_capture(any(job.params.n_max != 0 for job in jobs))

    def _top_row(self, job: Job, row: int, token: int) -> TopRow:
        make = top_row if job.candidates is None else job.candidates.row
        return make(self._base.logits(row), token, job.n_top or 0)

    def _kept(self, job: Job, sampled: list[tuple[int, int]]) -> tuple[Logits | None, list[TopRow]]:
        """Copies what a request reads of rows, each given with the token sampled from it."""
        rows = [self._base.logits(row).copy() for row, _ in sampled] if job.keep_logits else []
        tops = [self._top_row(job, row, token) for row, token in sampled] if job.n_top is not None else []
        return rows.__getitem__ if rows else None, tops

    def _round(self, busy: list[Busy]) -> None:
        jobs = [job for _, job in busy]
        self._capture(jobs)
        fixed = self._shared_draft if len(busy) > 1 else MAX_DRAFT
        asks = [_ask(slot, job, MAX_DRAFT if job.params.planned else fixed) for slot, job in busy]
        try:
            rounds = self._engine.round(asks, [address(j.sampler.sampler) for j in jobs])
        except EagleError as e:
            if len(busy) == 1:
                self._free(busy[0][0], e)
            else:
                self._one_by_one(busy, e)
            return
        self.plan = self._engine.planner.info() if self._engine.planner.costs is not None else {}
        self.count["rows"] = sum(1 + getattr(r, "drafted", 0) for r in rounds)
        for (slot, job), out in zip(busy, rounds):
            try:
                self._hand_out(slot, job, out)
            except Exception as e:
                self._free(slot, e)

    def _hand_out(self, slot: BatchSlot, job: Job, out: RoundTokens | EagleError) -> None:
        """Hands out what a round sampled before anything failed. What failed ends the text behind it."""
        good, failure = good_rows(out, job.processors)
        if good is not None:
            start, sampling = time.perf_counter(), self._engine.sampling_seconds(slot.id)
            budget = job.budget
            self._take_round(slot, job, good)
            job.times.alone += time.perf_counter() - start + sampling
            if budget is not None and slot.job is job:
                budget.spend(sampling, len(good.tokens))
        if failure is not None and slot.job is job:
            self._free(slot, failure)

    def _failed(self, slot: BatchSlot, job: Job) -> bool:
        """True if a logits processor raised something, of whatever kind. Then the slot is free."""
        error = job.take_error()
        if error is not None:
            self._free(slot, error)
        return error is not None

    def _one_by_one(self, busy: list[Busy], failure: EagleError) -> None:
        """After the failure of a round of all: only the slot that caused it fails again.

        A memory that cannot drop a part of a sequence has lost all of it, and there is nothing to go on from.
        """
        for slot, job in busy:
            if self._engine.n_past(slot.id) == len(slot.tokens):
                self._round([(slot, job)])
                continue
            lost = EagleError(
                failure.kind,
                f"a round of several requests failed ({failure}), and this model's memory cannot go back to"
                " where it was before: send the request again",
            )
            self._free(slot, lost)

    def _take_round(self, slot: BatchSlot, job: Job, out: RoundTokens) -> None:
        self.count["drafts"] += out.levels > 0
        for k in range(out.levels):
            self.drafted_at[k] += 1
        decoded = [job.next_token, *out.tokens[:-1]]
        slot.tokens += decoded
        if job.processors is not None:
            job.processors.ids += decoded
        sampled: list[tuple[int, int]] = []
        if job.keep_logits or job.n_top is not None:
            sampled = [(self._engine.row(i, slot.id), token) for i, token in enumerate(out.tokens)]
        job.token = out.tokens[-1]
        if of_prompt := job.state is JobState.PROMPT:
            job.prompt_at += 1
            job.times.first = time.monotonic()
            self.count["prompt_tokens"] += 1
        self._deliver(slot, job, BatchOutput(out, *self._kept(job, sampled), of_prompt=of_prompt))

    def _deliver(self, slot: BatchSlot, job: Job, output: BatchOutput) -> None:
        """Hands over the tokens of a round that the request wants. Frees the slot at the end of the text."""
        is_end = self._base.is_end
        tokens = output.round.tokens
        end = next((i + 1 for i, t in enumerate(tokens) if is_end(t)), len(tokens))
        n = min(end, job.room - job.n_tokens)
        full = n < len(tokens) or job.n_tokens + n >= job.room
        over = full or (n == end and is_end(tokens[end - 1]))
        job.n_tokens += n
        self._engine.stats.tokens += n
        job.outputs.put(dataclasses.replace(output, round=output.round.cut(n)) if n < len(tokens) else output)
        if job.state is JobState.PAUSED:
            job.ready.set()
        if over:
            self._free(slot, None)


def _in_state(state: JobState, slots: list[BatchSlot]) -> list[Busy]:
    return [(slot, slot.job) for slot in slots if slot.job is not None and slot.job.state is state]


def _ask(slot: BatchSlot, job: Job, most: int) -> Ask:
    """most: draft tokens, where the request fixes their number."""
    left = max(job.max_tokens - job.n_tokens - 1, 0)
    ends_prompt = job.state is JobState.PROMPT
    show = None
    if job.processors is not None:
        show = job.processors.begin_round
        if ends_prompt:
            job.processors.ids = job.prompt[:-1]
    return Ask(slot.id, job.next_token, job.params, min(left, most), on_draft=show, ends_prompt=ends_prompt)
