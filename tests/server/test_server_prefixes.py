"""Agents that share the slots of a server: each prompt is decoded once, and each key has texts of its own."""

import random

import pytest
import tiny_models
from server_tools import idle, metric, running, settings, until

from eagle3_llama.batching.prefixes import CopyCosts

COMPLETIONS = "/v1/completions"
MARK = 50  # begins what a user says; no answer has it


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    at = tmp_path_factory.mktemp("prefixes")
    return str(tiny_models.target(at / "target.gguf")), str(tiny_models.head(at / "head.gguf"))


@pytest.fixture(autouse=True)
def copies_are_free(monkeypatch):
    """So that what is copied does not depend on how fast this machine is."""
    monkeypatch.setattr(CopyCosts, "copy", lambda self, n_bytes: 0.0)


def small(files, **more):
    return settings(model=files[0], eagle=files[1], n_ctx=512, threads=1, **{"n_parallel": 4, **more})


def said(n, seed):
    rng = random.Random(seed)
    return [MARK, *(rng.randrange(60, 250) for _ in range(n - 1))]


def complete(server, prompt, key=None):
    """The usage of an answer to a prompt of token ids."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"prompt": prompt, "max_tokens": 6, "seed": 3, "logit_bias": {MARK: -100}}
    answer = server.client.post(COMPLETIONS, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    until(lambda: idle(server))
    used = answer.json()["usage"]
    return used["prompt_tokens"], used["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("cache", ["1G", 0])
def test_six_agents_on_four_slots(files, cache):
    """From the second turn on only what is new is decoded. Without the cache, much is decoded again."""
    with running(small(files, prompt_cache=cache)) as server:
        texts = [said(60, agent) for agent in range(6)]
        before = [complete(server, prompt)[0] for prompt in texts]
        first = metric(server, "eagle3_prompt_tokens_total")
        found = []
        for turn in range(1, 5):
            for agent in range(6):
                texts[agent] += said(9, 10 * turn + agent)
                n, cached = complete(server, texts[agent])
                assert n == before[agent] + 9
                found.append(cached == before[agent])
                before[agent] = n
        assert all(found) is bool(cache)
        decoded = metric(server, "eagle3_prompt_tokens_total") - first
        assert decoded == 4 * 6 * 9 if cache else decoded > 4 * 6 * 9
        assert (metric(server, "eagle3_restored_tokens_total") > 0) is bool(cache)
        assert (metric(server, "eagle3_prompt_cache_bytes") > 0) is bool(cache)


def test_keys_do_not_share_texts(files):
    """Another key finds nothing, neither in a slot nor in the cache; the own key finds all."""
    keys = ("first", "second")
    with running(small(files, api_key=keys, n_parallel=2)) as server:
        prompt = said(80, 1)
        n, cached = complete(server, prompt, "first")
        assert cached == 0
        assert complete(server, prompt, "second") == (n, 0)
        for seed in range(2, 5):
            assert complete(server, said(80, seed), "second")[1] <= 2  # BOS, and what begins each of them
        assert metric(server, "eagle3_prompt_cache_texts") > 0
        assert complete(server, [*prompt, 60], "second") == (n + 1, n)
        assert complete(server, [*prompt, 60], "first") == (n + 1, n)
