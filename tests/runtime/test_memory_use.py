"""What a load takes of memory beyond plain decoding: with large vocabularies, long texts and long drafts."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from commands import run
from paths import ROOT
from tiny_models import take

from eagle3_llama import EagleLlama, EagleParams

DRAFTS = [1, 2, 3, 5, 8, 12, 15, 18, 24, 31, 40, 48, 56, 63]
LARGE = {"kind": "F16", "n_embd": 512, "n_vocab": 150_000}


def measured(**what):
    """What tests/kit/memory_of_a_load.py prints, in a process of its own."""
    child = ROOT / "tests" / "kit" / "memory_of_a_load.py"
    done = run([sys.executable, child, json.dumps(what)], env={**os.environ, "PYTHONPATH": str(child.parent)})
    return json.loads(done.stdout)


def stays_within_a_tenth(plain, target, head, **common):
    """The resident memory beyond plain decoding's: the head's file, its cache and 10%. And the same text."""
    eagle = measured(model=str(target), eagle=str(head), n_max=DRAFTS, **common)
    assert eagle["tokens"] == plain["tokens"]
    allowed = Path(head).stat().st_size + eagle["memory"]["head_cache"] + plain["resident"] // 10
    more = eagle["resident"] - plain["resident"]
    assert more <= allowed, f"{more / 1e6:.1f} MB more, {allowed / 1e6:.1f} are allowed: {eagle['memory']}"
    # the report: the head's cost is known, and what drafts add to the target's is bounded
    used, before = eagle["memory"], eagle["loaded"]
    assert used["head_weights"] > 0 and used["head_compute"] > 0
    assert used["target_compute"] - before["target_compute"] <= max(
        (used["target_weights"] + used["target_cache"]) // 12, 16 * (1 << 20)
    )
    assert used["target_weights"] == before["target_weights"] == plain["memory"]["target_weights"]
    for took in (plain, eagle):  # memory that is reserved and not used would be reported and not resident
        assert sum(took["memory"].values()) <= 1.1 * took["resident"]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A target with a vocabulary of 150,000, and what it takes without a head."""
    target = tmp_path_factory.mktemp("large") / "target.gguf"
    tiny_models.target(target, **LARGE, n_ctx=16384, ends=False)
    yield target, measured(model=str(target), n_max=DRAFTS, flash_attn=True)
    target.unlink()  # 300 MB


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("layers", [(1, 2, 3), (1, 2, 4)], ids=["inputs", "what follows the last layer"])
def test_a_large_vocabulary(tmp_path, large, layers):
    """150,000 tokens, drafts of up to 63, a text of 8,000 tokens.

    A head that reads what follows the last layer needs all rows of the prompt, and none of their logits.
    """
    target, plain = large
    head = tiny_models.head(tmp_path / "head.gguf", **LARGE, layers=layers)
    stays_within_a_tenth(plain, target, head, flash_attn=True)


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_many_attention_heads_without_flash_attention(tmp_path):
    """32 heads whose scores of the whole text are in the compute buffer."""
    many = {"n_head": 32, "n_kv": 32, "n_ctx": 16384}
    target = tiny_models.target(tmp_path / "target.gguf", kind="F16", n_embd=512, **many, ends=False)
    head = tiny_models.head(tmp_path / "head.gguf", kind="F16", n_embd=512)
    common = {"flash_attn": False, "n_text": 3000}
    plain = measured(model=str(target), n_max=DRAFTS, **common)
    stays_within_a_tenth(plain, target, head, **common)


def test_what_a_load_reports(files, capfd):
    target, head = files
    with EagleLlama(target, eagle=head, n_ctx=256, verbose=True) as llm:
        memory = llm.memory()
        assert f"EagleLlama: {memory}".split(", compute")[0] in capfd.readouterr().err
        take(llm, 20)
        after = llm.memory()
        assert min(n for name, n in vars(after).items() if name != "prompt_cache") > 0
        assert after.prompt_cache == 0 and "; drafter 0." in str(after)
        assert after.target_weights == memory.target_weights and after.head_cache == memory.head_cache
    with EagleLlama(target, n_ctx=256, verbose=False) as llm:
        assert llm.memory().head_weights == 0 and "drafter" not in str(llm.memory())


def test_logits_of_more_rows_than_there_is_memory_for(tmp_path):
    """A batch that wants all of its rows' logits lets the buffers grow; drafts go on in the new ones."""
    target = tiny_models.target(tmp_path / "target.gguf", n_vocab=20_000)
    head = tiny_models.head(tmp_path / "head.gguf", n_vocab=20_000)
    prompt = [1, *(3 + i % 250 for i in range(199))]
    common = {"eagle": str(head), "n_ctx": 256, "logits_all": True, "verbose": False}
    small, large = (EagleLlama(str(target), n_batch=n, n_ubatch=n, **common) for n in (16, 256))
    with small, large:
        texts = []
        for llm in (small, large):
            before = llm.memory().target_compute
            llm.eagle_params = EagleParams(4)
            texts.append(take(llm, 8, [1]))
            llm.reset()
            llm.eval(prompt)
            assert (llm.memory().target_compute - before > 130 * 4 * 20_000) == (llm is large)
            texts.append(take(llm, 20, prompt))
        assert texts[:2] == texts[2:]
        assert small.scores.shape[0] >= 200
        np.testing.assert_array_equal(large.scores[:200], small.scores[:200])
