"""The native head against independent PyTorch implementations, on the real model: see tests/data/README.md.

Quick tests take SmolLM2 as it is downloaded, thorough ones the F32 model, which the figures are of. The head
sees no difference: its embeddings are the same in both files.
"""

import json
from functools import cache

import numpy as np
import pytest
from cores import THREADS
from paths import DATA
from safetensors.numpy import load_file
from tiers import each

from eagle3_llama import EagleLlama, EagleParams
from eagle3_llama.heads.convert import convert
from eagle3_llama.models import shipped_head, smollm2


def cosine(a, b):
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """The reference head in the formats that people convert to, made when asked for."""

    @cache
    def of(outtype):
        path = tmp_path_factory.mktemp("head") / f"{outtype}.gguf"
        return str(convert(DATA / "reference-head", smollm2(), path, outtype=outtype).out)

    return of


@pytest.mark.parametrize("outtype, least", each([("f32", 0.999999), ("q8_0", 0.999)], [("f32", 0.999999)]))
def test_head_matches_reference(heads, outtype, least):
    llm = EagleLlama(str(smollm2()), eagle_path=heads(outtype), n_ctx=512, verbose=False)
    r = load_file(DATA / "reference.safetensors")
    for k in (0, 1):
        features = r[f"{k}.features"].astype(np.float32)
        g, prenorm, logits = llm.engine.head.forward(r[f"{k}.tokens"][1:], features)
        for ours, theirs in (
            (g[-24:], r[f"{k}.g"]),
            (prenorm[-24:], r[f"{k}.prenorm"]),
            (logits[-4:], r[f"{k}.logits"]),
        ):
            assert ours.shape == theirs.shape and min(cosine(a, b) for a, b in zip(ours, theirs)) > least
        same = (llm.engine.head.d2t()[logits.argmax(1)] == r[f"{k}.draft_ids_step0"]).mean()
        # Q8_0 takes another token where two are nearly as likely
        assert same >= (1.0 if outtype == "f32" else 0.9)
    llm.close()


@pytest.mark.parametrize("outtype", ["f16", "q4_0"])
def test_upstream_reads_converted_heads(tmp_path, outtype):
    """llama.cpp's unpatched loader of `eagle3` finds every key, tensor and shape that it needs."""
    import llama_cpp

    out = tmp_path / "head.gguf"
    convert(DATA / "reference-head", smollm2(), out, outtype=outtype)
    for path in (out, shipped_head()):
        model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        assert model and llama_cpp.llama_model_n_embd(model) == 576
        llama_cpp.llama_model_free(model)


@pytest.mark.parametrize("fmt, least", each([("Q4_1", 0.997), ("F32", 0.9999)], [("Q4_1", 0.997)]))
def test_live_features_match_reference(fmt, least):
    """Captured over several micro-batches. The file's features are those of F32, as float16.

    With Q4_1 some position has less than 0.93 if the input of a layer is that of the next or the last one.
    """
    from eagle3_llama.runtime.binding import address
    from eagle3_llama.runtime.capture import Capture

    from llama_cpp import Llama

    r = load_file(DATA / "reference.safetensors")
    tokens, features = r["0.tokens"], r["0.features"].astype(np.float32)
    llm = Llama(str(smollm2(fmt)), n_ctx=512, n_batch=256, n_ubatch=48, verbose=False)
    with Capture(address(llm._ctx.ctx), [2, 15, 27], llm.n_embd()) as capture:
        llm.eval(tokens[: len(features)].tolist())
        live = capture.read(len(features)).reshape(features.shape)
    for ours, theirs in zip(np.split(live, 3, axis=1), np.split(features, 3, axis=1)):
        assert min(cosine(a, b) for a, b in zip(ours, theirs)) > least
    llm.close()


@pytest.mark.thorough
def test_acceptance_matches_reference(heads):
    """At each position, acceptance rates are within a point of the reference's (greedy chains).

    The chains run over the reference's answers, so that only ties depend on the CPU. A third of the texts.
    """
    expected = json.loads((DATA / "expected.json").read_text())
    chain, accepted, rounds, texts = expected["chain"], [0] * expected["chain"], 0, expected["texts"][::3]
    llm = EagleLlama(
        str(smollm2("F32")),
        eagle_path=heads("f32"),
        n_max=chain,
        n_ctx=1024,
        n_threads=THREADS,
        verbose=False,
    )
    for text in texts:
        tokens, at = [*text["prompt_tokens"], *text["greedy_tokens"]], len(text["prompt_tokens"])
        llm.reset()
        llm.eval(tokens[:at])
        # the reference counts rounds whose chain the answer can tell whole
        while at + chain + 1 < len(tokens):
            drafts, _ = llm.engine.steps.draft(tokens[at], EagleParams(chain))
            wrong = (i for i, draft in enumerate(drafts) if draft != tokens[at + 1 + i])
            n = next(wrong, chain)
            accepted = [count + (i < n) for i, count in enumerate(accepted)]
            llm.eval(tokens[at : at + n + 1])
            at, rounds = at + n + 1, rounds + 1
    theirs = sum(text["rounds"] for text in texts)
    assert abs(rounds - theirs) <= 0.01 * theirs
    for i, count in enumerate(accepted):
        assert abs(count / rounds - sum(text["accepted"][i] for text in texts) / theirs) <= 0.01
    llm.close()
