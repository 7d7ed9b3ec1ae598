"""Settings of the target in a batcher: quantised caches, a LoRA adapter. A request has a Llama's text."""

import gguf
import pytest
import tiny_models
from batch_tools import alone, jobs_at_once, prompts, take
from converting import converted

from eagle3_llama.batching import Batcher, BatchSettings  # before llama_cpp: it brings the library
from eagle3_llama.common.cache_types import CACHE_TYPES
from eagle3_llama.errors import EagleError, ErrorKind
from eagle3_llama.heads.convert.target import read_target

import llama_cpp

N_CTX = 512
WIDE = 128  # hidden size: with four heads, rows of 32 numbers, a block of the quantised types


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A target whose KV cache can be quantised, a head and an adapter for it."""
    d = tmp_path_factory.mktemp("wide")
    target = tiny_models.target(d / "target.gguf", n_embd=WIDE)
    about = read_target(target)
    sizes = {"n_embd": about.n_embd, "n_layer": about.n_layer, "n_vocab": about.n_vocab}
    converted(d, "SafeAILab", target, "f32", **sizes)
    return str(target), str(d / "f32.gguf"), str(tiny_models.tiny_lora(d / "lora.gguf", n_embd=WIDE))


def texts(wide, ours, theirs):
    """Texts of four requests at once, compared with a Llama's of the same settings."""
    asked = prompts(4)
    with Batcher(BatchSettings(wide[0], wide[1], n_parallel=2, n_ctx=N_CTX, n_threads=1, **ours)) as batcher:

        def work(prompt):
            with batcher.request() as llm:
                return take(llm, 24, prompt, temp=0.0)

        found = jobs_at_once(batcher, [lambda p=p: work(p) for p in asked])
    plain = llama_cpp.Llama(wide[0], n_ctx=N_CTX, n_threads=1, flash_attn=True, verbose=False, **theirs)
    assert found == [alone(plain, 24, p, temp=0.0) for p in asked]
    plain.close()
    return found


@pytest.mark.parametrize("k, v", [("q8_0", "q8_0"), ("q4_0", "f16"), ("bf16", "q5_1")])
def test_a_quantised_cache(wide, k, v):
    types = {"type_k": CACHE_TYPES[k], "type_v": CACHE_TYPES[v]}
    texts(wide, {"cache_type_k": k, "cache_type_v": v}, types)


def test_a_lora(wide):
    with_it = texts(wide, {"lora": wide[2], "lora_scale": 0.5}, {"lora_path": wide[2], "lora_scale": 0.5})
    assert with_it != texts(wide, {}, {}), "the adapter changes nothing"


@pytest.mark.parametrize(
    "given, message",
    [
        ({"cache_type_k": "q9"}, "cache_type_k is 'q9', expected one of f32, f16"),
        ({"cache_type_v": "Q8_0"}, "cache_type_v is 'Q8_0', expected one of"),
        ({"cache_type_v": "q8_0", "flash_attn": False}, "cache_type_v is q8_0: only flash attention"),
    ],
)
def test_types_that_cannot_be(wide, given, message):
    with pytest.raises(EagleError, match=message) as e:
        BatchSettings(wide[0], **given)
    assert e.value.kind is ErrorKind.BAD_ARGUMENT


def test_every_type_is_llama_cpps():
    for name, number in CACHE_TYPES.items():
        assert gguf.GGMLQuantizationType[name.upper()] == number
