"""Replicas under Ray: settings without it; then two on this machine, of which one is killed under load."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
from ray_servers import below, needs_ray, replicas, replicated
from server_tools import CHAT, ask, events, until

from eagle3_llama import EagleLlama
from eagle3_llama.errors import EagleError
from eagle3_llama.models import shipped_head, smollm2
from eagle3_llama.server.ray import deployment as ours
from eagle3_llama.server.ray import replica as theirs

PROMPTS = [
    f"Name {what}." for what in ("three rivers", "a colour", "two cities", "a king", "four animals", "a poet")
]
LONG = {"logit_bias": {"0": -100, "2": -100}}  # neither of SmolLM2's ends


# -- without Ray ------------------------------------------------------------------------------------------


def test_settings_of_words(monkeypatch):
    """`serve run` passes words, a configuration file values; unknown and impossible ones are refused."""
    model = str(smollm2("Q4_0"))
    words = {
        "model": model,
        "n_parallel": "2",
        "timeout": 9,
        "flash_attn": "false",
        "cors_origin": "http://a,http://b",
        "replicas": "2",
    }
    settings, scale = ours._settings(words)
    assert (settings.n_parallel, settings.timeout, settings.flash_attn, settings.cors_origin) == (
        2,
        9.0,
        False,
        ("http://a", "http://b"),
    )
    assert scale == ours.Scale(replicas=2)
    assert (
        ours.Scale().least,
        ours.Scale().most,
        ours.Scale(min_replicas=2).most,
        ours.Scale(max_replicas=3).least,
    ) == (1, 1, 2, 1)
    for wrong, said in [
        ({"n_parallell": "2"}, "n_parallel?"),
        ({"n_ctx": "much"}, "n_ctx"),
        ({"host": "0.0.0.0"}, "--http-host"),
        ({"model": "none.gguf"}, "none.gguf"),
        ({"replicas": 1, "max_replicas": 2}, "not both"),
        ({"replicas": 0}, "--replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, "more than"),
        ({"slot_save_path": "/tmp"}, "--slot-save-path"),
    ]:
        with pytest.raises(EagleError, match=re.escape(said)):
            ours.build({"model": model, **wrong})
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EagleError, match=r"(\[ray\]'|--extra ray) in "):
        ours.build({"model": model})


def test_options_are_the_servers_and_more():
    """The command has every option of `eagle3-llama serve`, and says what is wrong in one line."""
    import inspect

    from eagle3_llama.server.cli import serve

    names = inspect.signature(ours.serve_replicas).parameters
    assert set(inspect.signature(serve).parameters) | {
        "replicas",
        "min_replicas",
        "max_replicas",
        "session_affinity",
        "address",
    } <= set(names)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "eagle3_llama.server.ray",
            "--model",
            str(smollm2("Q4_0")),
            "--host",
            "0.0.0.0",
        ],
        capture_output=True,
        text=True,
        timeout=600,
        env={k: v for k, v in os.environ.items() if k != "EAGLE3_API_KEY"},
    )
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_file_has_the_options_of_replicas_too(monkeypatch, tmp_path):
    import typer

    class Made(Exception):
        pass

    def application(settings, scale):
        raise Made(settings.n_ctx, scale)

    monkeypatch.setattr(ours, "application", application)
    file = tmp_path / "server.toml"
    app = typer.Typer()
    app.command()(ours.serve_replicas)
    given = ["--config", str(file), "--model", str(smollm2("Q4_0")), "--num-cpus", "1.5"]
    file.write_text("n-ctx = 512\nreplicas = 2\nsession-affinity = true\n")
    with pytest.raises(Made) as made:
        app(given, standalone_mode=False)
    assert made.value.args == (512, ours.Scale(replicas=2, num_cpus=1.5, session_affinity=True))
    file.write_text("replicas = true\n")
    with pytest.raises(EagleError, match="replicas is true, expected a"):
        app(given, standalone_mode=False)


# -- what the replica adds, without Ray ---------------------------------------------------------------------


def test_no_way_in_without_a_key():
    """Ray's proxy may listen on any address; a deployment without a key answers this machine only."""
    import asyncio

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"1")]})

    async def status(keyed, server):
        sent = []
        scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "server": server}
        await theirs.Door(app, "r1", keyed)(scope, None, lambda m: sent.append(m) or asyncio.sleep(0))
        assert (b"x-replica", b"r1") in sent[0]["headers"] and (b"x-request-id", b"1") not in sent[0][
            "headers"
        ]
        return sent[0]["status"]

    asked = [
        (False, ("127.0.0.1", 8000)),
        (False, ("192.0.2.7", 8000)),
        (False, None),
        (True, ("192.0.2.7", 8000)),
    ]
    assert [asyncio.run(status(*a)) for a in asked] == [200, 403, 403, 200]


def test_a_dead_batcher_is_no_health():
    thread = threading.Thread(target=lambda: None)
    replica = theirs.Replica.__new__(theirs.Replica)
    replica.batcher = SimpleNamespace(alive=thread.is_alive, close=lambda grace: None)
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match="thread"):
        replica.check_health()


# -- two replicas -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    """Two replicas."""
    options = ["--model", smollm2("Q4_0"), "--eagle", shipped_head(), "--replicas", 2, "--n-parallel", 2]
    options += ["--n_ctx", 512, "--threads", 1, "--max-queue", 6, "--grace", 300, "--timeout", 600]
    with replicated(*options) as running:
        yield running


@pytest.fixture(scope="module")
def texts():
    """What EagleLlama says to each prompt."""
    llm = EagleLlama(
        str(smollm2("Q4_0")),
        eagle_path=str(shipped_head()),
        n_ctx=512,
        n_threads=1,
        flash_attn=True,
        verbose=False,
    )
    say = lambda p: llm.create_chat_completion([{"role": "user", "content": p}], max_tokens=48, temperature=0)
    out = {p: say(p)["choices"][0]["message"]["content"] for p in PROMPTS}
    llm.close()
    return out


def content(response):
    return response.json()["choices"][0]["message"]["content"]


@pytest.mark.thorough
@needs_ray
def test_both_answer(server, texts):
    """The texts are EagleLlama's, from whichever replica; key, limits and errors are the plain server's."""
    with httpx.Client(base_url=server.url, timeout=300, headers=server.headers) as client:
        answers = {}
        for i in range(40):
            r = ask(client, PROMPTS[i % 6], max_tokens=48)
            assert content(r) == texts[PROMPTS[i % 6]]
            answers[r.headers["x-replica"]] = r.json()["usage"]
            if i > 5 and len(answers) == 2:
                break
        assert len(answers) == 2 and all(
            u["completion_tokens_details"]["accepted_prediction_tokens"] > 0 for u in answers.values()
        )
        assert "," not in r.headers["x-request-id"] and r.json()["id"].endswith(r.headers["x-request-id"])
        metrics = client.get("/metrics").text
        assert {
            m[1] for m in re.finditer(r'eagle3_tokens_total\{[^}]*replica="(\w+)"\} [1-9]', metrics)
        } == set(answers)
        assert (
            client.post(
                CHAT, content=b"x" * 3_000_000, headers={"Content-Type": "application/json"}
            ).status_code
            == 413
        )
        assert ask(client, nn=1).json()["error"]["code"] == "unknown_field"
        assert ask(client, max_tokens=0).status_code == 400
    assert (
        httpx.get(server.url + "/v1/models").status_code == 401
        and httpx.get(server.url + "/health").status_code == 200
    )


class Client(threading.Thread):
    """Sends one request after the other, every second one as a stream. outcomes: (prompt, text, error).

    lost: what no client may see, a request without an end or a stream that only seems whole."""

    def __init__(self, server, n):
        super().__init__(daemon=True)
        self.server, self.n, self.outcomes, self.lost = server, n, [], None
        self.stop, self.begun = threading.Event(), threading.Event()

    def run(self):
        i = self.n
        while not self.stop.is_set() and self.lost is None:
            prompt = PROMPTS[i % 6]
            try:
                with httpx.Client(
                    base_url=self.server.url, timeout=300, headers=self.server.headers
                ) as client:
                    self.outcomes.append((prompt, *(self._stream if i % 2 else self._whole)(client, prompt)))
            except (httpx.TimeoutException, AssertionError) as e:
                self.lost = repr(e)
            except httpx.HTTPError as e:
                self.outcomes.append((prompt, None, type(e).__name__))
            i += 1

    def _whole(self, client, prompt):
        r = ask(client, prompt, max_tokens=48)
        return (content(r), None) if r.status_code == 200 else (None, r.status_code)

    def _stream(self, client, prompt):
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 48,
            "temperature": 0,
            "stream": True,
        }
        with client.stream("POST", CHAT, json=body) as r:
            if r.status_code != 200:
                return None, r.status_code
            text, last = "", "nothing"
            for last in events(r):
                self.begun.set()
                if last is not None and "error" in last:
                    return None, last["error"]["code"]
                text += (last["choices"][0]["delta"].get("content") or "") if last else ""
        assert last is None, "a stream that ended as if it were whole"
        return text, None


@pytest.mark.thorough
@needs_ray
def test_one_is_killed_under_load(server, texts):
    """Each request ends, with the right text or with an error. None hangs, and the replica is replaced."""
    before = replicas(server)
    assert len(before) == 2
    clients = [Client(server, n) for n in range(6)]
    for c in clients:
        c.start()
    until(lambda: all(c.begun.is_set() for c in clients), 300)
    victim = min(before)
    children = below(victim)
    assert any("sandbox" in command for command in children.values())
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    n = [len(c.outcomes) for c in clients]
    until(
        lambda: all(len(c.outcomes) > k + 1 or not c.is_alive() for c, k in zip(clients, n)), 300
    )  # all have gone on since
    for c in clients:
        c.stop.set()
    for c in clients:
        c.join(150)
        assert not c.is_alive() and c.lost is None, c.lost
    outcomes = [o for c in clients for o in c.outcomes]
    errors = [wrong for _, text, wrong in outcomes if text is None]
    assert all(text == texts[prompt] for prompt, text, _ in outcomes if text is not None)
    assert 1 <= len(errors) <= 12, (
        errors
    )  # those that it was at, and perhaps some sent before its end was known
    with httpx.Client(base_url=server.url, timeout=300, headers=server.headers) as client:
        for p in PROMPTS:
            assert content(ask(client, p, max_tokens=48)) == texts[p]
        until(lambda: len(replicas(server) - {victim}) == 2, 300)
        assert not any(os.path.exists(f"/proc/{pid}") for pid in children), "what it had started is left"
        names = set()
        until(lambda: names.add(ask(client, max_tokens=1).headers["x-replica"]) or len(names) == 2, 300)
    print(
        f"\n{len(outcomes)} requests, {errors} after the kill, "
        f"two replicas again after {time.monotonic() - killed:.1f} s"
    )


@pytest.mark.thorough
@needs_ray
def test_sigterm_drains(server):
    """The running answer is finished, new requests are told 503, and every process ends."""
    mine = below(server.process.pid)
    body = {"messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 250, "stream": True, **LONG}
    with (
        httpx.Client(base_url=server.url, timeout=300, headers=server.headers) as client,
        client.stream("POST", CHAT, json=body) as r,
    ):
        lines = r.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        with httpx.Client(base_url=server.url, timeout=300, headers=server.headers) as other:
            until(lambda: other.get("/ready").status_code == 503)
            refused = ask(other)
        *_, last = (line for line in lines if line)
    assert (
        refused.status_code == 503
        and refused.json()["error"]["code"] == "shutting_down"
        and "retry-after" in refused.headers
    )
    assert last == "data: [DONE]"
    assert server.process.wait(120) == 0
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in mine), 60)
