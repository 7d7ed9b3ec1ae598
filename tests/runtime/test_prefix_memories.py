"""Texts that come back to slots of other memories: recurrent, hybrid, sparse, MLA, and windows."""

import itertools
import random

import pytest
from batch_tools import jobs_at_once
from test_memories import MLA, SPARSE, made  # noqa: F401  # the fixture
from test_windows import WINDOWS
from threads import wait_for
from tiers import crossed, each

from eagle3_llama import EagleParams
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.batching.prefixes import CopyCosts

RECURRENT = ["mamba", "mamba2", "jamba", "qwen35", "lfm2", "deepseek4"]
ALL = [*RECURRENT, *SPARSE, *MLA]
ALIKE = ["mamba2", "glm-dsa", "mistral4"]  # their memory is of the kind of another one
FEW = {"mamba": 0, "qwen35": 3, "deepseek32": 0, "deepseek2": 3}  # and how many draft tokens there are


@pytest.fixture(autouse=True)
def copies_are_free(monkeypatch):
    """So that what is copied does not depend on how fast this machine is."""
    monkeypatch.setattr(CopyCosts, "copy", lambda self, n_bytes: 0.0)


def text(n, seed):
    rng = random.Random(seed)
    return [rng.randrange(3, 110) for _ in range(n)]


def say(batcher, prompt, n=6):
    """What the slot holds after a sampled answer, the logits of its rows, and the tokens found."""
    rows = []

    def see(ids, scores):
        rows.append((ids.tolist(), scores.tobytes()))
        return scores

    with batcher.request(params=EagleParams(3)) as llm:
        llm.set_seed(1)
        llm.create_completion(prompt, max_tokens=n, temperature=0.9, logits_processor=[see])
        cached = llm.usage()["prompt_tokens_details"]["cached_tokens"]
    wait_for(lambda: not any(s["busy"] for s in batcher.slots()))
    return rows[-1][0], rows, cached


def opened(files, **more):
    common = {"n_ctx": 256, "n_batch": 64, "n_threads": 1, "flash_attn": True, "n_parallel": 1, **more}
    return Batcher(BatchSettings(str(files[0]), str(files[1]), **common))


@pytest.mark.parametrize("architecture", each(ALL, quick=lambda name: name not in ALIKE))
def test_a_conversation_goes_on(made, architecture):  # noqa: F811
    """After another text has had its slot. Its logits are those of a slot that it kept."""
    files, prompt = made(architecture), text(100, 1)
    with opened(files) as batcher:
        held, *_ = say(batcher, prompt)
        expected = say(batcher, [*held, *text(9, 2)])
    with opened(files) as batcher:
        assert say(batcher, prompt)[0] == held
        say(batcher, text(90, 3))
        assert say(batcher, [*held, *text(9, 2)]) == expected and expected[2] == len(held)
        assert batcher.snapshot()["restored_tokens"] == len(held)


@pytest.mark.parametrize("architecture", each(RECURRENT, quick=FEW))
def test_a_part_of_a_recurrent_text_is_not_taken(made, architecture):  # noqa: F811
    """Its state has no parts: the prompt is decoded as a new one, and the saved text stays."""
    files, prompt = made(architecture), text(100, 1)
    branch = [*prompt[:80], *text(20, 5)]
    with opened(files) as batcher:
        expected = say(batcher, branch)
    with opened(files) as batcher:
        held, *_ = say(batcher, prompt)
        say(batcher, text(90, 3))
        assert say(batcher, branch) == expected and expected[2] == 0
        assert say(batcher, [*held, 5])[2] == len(held)


@pytest.mark.parametrize("architecture", each(RECURRENT, quick=FEW))
def test_what_a_checkpoint_has_is_counted(made, architecture):  # noqa: F811
    """A slot that goes back to a checkpoint decodes what lies behind it, and says so."""
    files, prompt = made(architecture), text(200, 1)
    with opened(files) as batcher:
        say(batcher, prompt)
        before = batcher.snapshot()
        cached = say(batcher, [*prompt[:150], *text(20, 5)])[2]
        after = batcher.snapshot()
        assert after["reused_tokens"] - before["reused_tokens"] == cached
        assert after["prompt_tokens"] - before["prompt_tokens"] == 170 - cached
        assert cached in (64, 128)  # where a chunk of the first prompt ended


@pytest.mark.parametrize("architecture, kept", crossed(WINDOWS, [95, 60, 20, 0]))
def test_windows(made, architecture, kept):  # noqa: F811
    """A pruned window comes back as it was, and is cut as far as it reaches."""
    files, prompt = made(architecture), text(200, 1)
    with opened(files, swa_full=False, n_ctx=1024) as batcher:
        held, *_ = say(batcher, prompt, n=60)
        n = len(held) - (100 - kept if kept else 0)
        goes_on = [*held[: n if kept else len(held)], *text(9, 2)]
        expected = say(batcher, goes_on)
    with opened(files, swa_full=False, n_ctx=1024) as batcher:
        assert say(batcher, prompt, n=60)[0] == held
        say(batcher, text(190, 3), n=60)
        assert say(batcher, goes_on) == expected
        assert batcher.snapshot()["restored_tokens"] == expected[2]
        assert expected[2] == n or 0 < kept < 95


@pytest.mark.parametrize("architecture, drafts", each(itertools.product(ALL, [0, 3]), quick=FEW.items()))
def test_prompts_end_in_a_round_of_all(made, architecture, drafts):  # noqa: F811
    """Slots that hold a prompt decode its last token together, with what waits in front of it."""
    files = made(architecture)
    asked = [text(n, n) for n in (100, 90, 70)]

    def ask(batcher, prompt):
        rows = []

        def see(ids, scores):
            rows.append((ids.tolist(), scores.tobytes()))
            return scores

        with batcher.request(params=EagleParams(drafts)) as llm:
            llm.create_completion(prompt, max_tokens=8, temperature=0.0, logits_processor=[see])
        return rows

    with opened(files) as batcher:
        expected = [ask(batcher, prompt) for prompt in asked]
    with opened(files, n_parallel=3) as batcher:
        for _ in range(2):
            got = jobs_at_once(batcher, [lambda p=p: ask(batcher, p) for p in asked])
            assert got == expected
            wait_for(lambda: not any(s["busy"] for s in batcher.slots()))
        assert batcher.snapshot()["reused_tokens"] > 0
