"""Targets with other memories than a plain KV cache: MLA (no V), sparse attention, recurrent."""

import functools
import itertools
import random
import re
import warnings

import pytest
from batch_tools import jobs_at_once, shared_rounds_fail
from commands import run
from converting import converted
from cores import THREADS
from native_programs import passes, program, programs_of
from test_trees import drafts, random_tree
from tiers import crossed, each
from tiny_models import take

from eagle3_llama import EagleError, EagleLlama, EagleParams
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.batching.model import BatchModel
from eagle3_llama.heads.convert.target import read_target
from eagle3_llama.runtime.binding import address
from eagle3_llama.runtime.engine import Ask
from eagle3_llama.runtime.params import Tree

MLA = ["deepseek2", "mistral4"]
SPARSE = ["deepseek32", "glm-dsa", "dots3note"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """made(architecture): a tiny random target of it; with_head: and a head."""
    at = tmp_path_factory.mktemp("memories")
    tool = program("architectures")

    def make(architecture, with_head=True):
        folder = at / architecture
        if not folder.is_dir():
            folder.mkdir()
            run([tool, "save", architecture, folder])
        target, head = sorted(folder.glob(f"{architecture}-*.gguf"))[0], folder / "q8_0.gguf"
        if with_head and not head.is_file():
            about = read_target(target)
            sizes = {"n_embd": about.n_embd, "n_layer": about.n_layer, "n_vocab": about.n_vocab}
            converted(folder, "SafeAILab", target, "q8_0", **sizes)
        return target, head

    return make


@pytest.mark.parametrize("architecture", MLA)
def test_trees_without_values(made, architecture):
    """The rows of a tree that stay move in a cache that has keys only, and the text is plain decoding's."""
    target, head = map(str, made(architecture))
    common = {"n_ctx": 256, "n_threads": THREADS, "flash_attn": True, "verbose": False}
    prompt, rng = [5, 17, 29, 41, 53], random.Random(1)
    plain = EagleLlama(target, **common)
    answer = take(plain, 100, prompt)
    eagle = EagleLlama(target, eagle_path=head, tree=Tree(12, 4, 4), **common)
    expected = drafts(
        eagle, lambda seq, n: random_tree(rng, [*prompt, *answer][len(seq) :], n, plain.n_vocab())
    )
    assert take(eagle, 100, prompt) == answer
    assert eagle.stats.accepted == pytest.approx(sum(expected), abs=12) and eagle.stats.accepted > 20
    eagle.eagle_params = EagleParams(3)
    assert take(eagle, 100, prompt) == answer
    plain.close(), eagle.close()


@pytest.mark.parametrize("architecture, read", crossed(["mamba", "qwen35", "lfm2", "deepseek4"], [1, 6, 70]))
def test_what_a_reader_leaves_of_a_run(made, architecture, read, monkeypatch):
    """The state goes back behind it, by a checkpoint and the tokens since then."""
    monkeypatch.setattr("eagle3_llama.runtime.engine.MOST_SECONDS", 1e6)  # however slow this machine is
    target, prompt = str(made(architecture, with_head=False)[0]), [5, 17, 29, 41, 53]
    common = {"n_ctx": 256, "n_threads": THREADS, "flash_attn": True, "verbose": False}
    with EagleLlama(target, text=False, **common) as llm:
        whole = take(llm, 100, prompt)
        own, longest = llm.engine.run, []

        def run(*asked):
            rounds = own(*asked)
            longest.append(len(rounds[0].tokens))
            return rounds

        llm.engine.run = run
        tokens = llm.generate(prompt, temp=0.0, max_tokens=100)
        assert list(itertools.islice(tokens, read)) == whole[:read]
        tokens.close()
        assert llm._input_ids.tolist() == [*prompt, *whole[: read - 1]]
        again = list(itertools.islice(llm.generate([*prompt, *whole[:read]], temp=0.0), 20))
        assert again == whole[read : read + 20]
        assert read == 1 or max(longest) > 1


def test_rounds_without_values(made, programs):
    passes(programs, "rounds_test", *made("deepseek2"), 1, 8)


@pytest.mark.parametrize("architecture", each(SPARSE + MLA, quick=["deepseek32", "dots3note", "deepseek2"]))
def test_slots_together(request, made, architecture):
    """Such a memory splits several slots' rows into micro-batches. Logits on demand do not change them.

    Each kind of memory is quick, and runs under the sanitizers; the rest are like one of these.
    """
    passes(programs_of(request), "failures_test", "joint", *made(architecture))


def test_commits_that_fail(made, programs):
    """A recurrent memory cannot drop a row: its slot goes back by a checkpoint, with the text as before."""
    passes(programs, "failures_test", "commit", made("mamba", with_head=False)[0])


def test_a_callback_that_raises(made):
    """A recurrent target's round fails with the callback's error. Slots hold their texts, and go on."""
    model = BatchModel(
        BatchSettings(str(made("mamba", with_head=False)[0]), n_parallel=3, n_ctx=64, n_threads=1)
    )
    engine, samplers = model.engine, [model._init_sampler(temp=0.0) for _ in range(3)]
    chains = [address(s.sampler) for s in samplers]

    def turn(on_draft=None, prompt=True):
        for slot in range(3 * prompt):
            engine.prefill([5, 6, 7 + slot], slot)
        return engine.round([Ask(slot, 9, EagleParams(0), on_draft=on_draft) for slot in range(3)], chains)

    def fail(tokens):
        raise ValueError("the callback's")

    expected = turn()
    for slot in range(3):
        engine.rewind(0, slot)
    with pytest.raises(ValueError, match="the callback's"):
        turn(fail)
    assert [engine.n_past(slot) for slot in range(3)] == [3, 3, 3]
    assert turn(prompt=False) == expected and [len(r.tokens) for r in expected] == [1, 1, 1]
    model.close()


def test_a_shared_round_that_fails(made, monkeypatch):
    """A recurrent memory has lost both slots' states by then: they are made again from checkpoints."""
    target, prompts = str(made("mamba", with_head=False)[0]), [[5, 17, 29], [5, 41, 53, 9]]
    with Batcher(BatchSettings(target, n_parallel=2, n_ctx=128, n_threads=1)) as batcher:

        def work(prompt):
            with batcher.request() as llm:
                return list(itertools.islice(llm.generate(prompt, temp=0.0), 12))

        expected = [work(prompt) for prompt in prompts]
        sizes = shared_rounds_fail(batcher, monkeypatch)
        got = jobs_at_once(batcher, [functools.partial(work, prompt) for prompt in prompts])
        assert 2 in sizes
        assert got == expected and batcher.alive()
        assert [work(prompt) for prompt in prompts] == expected
        assert batcher.snapshot()["failures"] == 0


@pytest.mark.parametrize("architecture", ["mamba", "jamba"])
def test_a_text_that_goes_back(made, architecture):
    """A recurrent target that keeps no row of a round has its text as before, and the next call works."""
    llm = EagleLlama(str(made(architecture, with_head=False)[0]), n_ctx=256, n_threads=THREADS, verbose=False)
    prompt = [5, 17, 29, 41, 53]
    answer = take(llm, 20, prompt)

    def takes_back():
        held = llm.engine.n_past()
        llm.engine.steps.decode(7, [9, 11])
        llm.engine.steps.commit(0)
        assert llm.engine.n_past() == held

    for again in (
        lambda: take(llm, 20, prompt),
        lambda: (llm.eval(prompt), llm.sample(temp=0.0))[1:],
        lambda: take(llm, 20, [*prompt, answer[0]]),
    ):
        assert take(llm, 20, prompt) == answer
        takes_back()
        got = again()
        assert list(got) in (answer, answer[:1]) or list(got)[:19] == answer[1:]
    llm.close()


# each kind of memory and rollback
@pytest.mark.parametrize("architecture", ["mamba2", "jamba", "qwen35", "lfm2"])
def test_rounds_of_recurrent_targets(made, programs, architecture):
    """Random chains, rewinds and states of one slot and three: logits are those of a fresh decode."""
    passes(programs, "rounds_test", *made(architecture), 1, 12, "chains")


@pytest.mark.thorough
def test_rounds_of_a_slow_target(made, fast_programs):
    """Its rows take a hundred times as long as the others': native/test_recurrent.py sanitizes its memory."""
    passes(fast_programs, "rounds_test", *made("deepseek4"), 1, 12, "chains")


# jamba keeps no snapshots
@pytest.mark.parametrize("architecture, n_rs_seq", crossed(["qwen35", "lfm2", "jamba"], [2, 0, 8]))
def test_snapshots_and_checkpoints(made, architecture, n_rs_seq):
    """However many snapshots there are, drafts are taken back without a trace: one text alone, and slots."""
    target, head = map(str, made(architecture))
    common = {"n_ctx": 128, "n_threads": THREADS, "flash_attn": True}
    prompts = [[5, 17, 29, 41, 53], [60, 61, 62]]
    with EagleLlama(target, text=False, verbose=False, **common) as plain:
        texts = [take(plain, 60, prompt) for prompt in prompts]
    with EagleLlama(target, eagle=head, n_max=5, n_rs_seq=n_rs_seq, verbose=False, **common) as llm:
        assert llm.context_params.n_rs_seq == n_rs_seq
        assert [take(llm, 60, prompt) for prompt in prompts] == texts
        assert llm.stats.drafted > llm.stats.accepted
    settings = BatchSettings(target, eagle=head, n_parallel=2, n_rs_seq=n_rs_seq, **common)
    with Batcher(settings) as batcher:

        def work(prompt):
            with batcher.request(params=EagleParams(5)) as llm:
                return list(itertools.islice(llm.generate(prompt, temp=0.0), 60))

        assert jobs_at_once(batcher, [functools.partial(work, prompt) for prompt in prompts]) == texts


@pytest.mark.parametrize("architecture, keeps", [("llama", False), ("qwen35", True), ("mamba2", True)])
def test_a_checkpoint_is_measured(made, architecture, keeps):
    """In the middle of a text, which goes on as it would have; a KV cache needs none."""
    target = str(made(architecture)[0])
    with EagleLlama(target, n_ctx=128, n_threads=THREADS, flash_attn=True, verbose=False) as llm:
        text = take(llm, 40, [5, 17, 29])
        llm.reset()
        again, took = llm.generate([5, 17, 29], temp=0.0), []
        tokens = []
        for token in itertools.islice(again, 40):
            tokens.append(token)
            took.append(llm.engine.measure_back())
        assert tokens == text
        assert all((seconds > 0) == keeps for seconds in took)


@pytest.mark.parametrize("architecture", ["mamba", "qwen35"])
def test_trees_are_refused_by_name(made, architecture):
    """A recurrent state has no branches. The planner drafts chains; a tree that is asked for is an error."""
    target, head = map(str, made(architecture))
    common = {"n_ctx": 128, "n_threads": THREADS, "flash_attn": True, "verbose": False}
    with pytest.raises(EagleError, match="cannot check a tree"):
        EagleLlama(target, eagle=head, tree=Tree(12, 4, 4), **common)
    prompt = [5, 17, 29, 41, 53]
    plain = EagleLlama(target, text=False, **common)
    text = take(plain, 60, prompt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm = EagleLlama(target, eagle=head, **common)
    for params in (EagleParams(3), EagleParams()):
        llm.eagle_params = params
        assert take(llm, 60, prompt) == text
    assert llm.stats.drafted > 0
    plain.close(), llm.close()


@pytest.mark.parametrize("architecture, said", [("minimax-01", "otherwise than among others")])
def test_one_warning_where_nothing_can_be_drafted(made, architecture, said):
    """The text is that of the target without a head, whatever is asked for later; the user is told once."""
    target, head = map(str, made(architecture))
    common = {"n_ctx": 128, "n_threads": THREADS, "flash_attn": True, "verbose": False}
    prompt = [5, 17, 29, 41, 53]
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        plain = EagleLlama(target, **common)
        text = take(plain, 40, prompt)
        assert not heard
        llm = EagleLlama(target, eagle=head, n_max=3, **common)
        assert take(llm, 40, prompt) == text
        for params in (EagleParams(2), EagleParams(tree="4x2x2"), EagleParams()):
            llm.eagle_params = params
            assert take(llm, 40, prompt) == text
    ours = [w for w in heard if w.category is RuntimeWarning]
    assert len(ours) == 1, [str(w.message) for w in heard]
    assert re.search(f"decodes plainly: .*{said}", str(ours[0].message)) and ours[0].filename == __file__
    assert llm.stats.drafted == 0 and llm.stats.tokens > 100
    plain.close(), llm.close()


def test_a_head_whose_layers_cannot_be_captured(made):
    """One warning, the head drafts nothing, and the text is plain decoding's; in a batcher too."""
    target, head = map(str, made("hy_v4"))
    common, prompt = {"n_ctx": 128, "n_threads": 1, "flash_attn": True}, [5, 17, 29]
    with EagleLlama(target, verbose=False, text=False, **common) as plain:
        text = take(plain, 40, prompt)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with EagleLlama(target, eagle=head, n_max=3, verbose=False, **common) as llm:
            assert take(llm, 40, prompt) == text and not llm.stats.drafted
            llm.eagle_params = EagleParams()
            assert take(llm, 40, prompt) == text and not llm.stats.drafted_from["head"]
        with Batcher(BatchSettings(target, head, n_parallel=2, **common)) as batcher:
            with batcher.request(params=EagleParams(3)) as llm:
                assert take(llm, 40, prompt) == text
    ours = [str(w.message) for w in heard if w.category is RuntimeWarning]
    expected = "drafts from the text alone: .*does not let the layers be captured"
    assert len(ours) == 2 and all(re.search(expected, message) for message in ours), ours


@pytest.mark.parametrize(
    "architecture, flash_attn, why",
    [
        ("deepseek32", True, "its memory is of a kind that holds chains only: leave tree out"),
        ("gemma2", False, "without flash .*: load the model with flash_attn=True, or leave tree out"),
    ],
)
def test_why_a_target_takes_no_tree(made, architecture, flash_attn, why):
    target, head = map(str, made(architecture))
    with EagleLlama(target, eagle=head, n_ctx=128, n_threads=1, flash_attn=flash_attn, verbose=False) as llm:
        with pytest.raises(EagleError, match=f"cannot check a tree, as {why}$"):
            llm.eagle_params = EagleParams(tree="4x2x2")
        with pytest.raises(EagleError, match="cannot check a tree: " + why.split(":")[0]):
            llm.engine.steps.decode(7, [8, 9], [-1, -1])
