"""Acceptance on held-out answers, as in the engine: greedy draft chains, round by round."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from .data import Corpus, Item
from .model import Head


@dataclasses.dataclass
class Acceptance:
    """Acceptance over a number of rounds.

    accept_per_position: share of all rounds whose draft token at that position was accepted.
    mean_accepted_length: tokens per round, including the bonus.
    """

    rounds: int
    accept_per_position: list[float]

    @property
    def mean_accepted_length(self) -> float:
        return 1 + sum(self.accept_per_position)


@torch.no_grad()
def measure(
    head: Head,
    corpus: Corpus,
    items: Sequence[Item],
    steps: int,
    device: str = "cpu",
    step: Callable[[], None] = lambda: None,
) -> Acceptance:
    """Drafts chains of `steps` tokens over the items, as if the target sampled exactly the items' tokens."""
    rounds, accepted = 0, [0] * steps
    for item in items:
        batch = corpus.batch([item], steps + 2, device)
        drafts = head.draft(batch.features, batch.tokens, steps)[0].tolist()
        tokens = batch.tokens[0].tolist()
        r, a = walk(tokens[: len(item)], drafts, item.n_prompt, steps)
        rounds += r
        accepted = [x + y for x, y in zip(accepted, a)]
        step()
    return Acceptance(rounds, [x / max(rounds, 1) for x in accepted])


def walk(tokens: list[int], drafts: list[list[int]], n_prompt: int, steps: int) -> tuple[int, list[int]]:
    """(rounds, accepted draft tokens by position) for one answer.

    drafts[t] follows tokens[: t + 2] and was drafted from the features up to position t.
    """
    rounds, accepted = 0, [0] * steps
    at = max(n_prompt, 1)  # index of the last sampled token; the prompt's decode gives the first of an answer
    while at + 1 < len(tokens):
        n = 0
        while n < steps and at + 1 + n < len(tokens) and drafts[at - 1][n] == tokens[at + 1 + n]:
            accepted[n] += 1
            n += 1
        rounds += 1
        at += n + 1
    return rounds, accepted
