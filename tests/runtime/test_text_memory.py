"""The memory of earlier texts: what it keeps and for whom, and that drafts from it change no text."""

from __future__ import annotations

import hashlib
import json
import pickle
import struct

import httpx
import numpy as np
import pytest
from server_tools import running, settings
from text_tools import PROMPT, N, load, tokens_of

from eagle3_llama import EagleError
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.common.memory_size import parse_size
from eagle3_llama.runtime.text_memory import TextMemory

pytestmark = pytest.mark.usefixtures("cheap_rows")
SAMPLED = {"temp": 0.6, "top_p": 0.95}


@pytest.fixture(scope="module")
def files(foreseen):
    return foreseen


def texts_in(data: bytes) -> list[list[int]]:
    ids, out = np.frombuffer(data, np.int32).tolist(), [[]]
    for token in ids:
        if token < 0:
            out.append([])
        else:
            out[-1].append(token)
    assert out.pop() == []
    return out


def rounds_of(llm, **arguments):
    """The tokens, and in how many rounds they came."""
    before = llm.stats.rounds
    return tokens_of(llm, **arguments), llm.stats.rounds - before


@pytest.mark.parametrize("head", [False, True])
def test_an_answer_that_was_given_before(files, head):
    """The same answer again takes fewer rounds, and has the same tokens."""
    with load(files, head) as llm:
        plain, first = rounds_of(llm, **SAMPLED)
        again, second = rounds_of(llm, **SAMPLED)
        assert again == plain and second > N // 2  # this text does not repeat itself
    with load(files, head, text_memory="1M") as llm:
        assert rounds_of(llm, **SAMPLED)[0] == plain
        again, second = rounds_of(llm, **SAMPLED)
        assert again == plain and second < first // 2
        assert llm.stats.accepted_from["text"] + llm.stats.accepted_from["both"] > N // 2


def test_what_is_kept(files):
    with load(files, text_memory=1 << 20) as llm:
        tokens = tokens_of(llm, 20, **SAMPLED)
        kept = texts_in(llm._context.memory.tokens())
        assert len(kept) == 1 and tokens == kept[0][: len(tokens)]  # a round may know more than was read
        assert list(llm.generate([1, 2, 3], temp=0.0).__next__() for _ in range(2))
        assert len(texts_in(llm._context.memory.tokens())) == 3
    with load(files, text_memory=1 << 20, text_memory_prompts=True) as llm:
        tokens = tokens_of(llm, 20, **SAMPLED)
        longer = [*PROMPT, 3, 4, 5]
        next(llm.generate(longer, temp=0.0))
        first, second = texts_in(llm._context.memory.tokens())
        assert first[: len(PROMPT) + 20] == [*PROMPT, *tokens]
        assert second[:3] == [3, 4, 5]  # what the context had before is not kept again


def test_a_pickled_model_keeps_the_setting(files):
    with load(files, text_memory="128K") as llm, pickle.loads(pickle.dumps(llm)) as other:
        assert other._memory == llm._memory == (128 << 10, False)
        assert other._context.memory is not None and other._context.memory.tokens() == b""


@pytest.mark.parametrize(
    ("given", "size"),
    [(0, 0), ("0", 0), ("64M", 64 << 20), ("1 gib", 1 << 30), ("65536", 65536), (1 << 20, 1 << 20)],
)
def test_sizes(given, size):
    assert parse_size(given) == size


@pytest.mark.parametrize("given", [-1, 1, "12", "64X", "", "M", True, 1.5, None, "9" * 30, "9999999999G"])
def test_sizes_that_are_refused(given):
    with pytest.raises(EagleError, match="text_memory is"):
        parse_size(given)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"text_memory": "64M", "text": False}, "no effect, because text=False"),
        ({"text_memory_prompts": True}, "needs a text_memory"),
        ({"text_memory": "64M", "draft_model": lambda ids, **_: ids}, "no effect, because draft_model"),
    ],
)
def test_what_does_not_go_together(files, arguments, said):
    with pytest.raises(EagleError, match=said):
        load(files, **arguments)


def test_a_memory_forgets_the_oldest():
    memory = TextMemory(1 << 16)
    for i in range(300):
        memory.add([i] * 20)
    kept = texts_in(memory.tokens())
    assert kept[-1] == [299] * 20 and 20 < len(kept) < 100
    assert kept == [[i] * 20 for i in range(300 - len(kept), 300)]
    other = TextMemory(1 << 20)
    assert other.add_all(memory.tokens()) == 20 * len(kept)
    assert other.tokens() == memory.tokens()
    for m in (memory, other, other):
        m.close()


def batch_settings(files, **more):
    return BatchSettings(
        str(files[0]), str(files[1]), n_parallel=2, n_ctx=512, n_threads=1, flash_attn=True, **more
    )


def ask(batcher, client):
    before = batcher.snapshot()["rounds"]
    with batcher.request(client=client) as llm:
        tokens = tokens_of(llm, **SAMPLED)
    return tokens, batcher.snapshot()["rounds"] - before


def test_clients_do_not_see_each_other(files):
    with Batcher(batch_settings(files, text_memory="1M")) as batcher:
        plain, first = ask(batcher, "a")
        assert ask(batcher, "b") == (plain, pytest.approx(first, abs=first // 4))  # nothing of a's
        again, rounds = ask(batcher, "a")
        assert again == plain and rounds < first // 2
        assert ask(batcher, "b")[1] < first // 2
        assert len(texts_in(batcher._memories.tokens("a"))) == 2
        assert batcher._memories.tokens("c") == b""


def test_slot_files_carry_the_texts(files):
    with Batcher(batch_settings(files, text_memory="1M")) as batcher:
        plain, first = ask(batcher, "a")
        slot = next(s["id"] for s in batcher.slots() if s["n_past"])
        saved, texts = batcher.save_slot(slot, "a"), batcher._memories.tokens("a")
        others = batcher.save_slot(slot, "b")
    with Batcher(batch_settings(files, text_memory="1M")) as batcher:
        assert batcher.load_slot(0, others, "a") > 0 and batcher._memories.tokens("a") == b""
        assert batcher.load_slot(0, saved, "a") > 0 and batcher._memories.tokens("a") == texts
        again, rounds = ask(batcher, "a")
        assert again == plain and rounds < first // 2
        for lie in lies(saved):
            with pytest.raises(EagleError, match="not a slot"):
                batcher.load_slot(0, lie, "a")
    with Batcher(batch_settings(files)) as batcher:  # which keeps no texts
        assert batcher.load_slot(0, saved, "a") > 0 and batcher._memories.tokens("a") == b""


def lies(saved: bytes):
    """Files whose checksum holds, and whose texts do not."""
    (n,) = struct.unpack("<I", saved[12:16])
    size = json.loads(saved[16 : 16 + n])["texts"]
    assert size > 0 and size % 4 == 0
    for token, at in ((1 << 30, 0), (-2, 0), (5, size - 4)):
        start = len(saved) - 32 - size + at
        body = saved[:start] + struct.pack("<i", token) + saved[start + 4 : -32]
        yield body + hashlib.sha256(body).digest()


def test_keys_of_a_server(files, tmp_path):
    """Each key of the file is accepted, has a memory of its own, and a share of the size."""
    keys = ("first", "second")
    s = settings(model=str(files[0]), eagle=None, n_ctx=256, api_key=keys, text_memory="1M", n_parallel=1)
    assert s.batch()["text_memory"] == 1 << 19
    body = {"prompt": "hello", "max_tokens": 8, "temperature": 0}
    with running(s) as server:
        for key, status in (*((k, 200) for k in keys), ("third", 401), ("key 0", 401)):
            r = httpx.post(
                f"{server.url}/v1/completions",
                json=body,
                headers={"Authorization": f"Bearer {key}"},
                timeout=60,
            )
            assert r.status_code == status
        kept = [server.batcher._memories.tokens(f"key {i}") for i in range(2)]
        assert all(len(texts_in(data)) == 1 for data in kept) and kept[0] == kept[1]
    for wrong, said in ((("a", "a"), "twice"), (("a", " b"), "ASCII")):
        with pytest.raises(EagleError, match=said):
            settings(model=str(files[0]), eagle=None, api_key=wrong)
    with pytest.raises(EagleError, match="expected 65536 for each of 2 keys"):
        settings(model=str(files[0]), eagle=None, api_key=keys, text_memory="100K")
