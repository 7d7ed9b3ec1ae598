"""A prompt that a batcher decodes in chunks: the bits of a single request, however fast earlier ones were.

In K-quants, whose sums depend on a row's place in its micro-batch.
"""

import ctypes
import itertools
import random

import pytest
import tiny_models
from threads import wait_for
from tiers import crossed

from eagle3_llama import EagleLlama  # before llama_cpp: it brings the library
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.batching.chunks import INVARIANT_ROWS, least_chunk, next_chunk
from eagle3_llama.batching.model import BatchModel

import llama_cpp

N_CTX, N_EMBD = 768, 256  # heads of 64; a K-quant needs rows of 256
SIZES = [70, 130, 200, 515, 530, 600]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    at = tmp_path_factory.mktemp("chunks")
    wide = tiny_models.target(at / "F32.gguf", n_embd=N_EMBD, n_layer=2, ends=False)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
    out = at / "Q4_K_M.gguf"
    assert llama_cpp.llama_model_quantize(str(wide).encode(), str(out).encode(), ctypes.byref(params)) == 0
    return str(out)


def prompts(llm):
    """Random letters, of which each is a token."""
    rng = random.Random(0)
    text = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(max(SIZES)))
    more = len(llm.tokenize(text.encode())) - len(text)
    return [text[: n - more] for n in SIZES]


def said(llm, prompt, seed, echo=False):
    """The tokens' texts and logprobs; with echo those of the prompt's tokens too."""
    choice = llm.create_completion(
        prompt, max_tokens=6, temperature=0.8, seed=seed, logprobs=2, echo=echo, logit_bias={2: -100.0}
    )["choices"][0]
    rows = choice["logprobs"]
    return choice["text"], rows["tokens"], rows["token_logprobs"][1:]


@pytest.fixture
def changing(monkeypatch):
    """changing(batcher, rng): after each chunk, another speed of prompts was measured. The list of chunks."""

    def change(batcher, rng):
        rounds, chunks = batcher._scheduler, []
        decode = rounds._prompt_chunk

        def chunk(slot, job, n):
            chunks.append(n)
            decode(slot, job, n)
            rounds._prompt_rate = rng.choice([0.0, 300.0, 400.0, 700.0, 1111.0, 3000.0, 1e6])

        monkeypatch.setattr(rounds, "_prompt_chunk", chunk)
        return chunks

    return change


@pytest.mark.parametrize("n_batch, echo", crossed([512, 100], [False, True]))
def test_k_quants(target, changing, n_batch, echo):
    """Texts and logprobs are EagleLlama's, bit by bit; and the prompts were really cut, in many ways."""
    common = {"n_ctx": N_CTX, "n_batch": n_batch, "n_threads": 1, "n_threads_batch": 1}
    alone = EagleLlama(target, flash_attn=True, verbose=False, **common)
    rng, cuts = random.Random(1), set()
    with Batcher(BatchSettings(target, n_parallel=2, n_ctx=N_CTX, n_batch=n_batch, n_threads=1)) as batcher:
        chunks = changing(batcher, rng)
        for seed, prompt in enumerate(prompts(alone)):
            assert len(alone.tokenize(prompt.encode())) == SIZES[seed]
            alone.reset()
            expected = said(alone, prompt, seed, echo)
            for _ in range(3):
                for slot in range(2):  # nothing of the prompt is there already
                    empty(batcher, slot)
                chunks.clear()
                with batcher.request() as llm:
                    assert said(llm, prompt, seed, echo) == expected, (len(prompt), chunks)
                assert sum(chunks) == SIZES[seed]
                cuts.add(tuple(chunks))
        assert batcher.snapshot()["reused_tokens"] == 0
    alone.close()
    if n_batch == 512:  # else nothing of a batch can be cut
        for n in (200, 515, 530, 600):
            assert len({cut for cut in cuts if sum(cut) == n and len(cut) > 1 + n // n_batch}) > 0, (n, cuts)
        assert len(cuts) > len(SIZES)


def test_where_prompts_may_be_cut(target, tmp_path):
    """Rows per expert depend on the whole micro-batch: K-quants of mixtures of experts are not cut there."""
    q8_0 = str(tiny_models.target(tmp_path / "Q8_0.gguf", kind="Q8_0"))
    for path, changed, step in (
        (target, {}, 4),
        (target, {"llama.expert_count": "8"}, 512),
        (q8_0, {"llama.expert_count": "8", "general.file_type": "7"}, 4),
        (q8_0, {"llama.expert_count": "8"}, 512),  # it does not say what it is
    ):
        model = BatchModel(BatchSettings(path, n_parallel=1, n_ctx=1024, n_threads=1))
        model.metadata.update(changed)
        assert model.prompt_step() == step
        model.close()


def empty(batcher, slot):
    wait_for(lambda: not batcher.slots()[slot]["busy"])
    batcher.inbox.run(lambda: batcher._prefixes.keep(batcher._slots[slot], 0))


@pytest.mark.parametrize("step", [4, 64])
def test_how_prompts_are_cut(step):
    """By definition: what a chunk decodes of a micro-batch has its rows where the whole has them."""
    rng = random.Random(step)
    for n, n_batch, n_ubatch in itertools.chain(
        itertools.product(range(1, 700), [512], [512]),
        ((rng.randrange(1, 3000), rng.randrange(64, 2100), 512) for _ in range(600)),
        ((rng.randrange(1, 1500), b := rng.randrange(64, 512), b) for _ in range(600)),
    ):
        n_ubatch = min(n_ubatch, n_batch)
        done, rates = 0, [0, rng.randrange(1, 700), 10**6]
        while done < n:
            least = least_chunk(rng.choice(rates), step)
            size = next_chunk(done, n, n_batch, n_ubatch, least, step)
            assert 1 <= size <= n_batch
            for start, end, micro in micro_batches(done, size, n, n_batch, n_ubatch):
                whole = (start, end) == micro
                if micro[1] - micro[0] <= INVARIANT_ROWS:
                    assert whole
                assert whole or (start - micro[0]) % step == 0
                assert whole or end == micro[1] or (end - micro[0]) % step == 0
                assert whole or end - start > INVARIANT_ROWS
                assert whole or end - start < 2 * least + step
            done += size
        assert done == n


def micro_batches(done, size, n, n_batch, n_ubatch):
    """What a chunk decodes: (start, end, the micro-batch of a single request that it lies in)."""
    out, at = [], done
    while at < done + size:
        batch = at - at % n_batch
        micro = batch + (at - batch) // n_ubatch * n_ubatch
        end = min(micro + n_ubatch, batch + n_batch, n)
        out.append((at, min(end, done + size), (micro, end)))
        at = out[-1][1]
    # llama.cpp cuts the chunk by itself: it must do so where a single request's batch is cut
    edges = [a for a, _, _ in out[1:]]
    assert edges == [done + n_ubatch * (i + 1) for i in range(len(edges))]
    assert done // n_batch == (done + size - 1) // n_batch
    return out
