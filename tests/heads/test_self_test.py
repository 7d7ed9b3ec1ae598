"""`convert --self-test`: which layers are tried, what is counted, what the errors are, and the verdicts on
the real model."""

import re

import heads
import numpy as np
import pytest
import tiny_models
from checkpoints import write_head
from converting import converted, run_command, shared
from cores import THREADS
from paths import DATA
from tiers import each
from wrong_layers import CENTRE, shifted, trials_of_wrong_layers

from eagle3_llama import EagleError, EagleLlama
from eagle3_llama.common.gguf_reader import read_gguf
from eagle3_llama.errors import ErrorKind
from eagle3_llama.heads import guesses, readings
from eagle3_llama.heads.compare.graph import GraphLayers
from eagle3_llama.heads.compare.read import read_reference
from eagle3_llama.heads.convert import convert
from eagle3_llama.heads.convert.writer import constant, write_gguf
from eagle3_llama.heads.guesses import Passage, Reader, stored_texts
from eagle3_llama.heads.self_test import (
    BLOCK,
    FEWEST,
    Gain,
    Report,
    Trial,
    Verdict,
    better_readings,
    neighbours,
    paired,
    report,
    self_test,
    verdict,
)
from eagle3_llama.models import shipped_head, smollm2


@pytest.fixture(scope="module")
def passage(target):
    """The tiny target's text with a foreign token after every seventh token. The first few do not count."""
    llm, tokens = EagleLlama(str(target), n_ctx=128, n_threads=THREADS, verbose=False), [*tiny_models.PROMPT]
    for other in (61, 90, 75, 100, 68):
        tokens += [*tiny_models.take(llm, 7, tokens), other]
    llm.close()
    return Passage([int(t) for t in tokens], len(tiny_models.PROMPT) + 3)


# -- which layers -------------------------------------------------------------------------------------------


def test_neighbours():
    """All together and each alone, in both directions."""
    assert neighbours([2, 6, 9], 12) == [
        [2, 6, 9],
        [1, 5, 8],
        [3, 7, 10],
        [1, 6, 9],
        [3, 6, 9],
        [2, 5, 9],
        [2, 7, 9],
        [2, 6, 8],
        [2, 6, 10],
    ]


@pytest.mark.parametrize(
    "own, n_layer, expected",
    [
        ([0, 3], 3, [[0, 3], [1, 3], [0, 2]]),  # at both ends
        ([0, 1, 2], 2, [[0, 1, 2]]),  # no room at all
        ([1, 2], 3, [[1, 2], [0, 1], [2, 3], [0, 2], [1, 3]]),  # none twice
        ([12], 12, [[12], [11]]),  # EAGLE-1
    ],
)
def test_neighbours_at_the_borders(own, n_layer, expected):
    assert neighbours(own, n_layer) == expected


# -- what is counted ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", each(heads.RECIPES, quick=heads.FEW))
def test_guesses_are_the_references(tmp_path, target, passage, name):
    """Every variant, with its own layers and others: tokens, features and answers are those of the same
    position."""
    path = converted(tmp_path, name, target)[1]
    with Reader(path, target, THREADS) as reader:
        choices = neighbours(reader.layers, reader.n_layer)[:3]
        answers, hits, likelihoods = reader.guesses(passage, choices)
    expected = expected_guesses(path, target, passage, choices)
    np.testing.assert_array_equal(answers, expected[0])
    np.testing.assert_allclose(likelihoods, expected[2], rtol=0.02, atol=0.02)
    assert hits.shape == likelihoods.shape == (len(choices), len(answers)) and len(answers) >= 32
    assert (hits != expected[1]).mean() < 0.1  # near ties may fall differently


def expected_guesses(path, target, passage, choices):
    """As Reader.guesses, by the reference on the layers that the graph itself shows, position by position."""
    reference, graph, tokens = read_reference(path, target), GraphLayers(target), passage.tokens
    llm = EagleLlama(str(target), n_ctx=128, n_threads=THREADS, logits_all=True, verbose=False)
    d2t = head_ids(path, target)
    p = []
    for i in range(len(tokens)):  # one by one: the logits of each are the last one's
        llm.eval(tokens[i : i + 1])
        p.append(np.array(llm._ctx.get_logits()[: llm.n_vocab()], np.float64))
    llm.close()
    p = np.exp(np.array(p) - np.max(p, axis=1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    counted = [i for i in range(passage.n_prompt, len(tokens)) if tokens[i] == p[i - 1].argmax()]
    graph.decode(tokens, range(len(tokens)))
    hits, likelihoods = [], []
    for layers in choices:
        features = np.concatenate([graph.truth(k) for k in layers], axis=1)[:-1]
        z = reference.forward(np.array(tokens[1:]), reference.fuse(features))["logits"]
        log_q = (
            z - z.max(1, keepdims=True) - np.log(np.exp(z - z.max(1, keepdims=True)).sum(1, keepdims=True))
        )
        hits.append([d2t[log_q[i - 1].argmax()] == p[i].argmax() for i in counted])
        likelihoods.append([p[i][d2t] @ log_q[i - 1] for i in counted])
    graph.close()
    return np.array([p[i].argmax() for i in counted]), np.array(hits), np.array(likelihoods)


def head_ids(path, target):
    with Reader(path, target) as reader:
        return reader.d2t


def test_passages_are_alike_whatever_came_before(target, passage, tmp_path):
    """The second time, and after another passage, the same: nothing of one passage is seen in the next."""
    path = converted(tmp_path, "SpecForge", target)[1]
    with Reader(path, target, THREADS) as reader:
        choices = neighbours(reader.layers, reader.n_layer)
        first = reader.guesses(passage, choices)
        reader.guesses(Passage(passage.tokens[::-1], 1), choices)
        for a, b in zip(first, reader.guesses(passage, choices)):
            np.testing.assert_array_equal(a, b)


def test_bad_input(target, tmp_path):
    path = converted(tmp_path, "SpecForge", target)[1]
    with pytest.raises(EagleError, match="needs passages"):
        self_test(path, target, passages=[])
    with pytest.raises(EagleError, match="at least two tokens"):
        self_test(path, target, passages=[Passage([5], 1)])
    with pytest.raises(EagleError) as e:
        self_test(path, target, passages=[Passage([5, 100_000, 7], 1)])
    assert e.value.kind is ErrorKind.BAD_ARGUMENT
    (tmp_path / "no.gguf").write_bytes(b"nothing")
    with pytest.raises(EagleError, match="no.gguf"):
        self_test(tmp_path / "no.gguf", target)
    with pytest.raises(EagleError, match="hidden size"):
        self_test(path, tiny_models.target(tmp_path / "wide.gguf", n_embd=96))


def test_stored_texts():
    texts = stored_texts()
    assert len(texts) >= 8 and all(len(q) > 20 and len(a) > 300 and "===" not in a for q, a in texts)


# -- errors and verdicts ------------------------------------------------------------------------------------


def test_errors():
    """Of independent positions the usual one; of positions that come in runs that of the runs; none for too
    few."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(400 * BLOCK)
    assert paired(x).error == pytest.approx(1 / np.sqrt(len(x)), rel=0.15)
    runs = np.repeat(rng.standard_normal(400), BLOCK)
    assert paired(runs).error == pytest.approx(1 / np.sqrt(400), rel=0.15) and paired(
        runs
    ).mean == pytest.approx(runs.mean())
    assert paired(x[: FEWEST - 1]).error == np.inf and paired(x[:0]) == Gain(0.0, np.inf)
    assert paired(np.zeros(FEWEST)) == Gain(0.0, 0.0)


def test_report_is_paired():
    """Whatever makes positions differ cancels: a gain of 0.01 among likelihoods that vary by 3 is found
    without an error."""
    rng = np.random.default_rng(0)
    answers, likelihood = rng.integers(0, 5, 2000), 3 * rng.standard_normal(2000)
    hits = rng.random(2000) < 0.5
    found = report([[1], [2]], answers, np.array([hits, ~hits]), np.array([likelihood, likelihood + 0.01]))
    own, other = found.trials
    assert own.likelihood == own.acceptance == Gain(0.0, 0.0) and own.accepted == hits.mean()
    assert other.likelihood.mean == pytest.approx(0.01) and other.likelihood.error < 1e-9
    assert other.acceptance.mean == pytest.approx(1 - 2 * hits.mean())
    assert found.positions == 2000 and found.chance == np.bincount(answers).max() / 2000


@pytest.mark.parametrize(
    "gains, expected, said",
    [
        ([(-0.02, 0.005), (-0.1, 0.01)], Verdict.FINE, "are right"),
        ([(-0.001, 0.002), (-0.1, 0.01)], Verdict.FINE, "are right"),  # if there is a gain, it is nothing
        (
            [(-0.01, 0.02), (-0.1, 0.01)],
            Verdict.CANNOT_TELL,
            r"these may be as good: \[1\], ",
        ),  # it may be something
        ([(-0.1, 0.01), (0.001, 0.002)], Verdict.CANNOT_TELL, r"these may be as good: \[2\], "),
        ([(0.02, 0.01), (-0.1, 0.01)], Verdict.CANNOT_TELL, r"these may be as good: \[1\], "),
        (
            [(0.04, 0.01), (0.05, 0.01)],
            Verdict.WRONG,
            r"layers \[2\], .* --extract-layers 2$",
        ),  # the better of two
        (
            [(0.04, 0.01), (0.05, 0.02)],
            Verdict.WRONG,
            r"layers \[1\], .* --extract-layers 1$",
        ),  # the other is not certain
        ([], Verdict.FINE, "are right"),
    ],
)
def test_verdicts(gains, expected, said):
    trials = [
        Trial([0], 0.4, Gain(0, 0), Gain(0, 0)),
        *(Trial([i + 1], 0.4, Gain(0, 0), Gain(*g)) for i, g in enumerate(gains)),
    ]
    kind, line = verdict(Report(2000, 0.1, trials))
    assert kind is expected
    assert re.search(said, line), line


def test_no_verdict_without_ground():
    """On few positions, and for guesses no better than the most frequent token, gains mean nothing."""
    trials = [Trial([0], 0.11, Gain(0, 0), Gain(0, 0)), Trial([1], 0.12, Gain(0.01, 0.001), Gain(0.5, 0.01))]
    kind, line = verdict(Report(2000, 0.1, trials))
    assert kind is Verdict.CANNOT_TELL and "always the same token" in line
    kind, line = verdict(Report(FEWEST - 1, 0.0, trials))
    assert kind is Verdict.CANNOT_TELL and f"{FEWEST} are needed" in line
    assert (
        verdict(report([[0], [1]], np.zeros(0, int), np.zeros((2, 0), bool), np.zeros((2, 0))))[0]
        is Verdict.CANNOT_TELL
    )


def test_untrained_head(tmp_path, target):
    """A head that always says the same, on a thousand positions of what the target says itself."""
    made = heads.make("SpecForge", shared(target))
    made.tensors["lm_head.weight"][:] = 0
    head = convert(
        write_head(tmp_path / "head", made.config, made.tensors), target, tmp_path / "head.gguf", "f32"
    ).out
    llm = EagleLlama(str(target), n_ctx=128, n_threads=THREADS, verbose=False)
    prompts = [[1, 60 + i, 70 + i] for i in range(12)]
    passages = [Passage([*prompt, *tiny_models.take(llm, 100, prompt)], 3) for prompt in prompts]
    llm.close()
    seen = []
    found = self_test(head, target, THREADS, on_passage=lambda *x: seen.append(x), passages=passages)
    assert found.positions >= 1000 and seen == [(i + 1, 12) for i in range(12)]
    kind, line = verdict(found)
    assert kind is Verdict.CANNOT_TELL and "untrained" in line, found


def test_command_on_a_tiny_target(tmp_path, target):
    """The built-in texts are read by any target; where nothing can be told, that is printed, and it is no
    error."""
    head = heads.make("SpecForge", shared(target))
    write_head(tmp_path / "head", head.config, head.tensors)
    done = run_command(tmp_path / "head", "--target", target, "--out", tmp_path / "out.gguf", "--self-test")
    assert done.exit_code == 0, done.output
    said = done.stderr.splitlines()  # not a terminal: lines
    assert any(line.startswith("converting: ") and " bytes" in line for line in said)
    assert any(line.startswith("self-test: 10 of 10 texts") for line in said)
    assert "self-test: cannot tell" in done.output and done.output.count("self-test, layers") == 9


# -- the real model -----------------------------------------------------------------------------------------


@pytest.fixture
def half_of_the_texts(monkeypatch):
    """Enough for a verdict; tests/by_hand/self_test_matrix.py tries all of them, in several formats."""
    texts = stored_texts()[::2]
    monkeypatch.setattr(guesses, "stored_texts", lambda: texts)


@pytest.mark.thorough
def test_other_readings(half_of_the_texts, tmp_path):
    """Embeddings that mean nothing are found out; a rope base that is right is not doubted."""
    head, target = shipped_head(), smollm2("Q4_0")
    file, rng = read_gguf(head), np.random.default_rng(0)
    shape = read_gguf(target).tensors["token_embd.weight"].shape
    rubbish = constant("token_embd.weight", (rng.standard_normal(shape) * 0.1).astype(np.float32))
    keys = {k: v for k, v in file.keys.items() if k != "general.architecture"}
    bad = tmp_path / "bad.gguf"
    write_gguf(bad, "eagle3", keys, [*map(readings._copy, file.tensors.values()), rubbish])
    assert abs(readings.embeddings_alike(bad, target)) < 0.01
    assert readings.embeddings_alike(head, target) is None
    found = self_test(bad, target, THREADS)
    assert [t.reading for t in found.readings] == ["the target's embeddings", "rope base 10000"]
    [line] = better_readings(found)
    assert line.startswith("the head does better with the target's embeddings (")
    assert line.endswith("remove embed_tokens.weight from the checkpoint, and convert it again")
    whole = self_test(head, target, THREADS)
    assert [t.reading for t in whole.readings] == ["rope base 10000"] and better_readings(whole) == []
    assert whole.trials[0].accepted == found.readings[0].accepted > 2 * found.trials[0].accepted


@pytest.mark.thorough
def test_shipped_head(half_of_the_texts):
    """No wrong verdict for the right layers, for all shifted by one, and for one of three shifted."""
    found = trials_of_wrong_layers(
        shipped_head(), smollm2("Q4_0"), [(0, 0, 0), (1, 1, 1), (0, 0, -1)], THREADS
    )
    assert found[0, 0, 0].positions >= FEWEST
    for shift, what in found.items():
        kind, line = verdict(what)
        if shift == (0, 0, 0):
            assert kind is not Verdict.WRONG, line
        elif shift == (1, 1, 1):
            assert kind is Verdict.WRONG, line
        else:
            assert kind is not Verdict.FINE, line
        assert kind is not Verdict.WRONG or what_is_named(line) == CENTRE, line


def what_is_named(line):
    return [int(i) for i in line.rsplit("--extract-layers ", 1)[1].split(",")]


@pytest.mark.thorough
def test_command_finds_wrong_layers(tmp_path, half_of_the_texts):
    """The reference head converted with all its layers one too low: the command says so, and names the right
    ones."""
    layers = ",".join(map(str, shifted((-1, -1, -1))))
    done = run_command(
        DATA / "reference-head",
        "--target",
        smollm2("Q4_0"),
        "--out",
        tmp_path / "head.gguf",
        "--outtype",
        "q8_0",
        "--extract-layers",
        layers,
        "--self-test",
    )
    assert done.exit_code == 0 and "WARNING" in done.stderr, done.output
    assert what_is_named(done.stderr.strip()) == CENTRE
