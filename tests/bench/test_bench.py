"""What a benchmark makes of its runs."""

from types import SimpleNamespace

import pytest
from tiny_models import PROMPT

from eagle3_llama import EagleParams
from eagle3_llama.bench.modes import Eagle, Plain
from eagle3_llama.bench.prompts import Answer
from eagle3_llama.bench.report import results
from eagle3_llama.bench.target import BenchTarget
from eagle3_llama.bench.turns import Run
from eagle3_llama.runtime.costs import Costs

PLAIN, EAGLE = Plain("plain"), Eagle("eagle", "head.gguf")


def answer(plain, eagle, n=10):
    run = lambda seconds: Run(list(range(n)), seconds, [], {})
    return Answer("all", {"plain": [run(s) for s in plain], "eagle": [run(s) for s in eagle]})


def ratios(*answers):
    modes = [PLAIN, EAGLE]
    target = SimpleNamespace(
        modes=modes, path="t.gguf", format="Q8_0", failed={}, working=lambda: modes, llm=lambda mode: None
    )
    return {r["mode"]: r for r in results(target, answers)}


def test_what_the_machine_loses_to_others_cancels_out():
    """The second round ran at half the speed; each round says that eagle is 1.25 times as fast."""
    assert ratios(answer([1.0, 2.0, 1.0], [0.8, 1.6, 0.8]))["eagle"]["ratio"] == 1.25
    assert ratios(answer([1.0, 2.0], [0.8, 1.6]))["eagle"]["spread"] == [1.25, 1.25]


def test_plain_decoding_by_turns_is_what_counts():
    """What ran beside it took 1 s; the plain answer of the round, at another time, 2 s."""
    a = answer([2.0], [0.8])
    a.runs["eagle"][0].plain = Run(list(range(10)), 1.0, [], {})
    assert ratios(a)["eagle"]["ratio"] == 1.25


@pytest.mark.parametrize("n", [1, 16, 40])
def test_turns(files, n):
    """Both answers are whole and the same, however the turns cut them; only plain decoding runs alone."""
    eagle = Eagle("eagle", files[1], EagleParams(n_max=2))
    target = BenchTarget(files[0], [PLAIN, eagle], 1, 256)
    alone = target.run(PLAIN, PROMPT, n, {"temp": 0.0})
    run = target.run(eagle, PROMPT, n, {"temp": 0.0})
    assert alone.plain is None and len(alone.tokens) == n and alone.tokens == run.tokens == run.plain.tokens
    assert sum(length for _, length, _ in run.rounds) == n - 1 and all(
        r.seconds > 0 for r in (alone, run, run.plain)
    )
    target.close()


def test_draft_tokens_by_source(files):
    eagle = Eagle("eagle", files[1], EagleParams(n_max=2))
    target = BenchTarget(files[0], [PLAIN, eagle], 1, 256)
    run = target.run(eagle, PROMPT, 16, {"temp": 0.0})
    stats, alone = target.llm(eagle).stats, target.run(PLAIN, PROMPT, 4, {"temp": 0.0})
    a = Answer("all", {"plain": [alone], "eagle": [run]})
    rows = {r["mode"]: r["sources"] for r in results(target, [a, a])}
    target.close()
    assert alone.sources == {} and rows["plain"] == {} and set(run.sources) <= {"head", "text", "both"}
    drafted, accepted = (sum(s[k] for s in rows["eagle"].values()) for k in ("drafted", "accepted"))
    assert (drafted, accepted) == (2 * stats.drafted, 2 * stats.accepted) and drafted > 0


def test_long_answers_count_more():
    """3 s in 1.5 s and 1 s in 1 s: 4 s in 2.5 s."""
    assert ratios(answer([3.0], [1.5], 30), answer([1.0], [1.0]))["eagle"]["ratio"] == pytest.approx(1.6)
    assert ratios(answer([3.0], [1.5]))["plain"]["ratio"] == 1.0


def test_the_limit_is_the_rounds_cost():
    """Two tokens from one batch of two rows against two batches of one row. The last round does not count."""
    a = answer([3.0], [2.0])
    a.runs["eagle"][0].rounds = [(1, 2, 1), (3, 1, 1)]
    a.costs = Costs([0.0, 0.8, 1.1], [0.0, 0.2, 0.3], [0.0] * 3, [0.0] * 3, 0.0, 8)
    row = ratios(a)["eagle"]
    assert row["limit"] == pytest.approx(2.0 / 1.4, abs=1e-4) and row["share_of_limit"] == pytest.approx(
        1.5 / (2.0 / 1.4), abs=1e-3
    )
    a.costs = None
    assert "limit" not in ratios(a)["eagle"]


def test_answers_of_one_token_say_nothing():
    assert ratios(answer([0.0], [0.0], 1), answer([1.0], [0.5]))["eagle"]["ratio"] == 2.0
    assert ratios(answer([0.0], [0.0], 1))["eagle"]["ratio"] == 0.0
