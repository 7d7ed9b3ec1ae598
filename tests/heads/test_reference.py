"""The native head against an independent PyTorch implementation, on the real model."""

import json

import numpy as np
import pytest
from cores import THREADS
from paths import DATA
from safetensors.numpy import load_file

from eagle3_llama import EagleLlama, EagleParams
from eagle3_llama.heads.convert import convert
from eagle3_llama.models import shipped_head, smollm2


def cosine(a, b):
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.fixture(scope="module")
def target():
    return str(smollm2("F32"))


@pytest.fixture(scope="module")
def heads(target, tmp_path_factory):
    """The reference head in the formats that people convert to."""
    out = {t: tmp_path_factory.mktemp("head") / f"{t}.gguf" for t in ("f32", "q8_0")}
    for outtype, path in out.items():
        convert(DATA / "reference-head", target, path, outtype=outtype)
    return {t: str(p) for t, p in out.items()}


@pytest.mark.parametrize("k", [0, 1])
@pytest.mark.parametrize("which, least", [("f32", 0.9999), ("q8_0", 0.999)])
def test_head_matches_reference(target, heads, which, least, k):
    llm = EagleLlama(target, eagle_path=heads[which], n_ctx=512, verbose=False)
    r = load_file(DATA / "reference.safetensors")
    features = r[f"{k}.features"].astype(np.float32)
    g, prenorm, logits = llm.engine.head.forward(r[f"{k}.tokens"][1:], features)
    for ours, theirs in (
        (g[-24:], r[f"{k}.g"]),
        (prenorm[-24:], r[f"{k}.prenorm"]),
        (logits[-4:], r[f"{k}.logits"]),
    ):
        assert min(cosine(a, b) for a, b in zip(ours, theirs)) > least
    same = (llm.engine.head.d2t()[logits.argmax(1)] == r[f"{k}.draft_ids_step0"]).mean()
    assert same >= (1.0 if which == "f32" else 0.95)
    llm.close()


@pytest.mark.parametrize("outtype", ["f16", "q4_0"])
def test_upstream_reads_converted_heads(target, tmp_path, outtype):
    """llama.cpp's unpatched loader of `eagle3` finds every key, tensor and shape that it needs."""
    import llama_cpp

    out = tmp_path / "head.gguf"
    convert(DATA / "reference-head", target, out, outtype=outtype)
    for path in (out, shipped_head()):
        model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        assert model and llama_cpp.llama_model_n_embd(model) == 576
        llama_cpp.llama_model_free(model)


def test_live_features_match_reference(target):
    """Captured from the F32 target over several micro-batches; the file's features are float16."""
    from eagle3_llama.runtime.binding import address
    from eagle3_llama.runtime.capture import Capture

    from llama_cpp import Llama

    r = load_file(DATA / "reference.safetensors")
    tokens, features = r["0.tokens"], r["0.features"].astype(np.float32)
    llm = Llama(target, n_ctx=512, n_batch=256, n_ubatch=48, verbose=False)
    with Capture(address(llm._ctx.ctx), [2, 15, 27], llm.n_embd()) as capture:
        llm.eval(tokens[: len(features)].tolist())
        live = capture.read(len(features)).reshape(features.shape)
    assert min(cosine(a, b) for a, b in zip(live, features)) > 0.9999
    llm.close()


def test_acceptance_matches_reference(target, heads):
    """At the first three positions, acceptance rates are within 3 points of the reference's (greedy chains).

    The chains run over the reference's answers, so that they do not depend on the CPU. A third of the texts.
    """
    expected = json.loads((DATA / "expected.json").read_text())
    chain, accepted, rounds, texts = expected["chain"], [0] * expected["chain"], 0, expected["texts"][::3]
    llm = EagleLlama(
        target, eagle_path=heads["f32"], n_max=chain, n_ctx=1024, n_threads=THREADS, verbose=False
    )
    for text in texts:
        tokens, at = [*text["prompt_tokens"], *text["greedy_tokens"]], len(text["prompt_tokens"])
        llm.reset()
        llm.eval(tokens[:at])
        while at + chain + 1 < len(
            tokens
        ):  # the reference counts rounds whose chain the answer can tell whole
            drafts, _ = llm.engine.steps.draft(tokens[at], EagleParams(chain))
            n = next(
                (i for i, (draft, said) in enumerate(zip(drafts, tokens[at + 1 :])) if draft != said), chain
            )
            accepted = [count + (i < n) for i, count in enumerate(accepted)]
            llm.eval(tokens[at : at + n + 1])
            at, rounds = at + n + 1, rounds + 1
    theirs = sum(text["rounds"] for text in texts)
    assert abs(rounds - theirs) < 0.03 * theirs
    for i in range(3):
        assert abs(accepted[i] / rounds - sum(text["accepted"][i] for text in texts) / theirs) <= 0.03
    llm.close()
