"""The prompt cache by itself: what it finds, what it drops, and when a copy pays."""

import random

import pytest

from eagle3_llama import EagleError
from eagle3_llama.batching import BatchSettings
from eagle3_llama.batching.prefixes import CopyCosts
from eagle3_llama.batching.prompt_cache import LEAST, PromptCache, SavedText, shared_tokens
from eagle3_llama.batching.slot_state import SlotState


def saved(client, tokens, n_bytes=1000, least=0, n_prompt=99):
    return SavedText(client, SlotState(list(tokens), bytes(n_bytes), b""), least, n_prompt)


def test_the_cache_finds_the_longest():
    rng, cache = random.Random(1), PromptCache(1 << 30)
    texts = [[rng.randrange(2) for _ in range(rng.randrange(1, 12))] for _ in range(200)]
    for t in texts:
        cache.add(saved("a", t))
    for _ in range(300):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
        found, n = cache.find("a", prompt)
        assert n == max(shared_tokens(t, prompt) for t in texts)
        assert found is None if n == 0 else found.state.tokens[:n] == prompt[:n]
        assert cache.holds("a", prompt) == any(t[: len(prompt)] == prompt for t in texts)
        assert cache.find("b", prompt) == (None, 0)
    kept = [t.state.tokens for t in cache._texts["a"]]
    assert all(a is b or a != b[: len(a)] for a in kept for b in kept)  # none is the beginning of another


def test_a_text_that_is_used_whole():
    """A recurrent state: it is found by prompts that go on behind it, and other texts do not replace it."""
    cache = PromptCache(1 << 30)
    cache.add(saved("a", [1, 2, 3], least=3))
    cache.add(saved("a", [1, 2, 3, 4, 5], least=5))
    assert [cache.find("a", p)[1] for p in ([1, 2], [1, 2, 3, 9], [1, 2, 3, 4, 5, 6])] == [0, 3, 5]
    assert len(cache) == 2 and not cache.holds("a", [1, 2])
    cache.add(saved("a", [1, 2, 3, 4, 5, 6]))
    assert len(cache) == 1


def test_the_bound_of_the_cache():
    """The text used last stays, and a client with many texts drops its own."""
    one = saved("a", [1, 0, *[0] * 50]).n_bytes
    cache = PromptCache(4 * one)
    for i in range(3):
        cache.add(saved("a", [1, i, *[0] * 50]))
    cache.add(saved("b", [1, 0, *[0] * 50]))
    cache.use(cache.find("a", [1, 0, 0])[0], 3)
    cache.add(saved("a", [1, 3, *[0] * 50]))
    assert [t.state.tokens[1] for t in cache._texts["a"]] == [2, 0, 3] and cache.find("b", [1])[1] == 1
    assert cache.n_bytes == 4 * one
    text_ = cache.find("a", [1, 3])[0]
    cache.use(text_, 52 - LEAST - 1)
    assert len(cache) == 4  # another text with the same beginning
    cache.use(text_, 52 - LEAST)
    assert len(cache) == 3 and cache.n_bytes == 3 * one  # the text goes on
    cache.add(text_)
    cache.add(saved("a", [7], n_bytes=50_000))
    assert cache.find("a", [7])[1] == 0 and cache.n_bytes == 4 * one
    for text_ in [t for texts in cache._texts.values() for t in texts]:
        cache.remove(text_)
        cache.remove(text_)
    assert cache.n_bytes == len(cache) == 0


def test_costs_decide():
    costs = CopyCosts(lambda: 100.0)
    assert costs.pays(LEAST, 10**9) and not costs.pays(LEAST - 1, 0)  # it has to be measured once
    costs.copied(10**6, 1.0)
    assert costs.pays(101, 10**6) and not costs.pays(90, 10**6)
    tried = next(i for i in range(1000) if costs.pays(50, 10**6))
    assert 10 < tried < 100  # what one slow copy has taken is not held against all later ones
    costs.copied(10**6, 0.1)
    assert costs.copy(10**6) < 0.5


@pytest.mark.parametrize("wrong", [-1, 5, "much", True])
def test_settings_are_checked(wrong):
    with pytest.raises(EagleError, match="prompt_cache is"):
        BatchSettings("target.gguf", prompt_cache=wrong)
    assert BatchSettings("target.gguf", prompt_cache="64M").prompt_cache == 64 << 20
