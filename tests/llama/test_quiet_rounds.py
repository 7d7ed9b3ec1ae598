"""A round calls no logger: llama-cpp-python's is a function in Python, and takes longer than a fast row.

A user is told of rounds by one line at the end of a call, and by the counters' own words. A load says what
flash attention would bring.
"""

import itertools
import re

import pytest

from eagle3_llama import EagleLlama
from eagle3_llama.common.limits import MAX_ROWS
from eagle3_llama.llama import model_costs
from eagle3_llama.runtime import cost_files
from eagle3_llama.runtime.binding import llama_cpp
from eagle3_llama.runtime.costs import Costs
from eagle3_llama.runtime.stats import EagleStats


@pytest.mark.parametrize("with_head", [False, True])
def test_rounds_log_nothing(files, with_head):
    from llama_cpp import _logger  # found once the package is imported

    target, head = files
    said = []
    listening = llama_cpp.llama_log_callback(lambda level, text, _: said.append(text))
    common = {"n_ctx": 256, "n_threads": 1, "verbose": False}  # with more, a busy machine gets fewer
    with EagleLlama(target, eagle=head if with_head else None, **common) as llm:
        tokens = llm.generate([5, 17, 29, 41], temp=0.0)
        list(itertools.islice(tokens, 4))
        llama_cpp.llama_log_set(listening, None)
        try:
            list(itertools.islice(tokens, 40))
        finally:
            llama_cpp.llama_log_set(_logger.llama_log_callback, None)
        tokens.close()
    assert said == []


DRAFTS = r"(\d+) of (\d+) draft tokens accepted \((.*)\)"
LINE = rf"EagleLlama: (\d+) tokens, [\d.]+ a second, [\d.]+ a round, {DRAFTS}"


def test_a_call_ends_with_a_line(files, capfd):
    """With verbose=True, and rounds that use other numbers of threads each time."""
    asked = {"max_tokens": 20, "temperature": 0.0, "logit_bias": {"2": -100.0}}
    with EagleLlama(files[0], eagle=files[1], n_max=3, n_ctx=256, n_threads=2, verbose=True) as llm:
        capfd.readouterr()
        for i in range(3):
            threads = llm._ctx.ctx, 1 + i % 2, 2
            llama_cpp.llama_set_n_threads(*threads)  # as rounds do
            llm([1, 60, 70 + i], **asked)
            told = capfd.readouterr().err
            (line,) = [line for line in told.splitlines() if line.startswith("EagleLlama: ")]
            n, accepted, drafted, by = re.fullmatch(LINE, line).groups()
            assert int(n) >= 20 and 0 <= int(accepted) <= int(drafted) and by.startswith("head ")
            assert "set_n_threads" not in told
        assert llm.stats.tokens >= 60
        list(itertools.islice(llm.generate([1, 60]), 3))
        assert "EagleLlama: 3 tokens, " in capfd.readouterr().err
        llm.verbose = False
        llm([1, 60], **asked)
        assert not capfd.readouterr().err


def test_a_load_tells_of_flash_attention(files, tmp_path, monkeypatch, capfd):
    """Once loads have measured both, and it brings something."""
    monkeypatch.setenv("EAGLE3_LLAMA_COSTS", str(tmp_path))
    none = [0.0] * (MAX_ROWS + 1)
    rows = lambda one: [n * one for n in range(MAX_ROWS + 1)]
    one, faster = (Costs(rows(s), none, rows(s), none, 0.0, 0.0) for s in (0.3, 0.2))
    common = {"n_ctx": 256, "n_threads": 1, "verbose": True}
    with EagleLlama(files[0], **common) as llm:
        for costs, flash in ((one, 0), (faster, 1)):
            assert "flash_attn=True" not in capfd.readouterr().err
            cost_files.remember(model_costs.cost_key(llm, None, flash), model_costs.room(llm), costs)
            model_costs.report_flash(llm)
    assert "behind 128 tokens, flash_attn=True decodes 1.50 times as fast" in capfd.readouterr().err
    for more in ({}, {"flash_attn": True}, {"verbose": False}):
        EagleLlama(files[0], **common | more).close()
        assert ("flash_attn=True decodes" in capfd.readouterr().err) == (not more)


def test_counters_in_words():
    stats = EagleStats(10, 24, 22, 14, target=0.1, draft=0.1, verify=0.1, other=0.02)
    assert str(EagleStats()) == "0 tokens, no drafts"
    stats.drafted_from.update(head=15, text=7)
    stats.accepted_from.update(head=10, text=4)
    said = "24 tokens, 75.0 a second, 2.40 a round, 14 of 22 draft tokens accepted"
    said += " (head 10 of 15, text 4 of 7)"
    assert str(stats) == said and repr(stats) == f"<EagleStats since the load or the last reset(): {said}>"
    before = stats.copy()
    stats.tokens, stats.accepted, stats.accepted_from["text"] = 30, 16, 6
    assert (stats.since(before).tokens, stats.since(before).accepted_from["text"]) == (6, 2)
    stats.reset()
    stats.tokens = 5
    assert stats.since(before).tokens == 5 and before.tokens == 24
