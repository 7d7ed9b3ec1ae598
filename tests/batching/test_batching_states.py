"""What a slot holds: the next prompt takes it up; it is saved and restored; a file that lies is refused."""

import random

import pytest
from batch_tools import N_CTX, alone, batcher, plain, prompts, take, tiny  # noqa: F401 - fixtures too
from tiny_models import PROMPT

from eagle3_llama import EagleError, EagleParams, ErrorKind
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.batching.job import Job
from eagle3_llama.batching.scheduler import BatchSlot


def test_prefix_is_taken_up(batcher, plain):
    """The slot that shares most is chosen, and what it holds is not decoded again."""
    a, b = prompts(2, seed=3)
    a, b = [*a, *range(10, 90)], [*b, *range(90, 10, -1)]
    for prompt in (a, b):
        with batcher.request() as llm:
            take(llm, 10, prompt, temp=0.0)
    with batcher.request() as llm:
        longer = [*b, 5, 6, 7]
        assert take(llm, 40, longer, temp=0.0) == alone(plain, 40, longer, temp=0.0)
        assert llm.usage()["prompt_tokens_details"]["cached_tokens"] == len(b)
    assert batcher.snapshot()["reused_tokens"] >= len(b)


def test_slots_are_saved_and_restored(tiny, plain, batcher):
    prompt = [*PROMPT, *range(20, 70)]  # of so few tokens, each has the same bits however it was decoded
    with batcher.request() as llm:
        take(llm, 20, prompt, temp=0.0)
    slot = max(batcher.slots(), key=lambda s: s["n_past"])["id"]
    data = batcher.save_slot(slot)
    other = Batcher(BatchSettings(tiny[0], tiny[1], n_parallel=3, n_ctx=N_CTX, n_threads=1))
    n = other.load_slot(1, data)
    assert n == other.slots()[1]["n_past"] >= len(prompt)
    with other.request(params=EagleParams(n_max=3)) as llm:
        assert take(llm, 40, prompt, temp=0.0) == alone(plain, 40, prompt, temp=0.0)
        assert llm.usage()["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1
        assert llm.stats.drafted > 0
    rng = random.Random(1)
    for _ in range(60):
        bad = bytearray(data)
        at = rng.randrange(len(bad))
        bad = (
            bytes(bad[:at])
            if rng.random() < 0.4
            else bytes([*bad[:at], bad[at] ^ (1 << rng.randrange(8)), *bad[at + 1 :]])
        )
        with pytest.raises(EagleError) as e:
            other.load_slot(0, bad)
        assert e.value.kind is ErrorKind.BAD_VALUE
    for slot in (-1, 3, True, "0"):
        with pytest.raises(EagleError, match="no slot"):
            other.save_slot(slot)
    with other.request() as llm:
        assert take(llm, 10, prompt, temp=0.0) == alone(plain, 10, prompt, temp=0.0)
    other.close()


def test_a_job_may_end_while_slots_are_read(batcher, monkeypatch):
    class Leaving(BatchSlot):
        sizes = {"read_ahead_to": 1, "room": 1, "max_tokens": 1}
        reads = [Job([1], None, EagleParams(), **sizes, deadline=None, request_id="the one")] * 2

        @property
        def job(self):
            return self.reads.pop() if self.reads else None

        @job.setter
        def job(self, _):
            pass

    monkeypatch.setattr(batcher, "_slots", [Leaving(0)])
    assert batcher.slots() == [{"id": 0, "busy": True, "n_past": 0, "request_id": "the one"}]
    monkeypatch.undo()


def test_a_state_that_lies_is_refused(batcher, tmp_path):
    """A file whose checksum is right and whose contents are not: sizes, tokens, another model's identity."""
    import hashlib
    import json
    import struct

    from eagle3_llama.batching import slot_file

    with batcher.request() as llm:
        take(llm, 5, PROMPT, temp=0.0)
    slot = max(batcher.slots(), key=lambda s: s["n_past"])["id"]
    data = batcher.save_slot(slot)
    at = len(slot_file.MAGIC)
    n = struct.unpack("<I", data[at : at + 4])[0]
    header, body = json.loads(data[at + 4 : at + 4 + n]), data[at + 4 + n : -32]
    for change in (
        {"tokens": header["tokens"][:-1]},
        {"tokens": [10**9]},
        {"tokens": "abc"},
        {"of": {}},
        {"target": 10**12},
        {"head": -1},
        {"target": header["target"] - 8, "head": header["head"] + 8},
    ):
        changed = json.dumps({**header, **change}).encode()
        lie = slot_file.MAGIC + struct.pack("<I", len(changed)) + changed + body
        with pytest.raises(EagleError):
            batcher.load_slot(slot, lie + hashlib.sha256(lie).digest())
        assert batcher.slots()[slot]["n_past"] in (0, len(header["tokens"]))
    assert batcher.load_slot(slot, data) == len(header["tokens"])
