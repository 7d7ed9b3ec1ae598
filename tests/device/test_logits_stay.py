"""Logits stay on the device: a round reads a few numbers of a row, and the text is the CPU's, bit for bit."""

import contextlib
import dataclasses
import functools
import itertools
import random

import gguf
import numpy as np
import pytest
import rpc_device
import tiny_models
from batch_tools import jobs_at_once
from tiny_models import PROMPT, scripted, take

from eagle3_llama import EagleLlama  # before llama_cpp: it brings the library
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.runtime.engine import Draft

from llama_cpp import LlamaGrammar, LogitsProcessorList, StoppingCriteriaList

pytestmark = pytest.mark.thorough  # it needs the library of a device
SIZES = {"n_embd": 256, "n_head": 4, "n_kv": 2}
COMMON = {"n_ctx": 256, "n_batch": 64, "n_threads": 1, "flash_attn": True, "verbose": False}
N_TOKENS, N_VOCAB = 24, tiny_models.N_VOCAB
# bytes of a row: its likeliest token, its 128 largest logits with their ids, all of it
READS = {"likeliest": 8, "largest": 4 * (2 * 128 + 1), "row": 4 * N_VOCAB}

SAMPLED = {"temp": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
# what decides the next token: the likeliest one, the largest logits, or the whole row
SETTINGS = {
    "greedy": ({"temp": 0.0}, "likeliest"),
    "greedy, penalties": ({"temp": 0.0, "repeat_penalty": 1.5}, "largest"),
    "greedy, penalties that raise": ({"temp": 0.0, "repeat_penalty": 0.7}, "row"),
    "defaults": ({"temp": 0.8}, "largest"),
    "top-k": (SAMPLED, "largest"),
    "top-k of 1": ({**SAMPLED, "top_k": 1}, "largest"),
    "top-k of 64": ({**SAMPLED, "top_k": 64}, "largest"),
    "top-k of 65": ({**SAMPLED, "top_k": 65}, "largest"),
    "top-k of 127": ({**SAMPLED, "top_k": 127}, "largest"),
    "top-k of 128": ({**SAMPLED, "top_k": 128}, "row"),
    "top-k of 200": ({**SAMPLED, "top_k": 200}, "row"),
    "top-k off": ({**SAMPLED, "top_k": 0}, "row"),
    "penalties": ({**SAMPLED, "repeat_penalty": 1.3, "presence_penalty": 0.5}, "largest"),
    "frequent": ({**SAMPLED, "frequency_penalty": 1.1, "temp": 2.0}, "largest"),
    "penalties that raise": ({**SAMPLED, "presence_penalty": -1.5}, "row"),
    "hot": ({**SAMPLED, "temp": 3.0, "top_p": 1.0, "min_p": 0.0}, "largest"),
    "typical": ({**SAMPLED, "typical_p": 0.7}, "largest"),
    "top-p": ({**SAMPLED, "top_p": 0.6}, "largest"),
    "min-p": ({**SAMPLED, "min_p": 0.2}, "largest"),
    "temperature below 0": ({"temp": -1.0}, "row"),
    "mirostat": ({"mirostat_mode": 1, "temp": 1.0}, "row"),
    "mirostat 2": ({"mirostat_mode": 2, "temp": 1.0}, "row"),
    "grammar": ({**SAMPLED, "grammar": "root ::= [ -~]*"}, "largest"),
    "grammar, greedy": ({"temp": 0.0, "grammar": "root ::= [ -~]*"}, "largest"),
    "grammar, top-k off": ({**SAMPLED, "top_k": 0, "grammar": "root ::= [ -~]*"}, "row"),
    "logits processor": ({**SAMPLED, "logits_processor": lambda ids, scores: -scores}, "row"),
}


def equal_rows(path):
    """Gives every second token the logits of the one before it."""
    tensor = next(t for t in gguf.GGUFReader(path, "r+").tensors if t.name == "output.weight")
    tensor.data[1::2] = tensor.data[::2]


@pytest.fixture(scope="module", params=["distinct", "ties"])
def target(request, tmp_path_factory):
    path = tiny_models.target(tmp_path_factory.mktemp("stay") / f"{request.param}.gguf", ends=False, **SIZES)
    if request.param == "ties":
        equal_rows(path)
    return str(path)


@pytest.fixture(scope="module")
def cpu(target):
    with rpc_device.weights_as_in_the_file(), EagleLlama(target, n_gpu_layers=0, **COMMON) as llm:
        yield llm


@pytest.fixture(scope="module")
def gpu(device, target):
    with EagleLlama(target, n_gpu_layers=99, **COMMON) as llm:
        yield llm


@contextlib.contextmanager
def chains(llm, expected=(), most=3, right=0.7):
    """Drafts up to so many tokens of the text that follows the prompt; the last is `right` so often."""
    rng = random.Random(0)

    def propose(ask):
        done = len(llm._input_ids) + 1 - len(PROMPT)
        drafts = list(expected[done : done + rng.randint(min(most, 1), most)])
        if drafts and rng.random() > right:
            drafts[-1] = (drafts[-1] + 1) % N_VOCAB
        return Draft(drafts)

    undo = scripted(llm, propose)
    yield
    undo()


def settings(name):
    given = dict(SETTINGS[name][0])
    if "grammar" in given:
        given["grammar"] = LlamaGrammar.from_string(given["grammar"], verbose=False)
    if "logits_processor" in given:
        given["logits_processor"] = LogitsProcessorList([given["logits_processor"]])
    return given


@pytest.mark.parametrize("name", SETTINGS)
def test_the_text_is_the_cpus(name, cpu, gpu):
    with chains(cpu):
        expected = take(cpu, N_TOKENS, **settings(name))
    for most in (0, 3):
        with chains(gpu, expected, most):
            assert take(gpu, N_TOKENS, **settings(name)) == expected


def read_in_rounds(device, llm, expected, most, **given):
    """What 30 tokens read of the device, and the numbers of rounds and of rows."""
    with chains(llm, expected, most, right=1):
        llm.set_seed(5)
        tokens = llm.generate(PROMPT, **{"temp": 0.0, **given})
        list(itertools.islice(tokens, 12))  # from here on the rounds know the sampler
        before = dataclasses.replace(llm.stats)
        device.reset()
        list(itertools.islice(tokens, 28))
        counts = device.counts()
        rounds = llm.stats.rounds - before.rounds if most else 28
        n_rows = rounds + llm.stats.drafted - before.drafted
        tokens.close()
    return counts, rounds, n_rows


@pytest.mark.parametrize("most", [0, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_what_rounds_read(name, most, device, cpu, gpu):
    """Nothing that grows with the vocabulary, but for samplers that read whole rows, and for equal logits."""
    by, ties = SETTINGS[name][1], "ties" in cpu.model_path
    with chains(cpu):
        expected = take(cpu, 60, **settings(name))
    counts, rounds, n_rows = read_in_rounds(device, gpu, expected, most, **settings(name))
    assert n_rows > 2 * rounds if most else n_rows == rounds
    whole = counts["blocking_out_bytes"], counts["blocking_out"]
    if by == "row" and most:
        assert counts["async_out_bytes"] == 0 and whole == (READS["row"] * n_rows, rounds)
    else:  # beside the decode, without a wait
        assert counts["async_out_bytes"] == READS[by] * n_rows
        assert whole <= (READS["row"] * n_rows * ties, rounds)
        assert whole[0] > 0 or by == "row" or not ties


# -- others who read logits -------------------------------------------------------------------------------


def completion(llm, **given):
    llm.set_seed(5)
    llm.reset()
    answer = llm.create_completion(PROMPT, **{"max_tokens": N_TOKENS, "temperature": 0.8, **given})
    return answer["choices"]


def test_logprobs(cpu, gpu):
    expected = completion(cpu, logprobs=5)
    assert len(expected[0]["logprobs"]["tokens"]) > N_TOKENS / 2
    with chains(gpu, take(cpu, N_TOKENS, temp=0.8)):
        assert completion(gpu, logprobs=5) == expected


def test_a_stopping_criterion_reads_the_scores(cpu, gpu):
    def seen(llm):
        rows = []

        def stop(ids, scores):
            rows.append(np.array(scores))
            return len(rows) == 10

        answer = completion(llm, stopping_criteria=StoppingCriteriaList([stop]))
        return answer, np.stack(rows)

    expected, rows = seen(cpu)
    with chains(gpu, take(cpu, N_TOKENS, temp=0.8)):
        answer, read = seen(gpu)
    assert answer == expected and same_bits(read, rows)


def same_bits(a, b):
    return (np.ascontiguousarray(a).view(np.uint32) == np.ascontiguousarray(b).view(np.uint32)).all()


def test_rows_through_the_c_functions(device, target):
    """A row alone, all rows, and the sampler of llama-cpp-python on one of them."""
    rows, tokens = [], []
    for n_gpu_layers in (0, 99):
        with EagleLlama(target, n_gpu_layers=n_gpu_layers, **COMMON) as llm:
            llm.eval(PROMPT)
            for read in (lambda: llm._ctx.get_logits_ith(-1), llm._ctx.get_logits):
                rows.append(np.ctypeslib.as_array(read(), shape=(N_VOCAB,)).copy())
            for sampling in ({"temp": 0.0}, SAMPLED, {**SAMPLED, "top_k": 0}):
                llm.set_seed(3)
                llm.reset()
                llm.eval(PROMPT)
                tokens.append(llm.sample(**sampling))
    assert same_bits(rows, [rows[0]] * 4) and np.abs(rows[0]).max() > 1
    assert tokens[:3] == tokens[3:]


def test_all_scores_of_a_text(device, target):
    rows = []
    for n_gpu_layers in (0, 99):
        with EagleLlama(target, n_gpu_layers=n_gpu_layers, logits_all=True, **COMMON) as llm:
            llm.eval([*PROMPT, *range(10, 120)])
            rows.append(llm.scores[: llm.n_tokens].copy())
    assert rows[0].shape == (len(PROMPT) + 110, N_VOCAB) and same_bits(*rows)


@pytest.mark.parametrize("names", [("greedy", "top-k", "penalties"), ("greedy", "top-k off", "defaults")])
def test_slots_with_different_samplers(names, device, target):
    """Requests that share rounds: each has its own text."""

    def work(batcher, name):
        with batcher.request() as llm:
            llm.set_seed(7)
            return list(itertools.islice(llm.generate(PROMPT, **settings(name)), N_TOKENS))

    answers = []
    for n_gpu_layers in (0, 99):
        at = BatchSettings(target, n_parallel=3, n_ctx=256, n_threads=1, n_gpu_layers=n_gpu_layers)
        with Batcher(at) as batcher:
            answers.append(jobs_at_once(batcher, [functools.partial(work, batcher, name) for name in names]))
    assert answers[0] == answers[1] and all(len(text) == N_TOKENS for text in answers[0])
