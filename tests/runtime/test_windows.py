"""Targets whose sliding window is pruned (swa_full=False): what they draft, and texts that are cut back.

A text that is cut back beyond the window is decoded again. Drafts are taken back without a trace.
"""

import concurrent.futures
import itertools
import random
import warnings

import numpy as np
import pytest
from cores import THREADS
from native_programs import passes, programs_of
from test_memories import made  # noqa: F401  # the fixture
from test_trees import drafts, random_tree
from tiers import crossed, each
from tiny_models import take

from eagle3_llama import EagleLlama, EagleParams
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.runtime import costs
from eagle3_llama.runtime.binding import llama_cpp
from eagle3_llama.runtime.params import Tree

WINDOWS = ["gemma2", "gemma3", "gpt-oss", "cohere2"]  # of 32 tokens


def in_each(name, values, **more):
    """Parametrizes a test with windows and values."""
    return pytest.mark.parametrize(
        f"files, {name}", crossed(WINDOWS, values), indirect=["files"], scope="module", **more
    )


COMMON = {"n_ctx": 1024, "n_batch": 64, "n_ubatch": 64, "n_threads": THREADS, "verbose": False}
TEXT = [3 + 7 * i * i % 120 for i in range(700)]  # the window's layers have 256 cells
CUTS = [690, 500, 300, 20]  # tokens that stay


@pytest.fixture(scope="module", params=each(WINDOWS, quick=["gemma2"]))
def files(request, made):  # noqa: F811
    """A target and a head."""
    return tuple(map(str, made(request.param)))


@pytest.fixture(scope="module")
def target(files):
    return files[0]


def load(target, **settings):
    return EagleLlama(target, **{"swa_full": False, **COMMON, **settings})


def logits(llm):
    row = llama_cpp.llama_get_logits_ith(llm._ctx.ctx, -1)
    return np.array(np.ctypeslib.as_array(row, shape=(llm.n_vocab(),)))


def of(llm, ids):
    """The logits of the last of these tokens, which are evaluated in an empty context."""
    llm.reset()
    llm.eval(ids)
    return logits(llm)


def by_eval(llm, n):
    llm.n_tokens = n
    llm.eval([9, 8])


def by_eval_twice(llm, n):
    llm.n_tokens = n + 50
    llm.eval([])
    by_eval(llm, n)


def by_a_prompt(llm, n):
    take(llm, 1, [*TEXT[:n], 9, 8])


def by_sampling(llm, n):
    llm.n_tokens = n
    llm.sample(temp=0.0)
    llm.eval([9, 8])


def by_a_state(llm, n):
    state = llm.save_state()
    state.n_tokens = n
    llm.reset()
    llm.load_state(state)
    llm.eval([9, 8])


WAYS = [by_eval, by_eval_twice, by_a_prompt, by_sampling, by_a_state]


def check_cuts(llm, fresh, way):
    for n in CUTS:
        llm.reset()
        llm.eval(TEXT)
        way(llm, n)
        assert llm.n_tokens == n + 2 and llm.input_ids[:n].tolist() == TEXT[:n]
        np.testing.assert_array_equal(logits(llm), of(fresh, [*TEXT[:n], 9, 8]))


@in_each("way", WAYS)
def test_a_text_that_is_cut_back_goes_on_as_if_it_were_new(target, way):
    with load(target) as llm, load(target) as fresh:
        check_cuts(llm, fresh, way)


@in_each("way", [by_eval, by_a_prompt])
def test_where_llama_cpp_python_decodes_itself(target, way):
    """With a draft model of its own, its code cuts texts back, and does not ask what the memory has lost."""

    def nothing(ids, **_):
        return np.empty(0, np.intc)

    with load(target, draft_model=nothing, logits_all=True) as llm, load(target) as fresh:
        check_cuts(llm, fresh, way)


@in_each("n, whole_first", [(250, True), (700, False)])
def test_states_go_from_a_whole_cache_to_a_pruned_one_and_back(target, n, whole_first):
    """250 tokens are more than a ring of positions has, and fewer than its cells."""
    saves, loads = (load(target, swa_full=whole) for whole in (whole_first, not whole_first))
    with saves, loads, load(target) as fresh:
        for kept in (n, n - 150):
            saves.reset()
            saves.eval(TEXT[:n])
            loads.load_state(saves.save_state())
            assert loads.n_tokens == n
            loads.n_tokens = kept
            for part in (TEXT[kept : kept + 3], [9, 8]):
                loads.eval(part)
            expected = of(fresh, [*TEXT[: kept + 3], 9, 8])
            np.testing.assert_allclose(logits(loads), expected, atol=2e-6)


@pytest.mark.parametrize("n", [100, 390])
def test_a_state_in_the_middle_of_an_answer(files, n):
    """It has tokens that were accepted and not yielded yet; the other object begins before them."""
    answer = plain_text(files[0], TEXT[:50], 420, flash_attn=True)
    text = [*TEXT[:50], *answer]
    settings = {"eagle": files[1], "n_max": 6, "flash_attn": True}
    with load(files[0], **settings) as llm, load(files[0], **settings) as other:
        for model in (llm, other):
            drafts(model, lambda seq, most: (text[len(seq) :][:most], range(-1, most - 1), 0))
        steps = llm.generate(TEXT[:50], temp=0.0)
        begun = list(itertools.islice(steps, n))
        state = llm.save_state()
        assert llm.engine.n_past() > llm.n_tokens + 1
        steps.close()
        other.load_state(state)
        assert other.n_tokens == llm.n_tokens
        assert [*begun, *take(other, 420 - n, [*TEXT[:50], *begun])] == answer


def test_costs_are_measured_where_the_text_cannot_go_back(target):
    """Behind many tokens, then behind its first few, which the window has lost."""
    with load(target) as llm:
        found = costs.measure(llm.engine, 1024, 64, budget=0.2)
        assert found.one_row > 0 and llm.engine.n_past() == 0


# -- drafts -----------------------------------------------------------------------------------------------


# All of them have one kind of memory, so each kind of draft runs under the sanitizers with one of them.
ROUNDS = [("gemma2", "chains", 1), ("gemma3", "trees", 1), ("gpt-oss", "chains", 4), ("cohere2", "trees", 4)]


@pytest.mark.parametrize(
    "files, case, n_slots",
    each(itertools.product(WINDOWS, ["chains", "trees"], [1, 4]), quick=ROUNDS),
    indirect=["files"],
    scope="module",
)
def test_rows_that_stay_have_plain_decodings_bits(request, target, case, n_slots):
    """With rejections at every depth, behind many windows of text: 1,000 rounds in all of flash attention."""
    passes(programs_of(request), "pruned_windows_test", case, target, n_slots, 63)


def test_what_cannot_be_taken_back_is_refused(request, target):
    """And a prompt that fails leaves a slot with its window, or an empty one."""
    passes(programs_of(request), "pruned_windows_test", "failures", target)


def plain_text(target, prompt, n, **settings):
    with load(target, text=False, **settings) as plain:
        return take(plain, n, prompt)


def test_drafts_do_not_change_the_text(files):
    """A head's own chains, chains that are right at first, and trees; nobody is warned."""
    target, head = files
    prompt, rng = TEXT[:150], random.Random(1)
    answer = plain_text(target, prompt, 300, flash_attn=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm = load(target, eagle=head, n_max=3, flash_attn=True)
    with llm:
        assert take(llm, 300, prompt) == answer and llm.stats.drafted > 300

        def right_at_first(seq, n):
            ids = [*prompt, *answer][len(seq) :][: rng.randint(0, n)]
            ids += [rng.randrange(3, 120) for _ in range(n - len(ids))]
            return ids, list(range(-1, n - 1)), 0

        llm.eagle_params = EagleParams(6)
        drafts(llm, right_at_first)
        assert take(llm, 300, prompt) == answer and llm.stats.accepted > 100
        llm.eagle_params = EagleParams(tree=Tree(12, 4, 4))
        before = llm.stats.accepted
        drafts(llm, lambda seq, n: random_tree(rng, [*prompt, *answer][len(seq) :], n, llm.n_vocab()))
        assert take(llm, 300, prompt) == answer and llm.stats.accepted > before + 50


def test_requests_share_rounds_and_prefixes(files):
    """Slots whose texts are cut back, by little and beyond the window."""
    target, head = files
    prompts = [TEXT[i : i + 300 + 20 * i] for i in range(4)]
    turns = [[*p[:n], 9, 8, 7] for n in (290, 120, 299) for p in prompts]
    expected = [plain_text(target, p, 60, flash_attn=True) for p in (*prompts, *turns)]
    settings = BatchSettings(
        target, head, n_ctx=1024, n_batch=64, n_parallel=4, n_threads=1, flash_attn=True, swa_full=False
    )
    with Batcher(settings) as batcher, concurrent.futures.ThreadPoolExecutor(4) as pool:
        memory = batcher.base.memory().target_cache

        def ask(prompt):
            with batcher.request(params=EagleParams(3)) as llm:
                return take(llm, 60, prompt)

        assert list(pool.map(ask, [*prompts, *turns])) == expected
        assert batcher.snapshot()["reused_tokens"] > 0
    with Batcher(BatchSettings(target, n_ctx=1024, n_batch=64, n_threads=1)) as whole:
        assert memory < whole.base.memory().target_cache  # windows are what it saves
