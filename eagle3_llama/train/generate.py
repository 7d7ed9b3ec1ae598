"""Conversations with their features: many sequences at once, captured in the pass that generates them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ..bench.prompts import loop_flags
from ..errors import EagleError, ErrorKind
from ..llama.chat import has_template
from .sources import Task
from .target import Target

MARK = "\u2063user text\u2063"  # cut out of a rendered template to find where a user turn opens
WINDOW, REPEATED = (
    64,
    56,
)  # an answer loops once so many of so many tokens end n-grams it already had; it is cut there
LEAST = 8  # tokens of an answer worth keeping
OPENING = 16  # sampled tokens that a model without a chat template starts its own texts with


@dataclasses.dataclass
class Conversation:
    """tokens int32 [n]; features float16 [n, layers + 1, n_embd]; best int32 [n]: the target's choice after each."""

    index: int
    tokens: np.ndarray
    n_prompt: int
    features: np.ndarray
    best: np.ndarray
    greedy: bool
    ended: bool

    def flaw(self, drop_truncated: bool) -> str | None:
        """Why it is not worth training on, if so."""
        if len(self.tokens) - self.n_prompt < LEAST:
            return "empty"
        return "truncated" if drop_truncated and not self.ended else None


def loop_end(answer: Sequence[int]) -> int | None:
    """How much of an answer to keep if it falls into a loop: the target's users meet loops, a window of one is enough."""
    sums = np.concatenate([[0], np.cumsum(loop_flags(answer))])
    full = np.flatnonzero(sums[WINDOW:] - sums[:-WINDOW] >= REPEATED) if len(answer) >= WINDOW else []
    return int(full[0]) + WINDOW if len(full) else None


class Slot:
    """One sequence under way."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self.rng = task, np.random.default_rng([seed, 11, task.index])
        self.tokens: list[int] = []
        self.features: list[np.ndarray] = []
        self.best: list[np.ndarray] = []
        self.n_prompt, self.writing = 0, task.kind == "write"

    def start(self, target: Target, slot: int, tokens: Sequence[int]) -> int:
        """Prefills tokens and samples the first of the answer."""
        self.tokens, self.n_prompt = list(tokens), len(tokens)
        features, best, logits = target.prefill(self.tokens, slot)
        self.features, self.best = [features], [best]
        return self.sample(logits)

    def sample(self, logits: np.ndarray) -> int:
        if self.writing:
            return sample(logits, self.rng, 1.0, 1.0, 100)
        return sample(logits, self.rng, self.task.temperature, self.task.top_p, self.task.top_k)

    def looping(self) -> bool:
        """Asked every few tokens only."""
        n = len(self.tokens) - self.n_prompt
        return n % 32 == 0 and loop_end(self.tokens[self.n_prompt :]) is not None

    def conversation(self, ended: bool) -> Conversation:
        features, best = np.concatenate(self.features), np.concatenate(self.best)
        greedy = self.task.kind != "read" and self.task.temperature == 0
        n = len(features)
        return Conversation(
            self.task.index, np.array(self.tokens[:n], np.int32), self.n_prompt, features, best, greedy, ended
        )


def sample(logits: np.ndarray, rng: np.random.Generator, temperature: float, top_p: float, top_k: int) -> int:
    """A token from float32 [n_vocab]; temperature 0 takes the best, top_k 0 and top_p 1 leave all in (of 1,000)."""
    if temperature == 0:
        return int(logits.argmax())
    k = min(top_k or 1000, len(logits))
    ids = np.argpartition(logits, -k)[-k:]
    ids = ids[np.lexsort((ids, -logits[ids]))]
    p = np.exp((logits[ids] - logits[ids[0]]).astype(np.float64) / temperature)
    p /= p.sum()
    if top_p < 1:
        p[np.cumsum(p) - p >= top_p] = 0
        p /= p.sum()
    return int(ids[min(int(np.searchsorted(np.cumsum(p), rng.random())), len(ids) - 1)])


def user_opening(target: Target) -> list[int]:
    """The chat template up to where the user's words begin: from here an instruct model writes prompts itself.

    A model without a template writes texts from its first token on.
    """
    if not has_template(target.llm):
        return [max(target.llm.token_bos(), 0)]
    marked = target.chat([{"role": "user", "content": MARK}])
    text = target.llm.detokenize(marked, special=True).decode("utf-8", "replace")
    if MARK not in text:
        raise EagleError(
            ErrorKind.UNSUPPORTED,
            f"the chat template of {target.path} changes the user's words: give --prompts instead of self-synthesis",
        )
    return target.llm.tokenize(text[: text.index(MARK)].encode(), add_bos=False, special=True)


def read(target: Target, task: Task, slot: int) -> Conversation | None:
    """A finished conversation's features, by prefill."""
    tokens, n_prompt = list(task.tokens), task.n_prompt
    if task.messages:
        prompt = target.chat(list(task.messages[:-1]))
        n_prompt = len(prompt)
        tokens = prompt + target.llm.tokenize(task.messages[-1]["content"].encode(), add_bos=False)
    tokens = tokens[: target.n_ctx]
    end = loop_end(tokens[n_prompt:])
    tokens = tokens if end is None else tokens[: n_prompt + end]
    if len(tokens) - n_prompt < LEAST:
        return None
    if max(tokens) >= target.n_vocab:
        raise EagleError(
            ErrorKind.BAD_VALUE,
            f"conversation {task.index} has token {max(tokens)}, the target has {target.n_vocab}: was it made with another model?",
        )
    features, best, _ = target.prefill(tokens, slot)
    return Conversation(
        task.index, np.array(tokens, np.int32), n_prompt, features, best, greedy=False, ended=True
    )


def converse(
    target: Target, tasks: Iterable[Task], n_predict: int, seed: int
) -> Iterator[tuple[int, Conversation | None]]:
    """Runs tasks, n_slots of them at a time; yields (index, what it gave), in the order they end, None for nothing."""
    waiting, active = iter(tasks), {}  # active: slot -> (Slot, token to decode next)
    opening: list[int] = []
    while True:
        free = [slot for slot in range(target.n_slots) if slot not in active]
        while free and (task := next(waiting, None)) is not None:
            if task.kind == "read":
                yield task.index, read(target, task, free[0])
                continue
            s = Slot(task, seed)
            if s.writing and not opening:
                opening = user_opening(target)
            prompt = opening if s.writing else target.chat(list(task.messages))
            if len(prompt) + LEAST > target.n_ctx:
                yield task.index, None
                continue
            slot = free.pop()
            active[slot] = (s, s.start(target, slot, prompt))
        if not active:
            return
        yield from advance(target, active, n_predict)
        if active:
            step(target, active)


def advance(
    target: Target, active: dict[int, tuple[Slot, int]], n_predict: int
) -> Iterator[tuple[int, Conversation | None]]:
    """Takes out what has ended, turns prompts that were written into questions."""
    for slot, (s, token) in list(active.items()):
        if s.writing and len(s.tokens) - s.n_prompt == OPENING and not has_template(target.llm):
            s.writing, s.n_prompt = False, len(s.tokens)
        limit = len(s.tokens) - s.n_prompt >= n_predict or len(s.tokens) + 1 >= target.n_ctx or s.looping()
        if not (limit or target.is_end(token)):
            continue
        del active[slot]
        if not s.writing:
            yield s.task.index, s.conversation(ended=not limit)
            continue
        words = target.llm.detokenize(s.tokens[s.n_prompt :]).decode("utf-8", "replace").strip()
        prompt = target.chat(words) if words and not limit and has_template(target.llm) else []
        if not prompt or len(prompt) + LEAST > target.n_ctx:
            yield s.task.index, None
            continue
        s.writing = False
        active[slot] = (s, s.start(target, slot, prompt))


def step(target: Target, active: dict[int, tuple[Slot, int]]) -> None:
    """One token for every active slot."""
    slots = sorted(active)
    rows, features = target.decode(
        [active[s][1] for s in slots], [len(active[s][0].tokens) for s in slots], slots
    )
    best = rows.argmax(1).astype(np.int32)
    for i, slot in enumerate(slots):
        s, token = active[slot]
        s.tokens.append(token)
        s.features.append(features[i : i + 1])
        s.best.append(best[i : i + 1])
        active[slot] = (s, s.sample(rows[i]))
