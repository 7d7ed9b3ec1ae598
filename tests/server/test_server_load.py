"""`scripts/measure/hostile.py load` on a tiny model: it ends, and the limits hold."""

import importlib

import pytest
from paths import ROOT
from server_tools import idle, running, settings, until

from eagle3_llama.batching.tokens import AHEAD


@pytest.fixture(scope="module")
def load():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts" / "measure")
        yield importlib.import_module("serving.expensive")


def test_the_hostile_load(files, load, monkeypatch):
    """All get their answers. Few rows are in flight, no logits are kept, and all room is given back."""
    monkeypatch.setattr(load, "TEXT", "x5 g8 " * 200)
    in_flight, inside, reserved, health = [], [], [], []
    with running(settings(model=files[0], eagle=files[1], n_ctx=512, n_parallel=2, threads=1)) as s:
        shared = s.app.state.server

        deliver = s.batcher._scheduler._deliver

        def watched(slot, job, piece):
            assert piece.logits is None and all(len(top.ids) == 20 for top in piece.tops)
            deliver(slot, job, piece)
            in_flight.append(job.outputs.qsize())
            inside.append(shared.tokenizing.inside)
            reserved.append(shared.gate.logprobs.held)

        monkeypatch.setattr(s.batcher._scheduler, "_deliver", watched)
        port = int(s.url.rsplit(":", 1)[1])
        seen = load.hostile_load(
            port, lambda: health.append(1) or 0, clients=6, tokens=120, texts=20, seconds=3600.0, lag=0.0
        )
        assert seen.wrong(6, 120) == [] and len(seen.rows) == 6 and min(seen.rows) >= 120, seen
        assert (
            seen.answered["logprobs"] == 6
            and 1 <= seen.answered["tokenize"] <= 40
            and seen.answered["health"] >= 1
            and health
        )
        assert 0 < max(in_flight) <= AHEAD and max(inside) <= shared.tokenizing.most
        assert 0 < max(reserved) <= shared.gate.logprobs.most
        until(
            lambda: (
                idle(s)
                and shared.gate.logprobs.held == 0
                and shared.tokenizing.inside == 0
                and shared.bodies.room.held == 0
            )
        )


def test_a_load_that_is_over_time(files, load):
    """It stops, and says what is missing."""
    with running(settings(model=files[0], eagle=files[1], n_ctx=512, n_parallel=1, threads=1)) as s:
        seen = load.hostile_load(
            int(s.url.rsplit(":", 1)[1]), lambda: 0, clients=2, tokens=50, texts=1, seconds=0.0, lag=0.0
        )
        assert seen.answered.get("logprobs", 0) == 0 and "0 of 2 answers with logprobs arrived" in seen.wrong(
            2, 50
        )
        until(lambda: idle(s))


def test_what_is_wrong_is_said(load):
    fine = load.Hostile({"logprobs": 1}, [], [5], 0.1, 0)
    assert fine.wrong(1, 5) == [] and len(fine._replace(refused=["chat: 503"], rows=[4]).wrong(2, 5)) == 3
