"""Options of the server that other files leave at their defaults. On a tiny model."""

import re
import sys

import pytest
from commands import run
from server_tools import CHAT, ask, running, tiny
from tiny_models import PROMPT

from eagle3_llama import EagleError

COMPLETIONS = "/v1/completions"
LONG = [60 + i % 200 for i in range(200)]


@pytest.mark.parametrize("n_batch", [64, 128])
def test_n_batch_limits_the_pieces_of_a_prompt(files, monkeypatch, n_batch):
    with running(tiny(files, n_batch=n_batch)) as s:
        sizes, prefill = [], s.batcher.engine.prefill
        monkeypatch.setattr(
            s.batcher.engine,
            "prefill",
            lambda tokens, *more, **named: (sizes.append(len(tokens)), prefill(tokens, *more, **named))[1],
        )
        assert ask(s.client, path=COMPLETIONS, prompt=LONG, max_tokens=2).status_code == 200
    assert sum(sizes) == len(LONG) and max(sizes) <= n_batch


def test_model_alias_is_the_name_for_clients(files):
    with running(tiny(files, model_alias="my-model")) as s:
        assert [m["id"] for m in s.client.get("/v1/models").json()["data"]] == ["my-model"]
        assert s.client.get("/v1/models/my-model").status_code == 200
        r = ask(s.client, path=COMPLETIONS, prompt=PROMPT, max_tokens=2)
        assert r.json()["model"] == "my-model"
        assert 'model="my-model"' in s.client.get("/metrics").text


def test_max_draft_limits_what_a_request_asks_for(files):
    with running(tiny(files, max_draft=4)) as s:
        body = {"path": COMPLETIONS, "prompt": PROMPT, "max_tokens": 8}
        for fine in ({"n_max": 4}, {"tree": "4x2x2"}, {"enabled": False}):
            assert ask(s.client, **body, speculative=fine).status_code == 200, fine
        for wrong in ({"n_max": 5}, {"tree": "5x2x3"}):
            error = ask(s.client, **body, speculative=wrong).json()["error"]
            assert error["param"] == "speculative" and "at most 4 draft tokens" in error["message"], wrong


def test_stream_interval_is_the_batchers(files):
    """tests/batching/test_batching_requests.py has what an interval does."""
    for seconds in (0, 1.5):
        with running(tiny(files, stream_interval=seconds)) as s:
            assert s.batcher.settings.interval == seconds


def test_n_rs_seq_is_the_batchers(files):
    """tests/runtime/test_memories.py has what a slot's snapshots do."""
    for n in (None, 3):
        with running(tiny(files, n_rs_seq=n)) as s:
            assert s.batcher.settings.n_rs_seq == n
    with pytest.raises(EagleError, match="--n-rs-seq is 64, expected an integer 0..63"):
        tiny(files, n_rs_seq=64)


def test_more_choices_than_can_ever_be_admitted(files):
    """Refused for good, with 400. 503 would make clients come again for ever."""
    with running(tiny(files, n_parallel=1, max_queue=2, max_n=8)) as s:
        for path, prompt in (
            (CHAT, {"messages": [{"role": "user", "content": "x"}]}),
            (COMPLETIONS, {"prompt": "x"}),
        ):
            r = s.client.post(path, json={**prompt, "max_tokens": 1, "n": 4})
            error = r.json()["error"]
            assert r.status_code == 400 and error["param"] == "n" and "3" in error["message"], r.text
            r = s.client.post(path, json={**prompt, "max_tokens": 1, "n": 3})
            assert r.status_code == 200 and len(r.json()["choices"]) == 3
        r = s.client.post(COMPLETIONS, json={"prompt": ["x", "y"], "max_tokens": 1, "n": 2})
        assert r.status_code == 200 and len(r.json()["choices"]) == 4  # one after the other
        bodies = s.client.get("/openapi.json").json()["components"]["schemas"]
        assert bodies["ChatBody"]["properties"]["n"]["anyOf"][0]["maximum"] == 3


RUN = """
import sys
sys.modules[{module!r}] = None  # as where there is none
from eagle3_llama.cli.main import main
sys.argv = ["eagle3-llama", "serve", "--model", sys.argv[1]]
main()
"""


def test_a_system_without_resource(files):
    """Python has it on Unix alone: no extra brings it. A package that an extra has is named with that."""
    for module, said in (
        ("resource", "the server needs resource: Python for .* has no such module. It runs on Linux"),
        ("uvicorn", "the server needs uvicorn: (pip install|python3 scripts/_env.py) .*server"),
    ):
        done = run([sys.executable, "-c", RUN.format(module=module), files[0]], 2)
        assert re.fullmatch(f"error: {said}.*\n", done.stderr), done.stderr
