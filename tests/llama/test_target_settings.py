"""Settings of the target that change its text: with a head it is the text of plain decoding with the same."""

import random

import pytest
import tiny_models
from converting import converted
from tiers import crossed
from tiny_models import PROMPT, draft_from, take, tiny_lora

from eagle3_llama import EagleError, EagleLlama
from eagle3_llama.errors import ErrorKind
from eagle3_llama.heads.convert.target import read_target

import llama_cpp

COMMON = {"n_ctx": 256, "n_batch": 64, "n_threads": 2, "verbose": False}
LENGTH = 120
CACHES = [("Q8_0", "Q8_0"), ("Q4_0", "Q4_0"), ("Q8_0", "F16"), ("Q5_1", "Q4_1")]
SAMPLING = [{}, {"temp": 0.8, "top_k": 40}]
WIDE = 128  # hidden size: with four heads, rows of 32 numbers, a block of the quantised types


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A target whose KV cache can be quantised, and a head for it."""
    folder = tmp_path_factory.mktemp("wide")
    target = tiny_models.target(folder / "target.gguf", n_embd=WIDE, ends=False)
    about = read_target(target)
    sizes = {"n_embd": about.n_embd, "n_layer": about.n_layer, "n_vocab": about.n_vocab}
    converted(folder, "SafeAILab", target, "f32", **sizes)
    return str(target), str(folder / "f32.gguf")


def same_text(target, head, given, sampling):
    """Plain decoding's text, after it was compared with the text in chains and in trees."""
    plain = llama_cpp.Llama(target, **COMMON, **given)
    text = take(plain, LENGTH, **sampling)
    plain.close()
    for how in ({"n_max": 3}, {"tree": "8x3x2"}):
        llm = EagleLlama(target, eagle=head, **COMMON, **given, **how)
        assert take(llm, LENGTH, **sampling) == text, how  # with what the head drafts
        draft_from(llm, [[*PROMPT, *text]], random.Random(3))
        llm.reset()
        llm.stats.reset()
        assert take(llm, LENGTH, **sampling) == text, how
        assert 20 < llm.stats.accepted < llm.stats.drafted, how
        llm.close()
    return text


@pytest.mark.parametrize("k, v, sampling", crossed(CACHES, SAMPLING))
def test_a_quantised_cache(wide, k, v, sampling):
    types = {name: getattr(llama_cpp, f"GGML_TYPE_{t}") for name, t in (("type_k", k), ("type_v", v))}
    same_text(*wide, {"flash_attn": True, **types}, sampling)


def test_a_cache_of_which_only_the_keys_are_quantised(wide):
    """Without flash attention values cannot be quantised, and there are no trees."""
    target, head = wide
    given = {"type_k": llama_cpp.GGML_TYPE_Q8_0}
    plain = llama_cpp.Llama(target, **COMMON, **given)
    text = take(plain, LENGTH)
    llm = EagleLlama(target, eagle=head, n_max=3, **COMMON, **given)
    draft_from(llm, [[*PROMPT, *text]], random.Random(3))
    assert take(llm, LENGTH) == text and llm.stats.accepted > 20
    plain.close(), llm.close()


@pytest.mark.parametrize("scale, sampling", crossed([0.05, 0.2], SAMPLING))
def test_a_lora(files, tmp_path, scale, sampling):
    lora = str(tiny_lora(tmp_path / "lora.gguf"))
    given = {"flash_attn": True, "lora_path": lora, "lora_scale": scale}
    with_it = same_text(*files, given, sampling)
    assert with_it != same_text(*files, {"flash_attn": True}, sampling), "the adapter changes nothing"


def test_a_file_that_is_no_lora_of_the_model(files, wide, tmp_path):
    """llama-cpp-python decodes without an adapter that llama.cpp has refused."""
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"junk" * 100)
    other = str(tiny_lora(tmp_path / "other.gguf", n_embd=WIDE))
    for path, message in (
        (str(tmp_path / "none.gguf"), "no such file"),
        (str(junk), "junk.gguf is not a GGUF"),
        (files[0], r"is no LoRA adapter \(general.type is "),
        (other, "llama.cpp cannot use .*other.gguf with .*: it belongs to another model"),
    ):
        with pytest.raises(EagleError, match=message) as e:
            EagleLlama(files[0], lora_path=path, **COMMON)
        assert e.value.kind in (ErrorKind.BAD_FILE, ErrorKind.BAD_VALUE)
