"""Generates conversations, many sequences at once. The same forward pass captures their features."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ..bench.prompts import loop_flags
from ..errors import EagleError, ErrorKind
from ..llama.chat import has_template
from .sources import Task
from .target import TrainingTarget

MARK = "\u2063user text\u2063"  # rendered with the chat template, to find where the user's text begins
# an answer loops if REPEATED of WINDOW tokens end n-grams that occurred before; it is cut at the window's end
WINDOW, REPEATED = 64, 56
LEAST = 8  # tokens: shorter answers are dropped
OPENING = 16  # a model without a chat template starts its texts with this many tokens of its own


@dataclasses.dataclass
class Conversation:
    """tokens: int32 [n]. features: float16 [n, layers + 1, n_embd]. best: int32 [n], best next tokens."""

    index: int
    tokens: np.ndarray
    n_prompt: int
    features: np.ndarray
    best: np.ndarray
    greedy: bool
    ended: bool

    def flaw(self, drop_truncated: bool) -> str | None:
        """Why the conversation is not used for training, or None if it is."""
        if len(self.tokens) - self.n_prompt < LEAST:
            return "empty"
        return "truncated" if drop_truncated and not self.ended else None


def loop_end(answer: Sequence[int]) -> int | None:
    """How many tokens of an answer to keep if it loops, else None.

    The head should learn loops, because the target's users see them. One window of a loop is enough for this.
    """
    sums = np.concatenate([[0], np.cumsum(loop_flags(answer))])
    full = np.flatnonzero(sums[WINDOW:] - sums[:-WINDOW] >= REPEATED)
    return int(full[0]) + WINDOW if len(full) else None


class GrowingText:
    """A sequence that is being generated."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self.rng = task, np.random.default_rng([seed, 11, task.index])
        self.tokens: list[int] = []
        self.features: list[np.ndarray] = []
        self.best: list[np.ndarray] = []
        self.n_prompt, self.writing = 0, task.kind == "write"

    def start(self, target: TrainingTarget, slot: int, tokens: Sequence[int]) -> int:
        """Prefills the tokens and samples the first token of the answer."""
        self.tokens, self.n_prompt = list(tokens), len(tokens)
        features, best, logits = target.prefill(self.tokens, slot)
        self.features, self.best = [features], [best]
        return self.sample(logits)

    def sample(self, logits: np.ndarray) -> int:
        if self.writing:
            return sample(logits, self.rng, 1.0, 1.0, 100)
        return sample(logits, self.rng, self.task.temperature, self.task.top_p, self.task.top_k)

    def looping(self) -> bool:
        """True if the answer loops. It checks only every 32 tokens."""
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
    """Samples a token from logits, float32 [n_vocab].

    temperature 0: the most likely one. top_k 0: the 1,000 most likely ones take part. top_p 1: no limit.
    """
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


def user_opening(target: TrainingTarget) -> list[int]:
    """The tokens of the chat template before the user's text. After them, an instruct model writes a prompt.

    A model without a template gets only the BOS token and writes a text.
    """
    if not has_template(target.llm):
        return [max(target.llm.token_bos(), 0)]
    marked = target.chat([{"role": "user", "content": MARK}])
    text = target.llm.detokenize(marked, special=True).decode("utf-8", "replace")
    if MARK not in text:
        raise EagleError(
            ErrorKind.UNSUPPORTED,
            f"the chat template of {target.path} changes the user's text, so the model cannot write prompts: "
            "set --prompts, and the first of --weights to 0",
        )
    return target.llm.tokenize(text[: text.index(MARK)].encode(), add_bos=False, special=True)


def read(target: TrainingTarget, task: Task, slot: int) -> Conversation | None:
    """The features of a finished conversation, by prefill. None if its answer is too short."""
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
            f"conversation {task.index} has token {max(tokens)}, but the target has only {target.n_vocab} "
            "tokens: use conversations of this model",
        )
    features, best, _ = target.prefill(tokens, slot)
    return Conversation(
        task.index, np.array(tokens, np.int32), n_prompt, features, best, greedy=False, ended=True
    )


def converse(
    target: TrainingTarget,
    tasks: Iterable[Task],
    n_predict: int,
    seed: int,
    under_way: Callable[[int], None] = lambda tokens: None,
) -> Iterator[tuple[int, Conversation | None]]:
    """Runs the tasks, up to n_slots at the same time. Yields (index, conversation) when a task ends.

    The conversation is None for a task that gave nothing to train on. under_way(tokens of the texts that go
    on) is called after each step.
    """
    waiting = iter(tasks)
    active: dict[int, tuple[GrowingText, int]] = {}  # slot -> (its sequence, the token to decode next)
    opening: list[int] = []
    while True:
        free = [slot for slot in range(target.n_slots) if slot not in active]
        while free and (task := next(waiting, None)) is not None:
            if task.kind == "read":
                yield task.index, read(target, task, free[0])
                continue
            s = GrowingText(task, seed)
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
            under_way(sum(len(s.tokens) for s, _ in active.values()))


def advance(
    target: TrainingTarget, active: dict[int, tuple[GrowingText, int]], n_predict: int
) -> Iterator[tuple[int, Conversation | None]]:
    """Removes sequences that have ended and yields their conversations. Written prompts become questions."""
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


def step(target: TrainingTarget, active: dict[int, tuple[GrowingText, int]]) -> None:
    """Decodes one token in every active slot."""
    slots = sorted(active)
    tokens, positions = [active[s][1] for s in slots], [len(active[s][0].tokens) for s in slots]
    rows, features = target.decode(tokens, positions, slots)
    best = rows.argmax(1).astype(np.int32)
    for i, slot in enumerate(slots):
        s, token = active[slot]
        s.tokens.append(token)
        s.features.append(features[i : i + 1])
        s.best.append(best[i : i + 1])
        active[slot] = (s, s.sample(rows[i]))
