"""The source of a prompt's beginning: a slot that holds it, a copy of another slot, the prompt cache.

Whatever is cheapest by measured times. Copies go through bytes in memory (slot_state.py): llama.cpp copies
whole sequences between streams only, of as many cells as a slot has, and the drafters' state comes with them.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

from ..errors import EagleError
from ..runtime.engine import Engine
from .job import Job, JobState
from .model import BatchModel
from .prompt_cache import LEAST, PromptCache, SavedText, goes_on, shared_tokens
from .scheduler import BatchSlot, Scheduler
from .slot_state import SlotState, SlotStates

UNMEASURED_RATE = 1000.0  # tokens/s of prompts, until one was long enough to be measured
NEWEST = 0.25  # the part of the newest copy in the mean of their times
FADES = 0.98  # by which the time of a copy falls whenever it is too high for a copy: once, one is tried again
log = logging.getLogger("eagle3_llama.batching")


class CopyCosts:
    """Seconds of decoding a prompt's tokens, and of copying bytes. rate: tokens/s of prompts, 0: unknown."""

    def __init__(self, rate: Callable[[], float]) -> None:
        self._rate = rate
        self._per_byte = 0.0

    def decode(self, n: int) -> float:
        """Seconds in which n tokens of a prompt are decoded."""
        return n / (self._rate() or UNMEASURED_RATE)

    def copy(self, n_bytes: int) -> float:
        """Seconds in which so many bytes are copied between a slot and memory; 0 before the first copy."""
        return n_bytes * self._per_byte

    def pays(self, n: int, n_bytes: int) -> bool:
        """True if copying so many bytes takes less time than decoding n tokens."""
        if n < LEAST:
            return False
        if self.copy(n_bytes) < self.decode(n):
            return True
        self._per_byte *= FADES
        return False

    def copied(self, n_bytes: int, seconds: float) -> None:
        """Learns from a copy."""
        each = seconds / max(n_bytes, 1)
        self._per_byte += (each - self._per_byte) * (NEWEST if self._per_byte else 1.0)


@dataclasses.dataclass
class Place:
    """A free slot for a job, and n tokens of its prompt that it will hold: its own, or those of a source."""

    slot: BatchSlot
    n: int
    source: BatchSlot | SavedText | None = None

    @property
    def lost(self) -> int:
        """Number of tokens of the slot's text that may be wanted again, and that it will not hold."""
        slot, kept = self.slot, self.n if self.source is None else 0
        return 0 if goes_on(kept, slot.n_prompt, len(slot.tokens)) else len(slot.tokens) - kept


def _idle(slot: BatchSlot) -> tuple[bool, int]:
    """Orders slots: empty ones first, then those that no request has had for longest."""
    return bool(slot.tokens), slot.used


class Prefixes:
    """Gives jobs their slots, with what is there of their prompts. For the batcher's thread.

    scheduler: counts the tokens that are not decoded, and knows how fast others are.
    """

    def __init__(self, base: BatchModel, engine: Engine, scheduler: Scheduler) -> None:
        self._base = base
        self._engine = engine
        self.states = SlotStates(base, engine)
        self._count = scheduler.count
        self.costs = CopyCosts(scheduler.prompt_rate)
        self.cache = PromptCache(int(base.settings.prompt_cache))
        self._is_whole = base._is_recurrent or base._is_hybrid
        self._per_token = 0.0  # bytes of a slot's state

    # -- jobs ---------------------------------------------------------------------------------------------

    def place(self, job: Job, slots: Sequence[BatchSlot]) -> BatchSlot:
        """A free slot for the job, with the beginning of its prompt, and nothing else."""
        place = self._choose(job, slots)
        slot, source, count = place.slot, place.source, self._count
        if isinstance(source, SavedText):
            self.cache.use(source, place.n)  # before the slot's text comes in: it may take this one's room
        self._save(slot, place.lost)
        slot.n_prompt = len(job.prompt)
        if slot.client != job.client:  # nobody finds another client's text, whatever fails from here on
            slot.client, slot.tokens = job.client, []
        if source is None:
            n = self.keep(slot, place.n)
        elif isinstance(source, BatchSlot):
            n = self._copy(source, slot, place.n)
            count["copied_tokens"] += n
        else:
            n = self._fill(slot, source.state, place.n)
            count["restored_tokens"] += n
        job.prompt_at = job.reused = n
        job.cached = self._held(slot, n)
        count["reused_tokens"] += job.cached
        count["prompt_tokens"] += n - job.cached
        return slot

    def awaits(self, job: Job, slots: Sequence[BatchSlot]) -> bool:
        """True if another job decodes what the job's prompt begins with: it is copied once it is there."""
        if job.echo or not self._cuts_anywhere():
            return False
        at_work = [s for s in slots if s.job is not None and s.job.state is JobState.PROMPT]
        coming = [
            min(shared_tokens(s.job.prompt, job.prompt), len(job.prompt) - 1)
            for s in at_work
            if s.job is not None and s.client == job.client and s.job.prompt_at < len(s.job.prompt)
        ]
        most = max(coming, default=0)
        if most < LEAST:
            return False
        here = max((self._shared(s, job) for s in slots), default=0)
        here = max(here, self.cache.find(job.client, job.prompt[:-1])[1])
        return self.costs.pays(most - here, int(2 * most * self._per_token))

    def _held(self, slot: BatchSlot, n: int) -> int:
        """How many of its n tokens a slot has: a recurrent state may have gone back farther."""
        return min(n, self._base.positions(slot.id)) if self._is_whole else n

    def keep(self, slot: BatchSlot, n: int) -> int:
        """Keeps the first n tokens of a slot, or none if the memory cannot drop a part. Returns how many."""
        try:
            self._engine.rewind(n, slot.id)
        except EagleError:
            slot.tokens = []  # whatever it holds, no request may continue it
            self._engine.rewind(n := 0, slot.id)
        del slot.tokens[n:]
        return n

    # -- the choice ---------------------------------------------------------------------------------------

    def _choose(self, job: Job, slots: Sequence[BatchSlot]) -> Place:
        """The place with which prompt and lost text take the least time; of equals it loses least."""
        free = [s for s in slots if s.job is None and job.only_slot in (None, s.id)]
        own = {s: self._own(s, job) for s in free}
        nearest = min(free, key=lambda s: (-own[s] if own[s] >= LEAST else 0, _idle(s)))
        idlest = min(free, key=_idle)
        places = [Place(nearest, own[nearest]), Place(idlest, own[idlest])]
        source, n = self._source(job, slots)
        others = [s for s in free if s is not source]
        if others and n >= max(own[nearest], LEAST):
            places.append(Place(min(others, key=_idle), n, source))
        return min(places, key=lambda place: (self._seconds(place, job), place.lost))

    def _seconds(self, place: Place, job: Job) -> float:
        """Seconds of the rest of the prompt, of the copy, and of bringing back the text that is lost."""
        slot, source = place.slot, place.source
        seconds = self.costs.decode(len(job.prompt) - place.n)
        if isinstance(source, BatchSlot):
            seconds += self.costs.copy(2 * self.states.n_bytes(source))
        elif source is not None:
            seconds += self.costs.copy(source.n_bytes)
        if place.lost < LEAST or self.cache.holds(slot.client, slot.tokens):
            return seconds
        again = self.costs.decode(place.lost)
        if self.cache.most_bytes:
            again = min(again, self.costs.copy(2 * self.states.n_bytes(slot)))
        return seconds + again

    def _own(self, slot: BatchSlot, job: Job) -> int:
        """Tokens of the job's prompt that a free slot can keep."""
        n = self._most_shared(slot, job)
        return n if n >= self._base.least_cut(slot.id, len(slot.tokens)) else 0

    def _shared(self, slot: BatchSlot, job: Job) -> int:
        """Tokens of the job's prompt that a copy of a slot can keep."""
        n = self._most_shared(slot, job)
        return n if n >= self._least(slot) else 0

    def _most_shared(self, slot: BatchSlot, job: Job) -> int:
        """Tokens of the prompt that the slot can reuse.

        The last one is always decoded, because its logits are needed; with echo nothing is reused.
        """
        if job.echo or slot.client != job.client:
            return 0
        return min(shared_tokens(slot.tokens, job.prompt), len(job.prompt) - 1)

    def _least(self, slot: BatchSlot) -> int:
        """Fewest tokens, besides none, that a copy of the slot can be cut to.

        A recurrent state has no parts. Checkpoints stay with the slot that took them.
        """
        n = len(slot.tokens)
        return n if self._is_whole else self._base.least_cut(slot.id, n)

    def _source(self, job: Job, slots: Sequence[BatchSlot]) -> tuple[BatchSlot | SavedText | None, int]:
        """The slot or the saved text that has most of the job's prompt; of equals the shortest slot."""
        if job.echo:
            return None, 0
        saved, n_saved = self.cache.find(job.client, job.prompt[:-1])
        slot = max(slots, key=lambda s: (self._shared(s, job), -len(s.tokens)))
        n_slot = self._shared(slot, job)
        return (saved, n_saved) if n_saved > n_slot else (slot if n_slot else None, n_slot)

    def _cuts_anywhere(self) -> bool:
        return not self._is_whole and not self._base.prunes_windows()

    # -- copies -------------------------------------------------------------------------------------------

    def _copy(self, source: BatchSlot, slot: BatchSlot, n: int) -> int:
        """Fills the slot with the first n tokens of another one. Returns how many it has: 0 if that fails."""
        try:
            state = self._take(source)
        except (EagleError, MemoryError) as e:
            log.warning("slot %d could not be copied: %s", source.id, e)
            return self.keep(slot, 0)
        return self._fill(slot, state, n)

    def _fill(self, slot: BatchSlot, state: SlotState, n: int) -> int:
        start = time.perf_counter()
        try:
            self.states.put(slot, state)
        except EagleError as e:  # the slot is empty
            log.warning("slot %d could not be filled: %s", slot.id, e)
            return 0
        self.costs.copied(state.n_bytes, time.perf_counter() - start)
        return self.keep(slot, n)

    def _save(self, slot: BatchSlot, lost: int) -> None:
        """Keeps a text of which a slot is about to lose so many tokens, if it is worth the copy."""
        if not self.cache.most_bytes or lost < LEAST or self.cache.holds(slot.client, slot.tokens):
            return
        size = self.states.n_bytes(slot)
        if size > self.cache.most_bytes or not self.costs.pays(lost, 2 * size):
            return
        try:
            state = self._take(slot)
            self.cache.add(SavedText(slot.client, state, self._least(slot), slot.n_prompt))
        except (EagleError, MemoryError) as e:
            log.warning("the text of slot %d could not be saved: %s", slot.id, e)
        else:
            self._count["saved_texts"] += 1

    def _take(self, slot: BatchSlot) -> SlotState:
        start = time.perf_counter()
        state = self.states.take(slot)
        self.costs.copied(state.n_bytes, time.perf_counter() - start)
        self._per_token = state.n_bytes / max(len(state.tokens), 1)
        return state
