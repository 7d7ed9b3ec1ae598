"""Does a head know its target? Its guesses on stored texts, and whether it would guess better from the layers
beside its own.

A head that reads the wrong layers still runs, at a fraction of its acceptance: only a trial tells. All
choices of layers are tried at the same positions, so that what makes one position harder than another cancels
out of their difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np

from ..errors import EagleError, ErrorKind
from .self_test_guesses import Passage, Reader

BETTER = 3.0  # standard errors of its gain above 0: other layers are better
SURE = 2.0  # standard errors above a gain that is below 0: as much as other layers may still be better
NOTHING = 0.01  # nats: a gain not worth a conversion, some thousandths of acceptance
BLOCK = 64  # positions: neighbours fall alike, so that errors are estimated from sums over blocks
FEWEST = 8 * BLOCK  # positions: on fewer, the errors themselves are guesses


@dataclass(frozen=True)
class Gain:
    """What a choice of layers gives beyond the head's own: mean over positions and standard error, both 0 for
    the own."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.error:.4f}"


@dataclass(frozen=True)
class Trial:
    """One choice of layers, ids of layer inputs.

    accepted: share of positions at which the head's first guess is the target's token; acceptance: the gain
    in that share. likelihood: the gain, in nats, in the log-likelihood that the head gives to what the target
    may say next; it tells much smaller differences apart, so it decides.
    """

    layers: list[int]
    accepted: float
    acceptance: Gain
    likelihood: Gain


@dataclass(frozen=True)
class Report:
    """trials: the head's own layers first. chance: what always guessing the same token would have accepted."""

    positions: int
    chance: float
    trials: list[Trial]


class Verdict(str, Enum):
    FINE = "fine"
    WRONG = "wrong"
    CANNOT_TELL = "cannot tell"


def self_test(
    head: str | Path,
    target: str | Path,
    n_threads: int | None = None,
    on_passage: Callable[[int, int], None] | None = None,
    passages: Sequence[Passage] | None = None,
) -> Report:
    """The head with its own layers, with all of them one lower and one higher, and with each alone one lower
    and one higher.

    The target reads the passages, built-in ones if None; the head is asked where a passage goes on as the
    target itself would. n_threads: all cores if None. on_passage(done, all) is called after each. Raises
    EagleError as loading does, UNSUPPORTED for a target that shows no layer inputs, BAD_ARGUMENT for no
    passages, one of fewer than two tokens, or unknown tokens.
    """
    if passages is not None and not passages:
        raise EagleError(
            ErrorKind.BAD_ARGUMENT, "the self-test needs passages: give some, or None for the built-in ones"
        )
    with Reader(head, target, n_threads) as reader:
        choices = neighbours(reader.layers, reader.n_layer)
        passages = reader.built_in() if passages is None else passages
        parts = []
        for i, passage in enumerate(passages):
            parts.append(reader.guesses(passage, choices))
            if on_passage is not None:
                on_passage(i + 1, len(passages))
    answers, hits, likelihoods = (np.concatenate(x, axis=-1) for x in zip(*parts))
    return report(choices, answers, hits, likelihoods)


def neighbours(own: list[int], n_layer: int) -> list[list[int]]:
    """The own layers; all shifted by one; each alone shifted by one: ascending ids 0..n_layer, no duplicates."""
    shifts = [[0] * len(own)]
    for by in (-1, 1):
        shifts.append([by] * len(own))
    shifts += [[by if i == k else 0 for i in range(len(own))] for k in range(len(own)) for by in (-1, 1)]
    found = []
    for shift in shifts:
        layers = [i + by for i, by in zip(own, shift)]
        fits = layers[0] >= 0 and layers[-1] <= n_layer and all(a < b for a, b in zip(layers, layers[1:]))
        if fits and layers not in found:
            found.append(layers)
    return found


def report(
    choices: list[list[int]], answers: np.ndarray, hits: np.ndarray, likelihoods: np.ndarray
) -> Report:
    """answers: the target's token at each position, [positions]; hits, likelihoods: [choices, positions], own
    layers first."""
    n = len(answers)
    if n == 0:
        return Report(0, 0.0, [Trial(c, 0.0, paired(answers), paired(answers)) for c in choices])
    trials = [
        Trial(
            layers,
            float(hit.mean()),
            paired(hit.astype(float) - hits[0]),
            paired(likelihood - likelihoods[0]),
        )
        for layers, hit, likelihood in zip(choices, hits, likelihoods)
    ]
    return Report(n, float(np.bincount(answers).max() / n), trials)


def paired(difference: np.ndarray) -> Gain:
    """Of differences at each position: the error comes from sums over blocks of them, and is infinite for too
    few."""
    n = len(difference)
    if n < FEWEST:
        return Gain(float(difference.mean()) if n else 0.0, math.inf)
    sums = np.add.reduceat(difference - difference.mean(), np.arange(0, n, BLOCK))
    m = len(sums)
    return Gain(float(difference.mean()), float(np.sqrt((sums**2).sum() * m / (m - 1)) / n))


def verdict(found: Report) -> tuple[Verdict, str]:
    """The verdict, and one line that says why.

    WRONG: some choice gains more than BETTER errors. FINE: none gains, and none may gain more than NOTHING
    within SURE errors. Else CANNOT_TELL, as also for too few positions and for a head whose guesses are no
    better than chance with any layers.
    """
    own, others, at = found.trials[0], found.trials[1:], f"{found.positions} positions"
    if found.positions < FEWEST:
        return Verdict.CANNOT_TELL, (
            f"cannot tell: only at {at} does the target go on as the texts do, {FEWEST} are needed"
        )
    if not _guesses(found):
        return Verdict.CANNOT_TELL, (
            "cannot tell: with none of these layers are the head's first guesses accepted more often "
            f"than always the same token ({found.chance:.1%}): it is untrained, or another target's"
        )
    if better := [t for t in others if t.likelihood.mean > BETTER * t.likelihood.error]:
        best = max(better, key=lambda t: t.likelihood.mean)
        return Verdict.WRONG, (
            f"at {at}, layers {_compared(best)}, serve the head better than its own, {own.layers}: "
            f"convert again with --extract-layers {','.join(map(str, best.layers))}"
        )
    if close := [
        t for t in others if t.likelihood.mean >= 0 or t.likelihood.mean + SURE * t.likelihood.error > NOTHING
    ]:
        return Verdict.CANNOT_TELL, (
            f"cannot tell at {at} whether layers {own.layers} are right: as good may be "
            f"{'; '.join(map(_compared, close))}"
        )
    return (
        Verdict.FINE,
        f"layers {own.layers} are right: at {at}, none of the neighbouring layers serves the head better",
    )


def _guesses(found: Report) -> bool:
    """Whether the head knows more than the target's most frequent token, with some of the layers."""
    deviation = math.sqrt(found.chance * (1 - found.chance) / found.positions)
    return max(t.accepted for t in found.trials) > found.chance + BETTER * deviation


def _compared(t: Trial) -> str:
    return f"{t.layers}, acceptance {t.acceptance}, log-likelihood {t.likelihood}"
