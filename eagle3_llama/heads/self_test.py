"""Self-test of a head: does it predict its target's tokens, and would neighbouring layers serve it better?

A head that reads the wrong layers still runs, at a fraction of its acceptance rate, so only a trial shows the
mistake. All choices of layers are tried at the same positions. Some positions are harder than others, and
this cancels out in the differences between choices.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

import numpy as np

from ..errors import EagleError, ErrorKind
from .guesses import Passage, Reader
from .readings import MENDS, other_readings

BETTER = 3.0  # other layers are better if their gain is more than this many standard errors above 0
SURE = 2.0  # the true gain may be this many standard errors above the measured one
NOTHING = 0.01  # nats: a gain too small for a new conversion, a few thousandths of the acceptance rate
BLOCK = 64  # positions: neighbours are correlated, so standard errors come from sums over blocks
FEWEST = 8 * BLOCK  # positions: with fewer, the standard errors are not reliable


@dataclass(frozen=True)
class Gain:
    """The gain of a choice of layers over the head's own layers: mean over positions, and standard error.

    Both are 0 for the head's own layers.
    """

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.error:.4f}"


@dataclass(frozen=True)
class Trial:
    """The result for one choice of layers, given as ids of layer inputs.

    accepted: share of positions where the head's most likely token is the target's token. acceptance: the
    gain in this share. likelihood: the gain in nats in the log-likelihood that the head gives to the target's
    next token. The likelihood shows much smaller differences, so the verdict depends on it.
    reading: what is changed in the head, "" for the head as it is; see readings.py.
    """

    layers: list[int]
    accepted: float
    acceptance: Gain
    likelihood: Gain
    reading: str = ""


@dataclass(frozen=True)
class Report:
    """trials: the head's own layers come first. chance: the share that one constant guess would reach.

    readings: trials of the head with something changed, with its own layers.
    """

    positions: int
    chance: float
    trials: list[Trial]
    readings: list[Trial] = field(default_factory=list)


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
    """Tries the head with its own layers and with neighbouring ones.

    The neighbours are: all layers one lower, all one higher, and each single layer one lower or one higher.
    The target reads the passages. The head is tested where a passage continues as the target would continue
    it. So are other readings of the head: with the target's embeddings, if it has its own, and with rope base
    10000, if it has another.

    passages: the built-in ones if None. n_threads: one for each core that this process may use if None.
    on_passage(done, total) is called after each passage. Raises EagleError as loading a model does; also
    UNSUPPORTED if the target's layer inputs cannot be captured, and BAD_ARGUMENT for no passages, a passage
    of fewer than two tokens, or unknown tokens.
    """
    if passages is not None and not passages:
        raise EagleError(
            ErrorKind.BAD_ARGUMENT, "the self-test needs passages: pass some, or None for the built-in ones"
        )
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="eagle3-self-test-"))
        others: dict[str, Path] = {}
        with contextlib.suppress(EagleError, OSError):  # no room for them, or a file that is told about later
            others = other_readings(Path(head), Path(target), Path(folder))
        reader = stack.enter_context(Reader(head, target, n_threads, others))
        choices = neighbours(reader.layers, reader.n_layer)
        passages = reader.built_in() if passages is None else passages
        readings, parts = list(reader.others), []
        for i, passage in enumerate(passages):
            parts.append(reader.guesses(passage, choices))
            if on_passage is not None:
                on_passage(i + 1, len(passages))
    answers, hits, likelihoods = (np.concatenate(x, axis=-1) for x in zip(*parts))
    return report(choices, answers, hits, likelihoods, readings)


def neighbours(own: list[int], n_layer: int) -> list[list[int]]:
    """The head's own layers, then all shifted by one, then each one shifted alone.

    Every choice has ascending ids in 0..n_layer. No choice occurs twice.
    """
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
    choices: list[list[int]],
    answers: np.ndarray,
    hits: np.ndarray,
    likelihoods: np.ndarray,
    readings: Sequence[str] = (),
) -> Report:
    """Summarises the trials. answers: the target's token at each position, [positions].

    hits, likelihoods: [choices + readings, positions]. The head's own layers are the first choice.
    """
    n, layers_of = len(answers), [*choices, *(choices[0] for _ in readings)]
    if n == 0:
        return Report(0, 0.0, [Trial(c, 0.0, paired(answers), paired(answers)) for c in choices])
    trials = [
        Trial(
            layers,
            float(hit.mean()),
            paired(hit.astype(float) - hits[0]),
            paired(likelihood - likelihoods[0]),
        )
        for layers, hit, likelihood in zip(layers_of, hits, likelihoods)
    ]
    named = [replace(t, reading=name) for t, name in zip(trials[len(choices) :], readings)]
    return Report(n, float(np.bincount(answers).max() / n), trials[: len(choices)], named)


def paired(difference: np.ndarray) -> Gain:
    """The mean of the differences at each position, and its standard error from sums over blocks.

    The error is infinite for fewer than FEWEST positions.
    """
    n = len(difference)
    if n < FEWEST:
        return Gain(float(difference.mean()) if n else 0.0, math.inf)
    sums = np.add.reduceat(difference - difference.mean(), np.arange(0, n, BLOCK))
    m = len(sums)
    return Gain(float(difference.mean()), float(np.sqrt((sums**2).sum() * m / (m - 1)) / n))


def verdict(found: Report) -> tuple[Verdict, str]:
    """The verdict, and one line that explains it.

    WRONG: the gain of some choice is more than BETTER standard errors above 0. FINE: no choice has a gain,
    and the gain plus SURE standard errors is at most NOTHING. CANNOT_TELL: every other case, also too few
    positions and a head that is no better than chance with any layers.
    """
    own, others, at = found.trials[0], found.trials[1:], f"{found.positions} positions"
    if found.positions < FEWEST:
        return Verdict.CANNOT_TELL, (
            f"cannot tell: the target continues the texts as written at only {at}, {FEWEST} are needed"
        )
    if not _guesses(found):
        return Verdict.CANNOT_TELL, (
            "cannot tell: with all of these layers, the head is no better than always the same token "
            f"({found.chance:.1%} accepted): it is untrained, or it was trained for another target"
        )
    if better := [t for t in others if t.likelihood.mean > BETTER * t.likelihood.error]:
        best = max(better, key=lambda t: t.likelihood.mean)
        return Verdict.WRONG, (
            f"the head does better with layers {_compared(best)}, than with its own, {own.layers}, at {at}: "
            f"convert it again with --extract-layers {','.join(map(str, best.layers))}"
        )
    if close := [
        t for t in others if t.likelihood.mean >= 0 or t.likelihood.mean + SURE * t.likelihood.error > NOTHING
    ]:
        return Verdict.CANNOT_TELL, (
            f"cannot tell at {at} whether layers {own.layers} are right: these may be as good: "
            f"{'; '.join(map(_compared, close))}"
        )
    return (Verdict.FINE, f"layers {own.layers} are right: no neighbouring layers do better at {at}")


def better_readings(found: Report) -> list[str]:
    """A line for each reading with which the head does better: what it gains, and how to convert it so."""
    return [
        f"the head does better with {t.reading} ({t.accepted:.1%} accepted instead of "
        f"{found.trials[0].accepted:.1%}, log-likelihood {t.likelihood}): {MENDS[t.reading]}"
        for t in found.readings
        if found.positions >= FEWEST and t.likelihood.mean > max(BETTER * t.likelihood.error, NOTHING)
    ]


def is_useless(found: Report) -> bool:
    """True if there are positions enough to say that the head guesses no better than by chance."""
    return found.positions >= FEWEST and not _guesses(found)


def _guesses(found: Report) -> bool:
    """True if the head, with any choice of layers, beats a constant guess of the most frequent token."""
    deviation = math.sqrt(found.chance * (1 - found.chance) / found.positions)
    return max(t.accepted for t in found.trials) > found.chance + BETTER * deviation


def _compared(t: Trial) -> str:
    return f"{t.layers}, acceptance {t.acceptance}, log-likelihood {t.likelihood}"
