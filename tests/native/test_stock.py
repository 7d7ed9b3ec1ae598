"""This project's library against llama.cpp as upstream has it: logits and text, for one row and for many.

All other references run in the patched library, where a patch that is wrong alike for one row and for many
would be wrong in both. Patches sum in another order, so logits are compared within a bound: the root mean
square of the differences, as a share of the logits' own.
"""

import json

import numpy as np
import pytest
import stock
import tiny_models
from test_invariance import Decoder

from eagle3_llama import EagleLlama
from eagle3_llama.models import shipped_head, smollm2
from eagle3_llama.runtime.hook import SUFFIX
from eagle3_llama.runtime.library import find_lib_dir

import llama_cpp

pytestmark = pytest.mark.thorough  # it needs the unpatched library
N = 24
PROMPT = (
    "The three largest rivers of Europe are the Volga, the Danube and the Dnieper. The Danube flows through"
)
# Root mean square of the differences of one row's logits, in units of their standard deviation. A rounding
# that falls to the other side moves a sum by a step of the format, and 30 layers carry it on: with SmolLM2
# 0.007 was seen in F32, 0.04 in BF16, 0.19 in Q4_K_M; with a tiny random model 0.022 in F32, as upstream's
# attention adds in F16 where ours adds in F32. Upstream's products of BF16 round the activations to eight
# bits, and ours with AVX2 do not: rows of a tiny model were up to 0.16 apart there, 0.044 on average. A token
# or a position that is wrong makes it one. Each format has a bound of all rows' mean, and one of each row.
BOUNDS = {"F32": (0.025, 0.05), "F16": (0.075, 0.15), "BF16": (0.075, 0.25)}
QUANTISED = (0.2, 0.4)
FORMATS = ("F32", "BF16", "Q8_0", "Q4_0", "Q4_K_M")
NEAR_TIES = 0.125  # of the positions may have another best token: 3 of 24


def apart(a, b):
    """Differences of logits [n, n_vocab] as shares of b's spread, by row: root mean square, largest."""
    spread = b.std(axis=1, keepdims=True)
    off = np.abs(a - b) / spread
    return np.sqrt((off**2).mean(axis=1)), off.max(axis=1)


def check_logits(ours, theirs, bounds):
    (mean, bound), (rms, largest) = bounds, apart(ours, theirs)
    assert np.isfinite(ours).all() and rms.max() <= bound and rms.mean() <= mean, (rms.max(), rms.mean())
    assert largest.max() <= 4 * bound, largest.max()
    flipped = ours.argmax(axis=1) != theirs.argmax(axis=1)
    assert flipped.mean() <= NEAR_TIES, flipped.sum()
    assert near_tie(theirs[flipped], bound).all()


def near_tie(logits, bound):
    """True if the two best tokens of each row are so close that the bound allows to exchange them."""
    two = np.sort(logits, axis=1)[:, -2:]
    return (two[:, 1] - two[:, 0]) <= 3 * bound * logits.std(axis=1)


class Follower(Decoder):
    def kept_rows(self, tokens, pos):
        """Logits [n, n_vocab] of tokens at pos, pos + 1, ..., which stay."""
        self._decode(tokens, pos, True)
        rows = llama_cpp.llama_get_logits(self.ctx)
        return np.ctypeslib.as_array(rows, shape=(len(tokens), self.n_vocab)).copy()

    def forget(self):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.ctx), True)


def follow(decoder, theirs, rows):
    """Our logits along the text of the unpatched library, `rows` of it decoded together."""
    prompt, text = theirs["prompt"].tolist(), theirs["text"].tolist()
    decoder._decode(prompt[:-1], 0, False)
    tokens, out = [prompt[-1], *text[:-1]], []
    for i in range(0, len(tokens), rows):
        out.append(decoder.kept_rows(tokens[i : i + rows], len(prompt) - 1 + i))
    decoder.forget()
    return np.concatenate(out)


@pytest.mark.parametrize("flash", [False, True], ids=["attention", "flash"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_logits_and_text_of_a_real_model(fmt, flash):
    path, bounds = smollm2(fmt), BOUNDS.get(fmt, QUANTISED)
    theirs = stock.decode_stock(path, PROMPT, N, flash)
    decoder = Follower(path, flash)
    for rows in (1, 4, 16):
        check_logits(follow(decoder, theirs, rows), theirs["logits"], bounds)
    decoder.close()

    llm = EagleLlama(
        str(path), eagle=str(shipped_head()), n_max=3, n_ctx=512, n_threads=2, flash_attn=flash, verbose=False
    )
    text = tiny_models.take(llm, N, theirs["prompt"].tolist())
    llm.close()
    differs = np.flatnonzero(np.array(text) != theirs["text"][: len(text)])
    if differs.size:  # behind the first difference the texts have nothing in common
        assert near_tie(theirs["logits"][differs[:1]], bounds[1]).all(), f"token {differs[0]}"


@pytest.mark.parametrize("flash", [False, True], ids=["attention", "flash"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_logits_of_a_tiny_model(tmp_path, kind, flash):
    path = tiny_models.target(tmp_path / "tiny.gguf", kind=kind, n_embd=256)
    theirs = stock.decode_stock(path, tiny_models.PROMPT, N, flash)
    decoder = Follower(path, flash)
    for rows in (1, 4, 16):
        check_logits(follow(decoder, theirs, rows), theirs["logits"], BOUNDS.get(kind, QUANTISED))
    decoder.close()


@pytest.mark.parametrize("fault", ["token", "position", "scale"])
def test_small_faults_are_found(tmp_path, fault):
    """One other token in the prompt, a row one position too far, logits 10% too large: found."""
    path = tiny_models.target(tmp_path / "tiny.gguf", n_embd=256)
    theirs = stock.decode_stock(path, tiny_models.PROMPT, N, True)
    wrong, decoder = dict(theirs), Follower(path, True)
    if fault == "token":
        wrong["prompt"] = np.array([*tiny_models.PROMPT[:2], 71, *tiny_models.PROMPT[3:]])
    elif fault == "position":
        wrong["prompt"] = np.array([tiny_models.PROMPT[0], *tiny_models.PROMPT])
    ours = follow(decoder, wrong, 4) * (1.1 if fault == "scale" else 1.0)
    decoder.close()
    with pytest.raises(AssertionError):
        check_logits(ours, theirs["logits"], QUANTISED if fault != "scale" else BOUNDS["F32"])


def test_the_unpatched_library_is_unpatched():
    """It has none of our functions, a child opens it, and it was checked on this processor."""
    name, ours = f"libllama{SUFFIX}", b"llama_set_logits_deferred"
    assert ours in (find_lib_dir() / name).read_bytes()
    assert ours not in (stock.stock_dir() / name).read_bytes()
    done = stock.run_stock("import llama_cpp.llama_cpp as c; print(c._lib._name)")
    assert done.stdout.strip() == str(stock.stock_dir() / name), done.stderr
    record = json.loads((stock.stock_dir() / "proof.json").read_text())
    assert record["checked"] or record["why_not"]
