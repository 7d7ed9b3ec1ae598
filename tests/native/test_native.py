"""The native library under AddressSanitizer and UBSan: random rounds, damaged files, failing calls."""

import os
import subprocess
import sys

import pytest
import tiny_models
from converting import converted
from native_programs import passes, programs_of
from test_invariance import interleaves
from tiers import each


# Seeds that are thorough run without sanitizers: they draw other rounds, and run the same code.
@pytest.mark.parametrize("seed", each(range(4), quick=[1, 2]))
def test_rounds_under_sanitizers(request, tmp_path, seed):
    target = tiny_models.target(tmp_path / "target.gguf", kind=["F32", "Q8_0", "F16", "F32"][seed])
    head = tiny_models.head(
        tmp_path / "head.gguf",
        kind=["F32", "Q8_0", "F32", "F16"][seed],
        layers=[(1, 2, 3), (0, 2), (1, 2, 3, 4), (3,)][seed],
    )
    passes(programs_of(request), "rounds_test", target, head, seed, 60)


def test_every_call_in_every_state(programs, files):
    """And every call after every other: what eagle3.h allows works, the rest changes nothing.

    The program's argument `all` tries each pair in each state.
    """
    passes(programs, "states_test", *files)


@pytest.mark.parametrize("case", ["rooms", "many"])
def test_slots_that_share_a_round(programs, files, case):
    """A slot at its context's end drafts what fits, the others as ever; 5 to 32 slots draft together."""
    passes(programs, "slots_test", case, *files)


def test_slots_that_lie_apart(programs, files):
    """Without flash attention, a round does not multiply with the caches of slots that have no row in it."""
    passes(programs, "streams_test", files[0])


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K"])
def test_bits_of_every_row(programs, fast_programs, tmp_path, kind):
    """Rows of trees, of chains and of several slots: those of their text, decoded plainly and alone.

    And after a prompt that is decoded in chunks: those after the whole.
    """
    # test_rows_together_and_alone has the products of each type under the sanitizers: here two are enough
    programs = programs if kind in ("F32", "Q8_0") else fast_programs
    made = tiny_models.target(
        tmp_path / "made.gguf", kind="F32" if kind == "Q4_K" else kind, n_embd=256 if kind == "Q4_K" else 64
    )
    target = quantized(made, tmp_path / "q.gguf") if kind == "Q4_K" else made
    passes(programs, "slots_test", "bits", target)
    if kind != "Q4_K" or interleaves():
        passes(programs, "slots_test", "prompts", target)


def quantized(target, path):
    """As Q4_K_S: Python's gguf cannot write K-quants."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S
    assert llama_cpp.llama_model_quantize(str(target).encode(), str(path).encode(), params) == 0
    return path


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere a program's functions do not stand before a library's"
)
def test_graphs_that_are_kept(programs, files):
    """Shapes beyond the budgets have the bits of fresh graphs; what cannot be had is done without."""
    passes(programs, "kept_graphs_test", *files)


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere a program's functions do not stand before a library's"
)
def test_memory_that_runs_out(programs, files):
    """At any request for it: E_MEMORY, slots that hold what they say, and the same text afterwards.

    The program's argument `all` lets each single request fail.
    """
    passes(programs, "memory_test", *files)


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere a program's functions do not stand before a library's"
)
def test_logits_that_stay_on_a_device(programs, tmp_path):
    """Rows that are read when they are wanted, what was found in them, and what samplers take of it."""
    target = tiny_models.target(tmp_path / "target.gguf", ends=False)
    passes(programs, "logits_stay_test", target, tiny_models.head(tmp_path / "head.gguf"))


@pytest.mark.thorough
def test_a_grammar_that_tests_the_likeliest_tokens(programs, tmp_path):
    """Thousands of rows by many chains, bit for bit as with a mask of all tokens, and few tests a row."""
    passes(programs, "grammar_mask_test", tiny_models.target(tmp_path / "target.gguf", n_vocab=2000))


def test_thoughts_that_end(programs, tmp_path):
    """By a tag or by their budget; a lazy grammar begins with what follows them."""
    passes(programs, "thoughts_test", tiny_models.target(tmp_path / "target.gguf"))


@pytest.mark.parametrize("name", ["speculators, qwen3", "EAGLE-1", "two projections, two layers"])
def test_rounds_of_variants_under_sanitizers(programs, tmp_path, name):
    target = tiny_models.target(tmp_path / "target.gguf", n_layer=12)
    _, head = converted(tmp_path, name, target, "q8_0" if "two" in name else "f32")
    passes(programs, "rounds_test", target, head, 5, 8)


@pytest.mark.parametrize(
    "case", "features full throws measure samplers close capture joint shapes cuts split".split()
)
def test_failures_under_sanitizers(programs, files, case):
    """The state after a failed call, and what must not grow or change: see native/tests/failures_test.cpp."""
    passes(
        programs, "failures_test", case, *files, leaks=case != "split"
    )  # a split target's buffer types live as long as the process


def test_a_second_source_of_drafts(programs, files):
    """A scripted one beside the head: chosen, told, rewound, saved, calibrated apart."""
    passes(programs, "sources_test", *files)


def test_drafts_from_the_text(programs, files):
    """Its index, sessions with and without a head, whose text is plain decoding's, and states."""
    passes(programs, "text_test", *files)


def test_rounds_without_drafts_in_one_call(programs, files):
    """Their text is that of single rounds; where they end; what stays of them after a failure."""
    passes(programs, "plain_rounds_test", *files)


def test_drafts_from_earlier_texts(programs, files):
    """Their memory: its bound, what it forgets, who sees it; a memory that lies."""
    passes(programs, "text_memory_test", *files)


def test_the_number_of_threads(programs):
    """How it is chosen on simulated machines: quiet ones, busy ones, and those that become free."""
    passes(programs, "thread_test")


def test_weights_that_are_shared(programs, tmp_path):
    """Q4_0 weights are repacked for products, which makes rows unreadable: the model keeps two copies."""
    target = tiny_models.target(tmp_path / "target.gguf", kind="Q4_0", tied=True)
    passes(
        programs,
        "failures_test",
        "shared",
        target,
        tiny_models.head(tmp_path / "head.gguf", own_output=False),
    )


@pytest.mark.parametrize("seed", each(range(1, 4), quick=[1]))
def test_rows_together_and_alone(request, seed):
    """Products and attention, bit for bit, and against plain loops."""
    passes(programs_of(request), "products_test", seed)


@pytest.mark.parametrize("seed", each([1, 2], quick=[1]))
def test_interleaved_weights(request, seed, monkeypatch):
    """Read back as written; rows alone, in prompts, in batches and with experts, bit for bit."""
    monkeypatch.setenv("EAGLE3_LLAMA_INTERLEAVE", "1")
    programs, none = programs_of(request), "ok: this build interleaves no weights"
    passes(programs, "interleaved_test", seed, or_says=none)  # a processor with neither AVX2 nor dot products
    passes(programs, "dots_test", seed)


@pytest.mark.parametrize("seed", each([1, 2], quick=[1]))
def test_operations_together_and_alone(request, seed):
    """Norms, positions and writes to the cache, bit for bit; what needs another's result waits for it."""
    passes(programs_of(request), "together_test", seed)


def test_weights_are_not_interleaved_if_told_so(programs, monkeypatch):
    monkeypatch.setenv("EAGLE3_LLAMA_INTERLEAVE", "0")
    done = subprocess.run([programs / "interleaved_test"], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "ok: this build interleaves no weights", done.stdout + done.stderr


def test_products_with_amx(programs):
    """In its layout: rows, batches, several matrices, tiles of others; and it can be left out."""
    found = subprocess.run([programs / "amx_test"], capture_output=True, text=True, timeout=600)
    if found.returncode == 77:
        pytest.skip("AMX: this processor or this build has none")
    passes(programs, "amx_test", 1)
    without = {**os.environ, "EAGLE3_LLAMA_AMX": "0"}
    assert (
        subprocess.run([programs / "amx_test"], env=without, capture_output=True, timeout=60).returncode == 77
    )


@pytest.mark.thorough
def test_planner_in_counted_time(fast_programs):
    """At least 0.97 of the best fixed length and of plain decoding; with wrong costs, 0.96 of plain."""
    passes(fast_programs, "planner_test")


def test_what_the_planner_is_told(programs):
    """Costs, checkpoints, rests, estimates and forecasts, each by itself."""
    passes(programs, "planner_parts_test")


@pytest.mark.parametrize(
    "case",
    each(["load", "measured", "heavy", "turn", "steady", "texts", "forecast"], quick=["heavy", "texts"]),
)
def test_what_the_planner_learnt_does_not_stick(request, case):
    """Within 200 rounds of a change it is within 3% of a planner that begins there, on a simulated clock.

    forecast: what it foresees of rounds is within 5% of what they bring and take.
    """
    passes(programs_of(request), "planner_states_test", case)
