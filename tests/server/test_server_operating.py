"""What an operator sets and sees: a file with options, keys with names, readiness, adapters, cache types."""

import json
from pathlib import Path

import httpx
import pytest
import tiny_models
import typer
from server_tools import ask, process, running, settings, tiny, until
from tiny_models import PROMPT

from eagle3_llama import EagleError
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.errors import ErrorKind
from eagle3_llama.server import cli
from eagle3_llama.server.http.process import _describe
from eagle3_llama.server.settings import ServerSettings

COMPLETIONS = "/v1/completions"


@pytest.fixture
def serve(files, monkeypatch, tmp_path):
    """Runs `eagle3-llama serve` with a file of this text and further arguments: the settings that it has."""
    found = []

    def run(text, *args, model=True):
        file = tmp_path / "server.toml"
        file.write_text(text, encoding="utf-8")
        app = typer.Typer(add_completion=False)
        app.command()(cli.serve)
        given = ["--config", str(file), *(["--model", files[0]] if model else []), *args]
        app(given, standalone_mode=False)
        return found.pop()

    monkeypatch.setattr("eagle3_llama.server.http.process.serve", found.append)
    monkeypatch.delenv("EAGLE3_API_KEY", raising=False)
    return run


# -- --config ---------------------------------------------------------------------------------------------


def test_a_file_with_options(serve, files):
    s = serve(
        f"""
        model = '{files[0]}'
        n-ctx = 512
        n_parallel = 3
        timeout = 7.5
        text = false
        prompt-cache = "64M"
        cors-origin = ["https://a.example", "https://b.example"]
        """,
        model=False,
    )
    assert (s.model, s.n_ctx, s.n_parallel, s.timeout, s.text) == (files[0], 512, 3, 7.5, False)
    assert s.prompt_cache == 64 << 20 and s.cors_origin == ("https://a.example", "https://b.example")
    assert s.max_queue == ServerSettings(files[0]).max_queue


def test_the_command_line_and_the_environment_come_first(serve, monkeypatch):
    text = 'n-ctx = 512\nn-parallel = 3\napi-key = "of-the-file"\n'
    s = serve(text, "--n-ctx", "1024", "--api-key", "of-the-line")
    assert (s.n_ctx, s.n_parallel, s.api_keys) == (1024, 3, ("of-the-line",))
    monkeypatch.setenv("EAGLE3_API_KEY", "of-the-environment")
    assert serve(text).api_keys == ("of-the-environment",)
    monkeypatch.delenv("EAGLE3_API_KEY")
    assert serve(text).api_keys == ("of-the-file",)


@pytest.mark.parametrize(
    "text, message",
    [
        ("n-ctxs = 512", "no option 'n-ctxs': did you mean n-ctx?"),
        ("zzzzzz = 1", "no option 'zzzzzz': eagle3-llama serve --help has all"),
        ("config = 'other.toml'", "no option 'config'"),
        ("n-ctx = 512\nn_ctx = 512", "has n_ctx twice, with - and with _"),
        ("[serve]\nn-ctx = 512", "no option 'serve'"),
        ("n-ctx = [512]", r"n-ctx is \[512\], expected a string, a number, true or false"),
        ("n-ctx = 2026-01-01", "n-ctx is datetime"),
        ("n-parallel = true", "n-parallel is true, expected a number"),
        ("timeout = false", "timeout is false, expected a number"),
        ("host = true", "host is true, expected a string"),
        ("n-parallel = 2.5", "n-parallel is 2.5, expected a whole number"),
        ("cors-origin = 'https://a.example'", "cors-origin is 'https://a.example', expected a list"),
        ("cors-origin = [1]", r"cors-origin is \[1\], expected a list of strings"),
        ("n-ctx =", "is no TOML: "),
        ("n-ctx = 1", "--n-ctx is 1, expected an integer 64"),
    ],
)
def test_a_file_that_is_wrong(serve, text, message):
    with pytest.raises(EagleError, match=message):
        serve(text)


def test_numbers_and_switches_of_a_file(serve):
    given = serve("n-parallel = 3\ntimeout = 9\nlog-prompts = true\nflash-attn = false\nprompt-cache = '1G'")
    assert (given.n_parallel, given.timeout, given.log_prompts) == (3, 9.0, True)
    assert given.flash_attn is False and given.prompt_cache == 1 << 30


def test_a_value_of_another_type(files, tmp_path):
    (tmp_path / "server.toml").write_text("max-queue = 'many'")
    with process("--config", tmp_path / "server.toml") as p:
        assert p.process.wait(60) == 2
    assert "Invalid value for '--max-queue'" in "".join(p.lines)


def test_a_file_that_is_not_there(files, tmp_path):
    with process("--config", tmp_path / "none.toml") as p:
        assert p.process.wait(60) == 2
    assert "".join(p.lines).startswith("error: cannot read --config ")


# -- keys -------------------------------------------------------------------------------------------------


def asked(p):
    """The lines of completions in a server's log so far."""
    return [line for line in map(json.loads, list(p.lines)) if line["route"] == COMPLETIONS]


def test_keys_with_names(files, tmp_path):
    """A name stands in the log and in the metrics. It is also what caches know a client by."""
    file = tmp_path / "keys"
    file.write_text("alice: sk-1\n\nsk-2\nbob-2:   sk 3\n")
    with process("--model", files[0], "--api-key-file", file, "--n_ctx", 256) as p:
        given, n_made = {"sk-1": 200, "sk-2": 200, "sk 3": 200, "alice": 401, "alice: sk-1": 401}, {}
        for key, status in given.items():
            headers = {"Authorization": f"Bearer {key}"}
            with httpx.Client(base_url=p.url, headers=headers, timeout=60) as client:
                asked_for = {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True}
                r = ask(client, path=COMPLETIONS, **asked_for)
                assert r.status_code == status, key
                if status == 200:  # a character may need tokens beyond max_tokens
                    counted, n_made[key] = client.get("/metrics").text, r.json()["usage"]["completion_tokens"]
        until(lambda: len(asked(p)) == len(given))  # a line is written after its answer
        clients = [line.get("client") for line in asked(p)]
    assert clients == ["alice", "key 1", "bob-2", None, None]
    n = float(n_made["sk-1"])
    assert f'eagle3_client_tokens_total{{client="alice",kind="completion",model="target"}} {n}' in counted
    n = float(len(PROMPT))
    assert f'eagle3_client_tokens_total{{client="bob-2",kind="prompt",model="target"}} {n}' in counted
    assert "sk-1" not in "".join(p.lines) + counted


def test_one_named_key(files):
    s = tiny(files[:1], api_key="carol: sk-1")
    assert (s.api_keys, s.client_names) == (("sk-1",), ("carol",)) and "sk-1" not in repr(s)


@pytest.mark.parametrize(
    "keys, message",
    [
        (("a: x", "a: y"), "two keys of the name a"),
        (("a: x", "b: x"), "has a key twice"),
        (("a: é",), "printable ASCII"),
    ],
)
def test_names_that_are_wrong(files, keys, message):
    with pytest.raises(EagleError, match=message):
        tiny(files[:1], api_key=keys)


# -- readiness --------------------------------------------------------------------------------------------


def test_a_full_queue_is_alive_and_not_ready(files):
    """/health is for who restarts the server, /ready for who sends it requests."""
    with running(tiny(files[:1], n_parallel=1, max_queue=1)) as s:
        assert s.client.get("/ready").json() == {"status": "ok"}
        for _ in range(2):
            s.gate.enter(1)
        r = s.client.get("/ready")
        assert r.status_code == 503 and r.json()["error"]["code"] == "queue_full"
        assert int(r.headers["retry-after"]) >= 1
        assert s.client.get("/health").status_code == 200
        s.gate.leave(), s.gate.leave()
        assert s.client.get("/ready").status_code == 200
        s.gate.draining = True
        assert s.client.get("/ready").json()["error"]["code"] == "shutting_down"
        assert s.client.get("/health").status_code == 200


# -- the start --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [True, False])
def test_the_start_says_what_is_served(files, head):
    with Batcher(BatchSettings(**tiny(files if head else files[:1]).batch())) as batcher:
        which = f"head {Path(files[1]).name}" if head else "no head"
        assert _describe(batcher) == f"{which}, 2 slots of 256 tokens, 1 thread"


@pytest.mark.thorough
def test_the_start_of_a_process(files):
    given = ["--model", files[0], "--eagle", files[1], "--n-ctx", 256, "--n-parallel", 1, "--threads", 2]
    with process(*given) as p:
        assert p.url in p.first and Path(files[0]).name in p.first
        assert p.process.stdout.readline().strip().endswith(", 1 slot of 256 tokens, 2 threads")


# -- the target -------------------------------------------------------------------------------------------


def test_cache_types_and_an_adapter_are_the_batchers(files, tmp_path):
    """tests/batching/test_batch_target.py has the texts."""
    lora = str(tiny_models.tiny_lora(tmp_path / "lora.gguf"))
    with running(tiny(files[:1], cache_type_k="bf16", cache_type_v="f32", lora=lora, lora_scale=0.5)) as s:
        b = s.batcher.settings
        assert (b.cache_type_k, b.cache_type_v, b.lora, b.lora_scale) == ("bf16", "f32", lora, 0.5)
        assert ask(s.client, path=COMPLETIONS, prompt=PROMPT, max_tokens=3).status_code == 200


@pytest.mark.parametrize(
    "given, message, kind",
    [
        ({"cache_type_k": "q9"}, "cache_type_k is 'q9', expected one of", ErrorKind.BAD_ARGUMENT),
        ({"lora": "none.gguf"}, "no such file: none.gguf", ErrorKind.BAD_FILE),
        ({"lora_scale": 0.5}, "--lora-scale needs --lora", ErrorKind.BAD_ARGUMENT),
        ({"lora_scale": float("nan")}, "--lora-scale is nan", ErrorKind.BAD_ARGUMENT),
    ],
)
def test_a_target_that_cannot_be(files, given, message, kind):
    with pytest.raises(EagleError, match=message) as e:
        tiny(files[:1], **given)
    assert e.value.kind is kind


# -- what requests get that do not say ----------------------------------------------------------------------


def test_defaults_of_requests(serve):
    s = serve("temp = 0.5\nseed = 9\nn-predict = 5\n", "--seed", "11")
    assert (s.temp, s.seed, s.n_predict) == (0.5, 11, 5)
    assert (serve("temp = 0").temp, serve("").temp, serve("").seed, serve("").n_predict) == (
        0.0,
        None,
        -1,
        -1,
    )


@pytest.mark.parametrize(
    "name, values, says",
    [
        ("temp", (-0.1, 11.0, float("nan")), "expected a number 0..10"),
        ("seed", (-2, 1 << 32), "expected an integer -1..4294967295"),
        ("n_predict", (-2, 0, 1 << 30), "--n-predict is"),
    ],
)
def test_defaults_out_of_range(files, serve, name, values, says):
    for value in values:
        with pytest.raises(EagleError, match=says) as e:
            tiny(files, **{name: value})
        assert e.value.kind is ErrorKind.BAD_ARGUMENT
    with pytest.raises(EagleError, match=says):
        serve(f"{name.replace('_', '-')} = {values[0]}")


def test_defaults_hold_in_every_route():
    """A request that names its own gets these. Choice i has the seed + i."""
    with running(settings(temp=0.9, seed=7, n_predict=5)) as s:
        message = [{"role": "user", "content": "Name three rivers."}]
        post = lambda path, **body: s.client.post(path, json=body).json()
        text_of = lambda **more: post(COMPLETIONS, prompt="The sea is", **more)["choices"][0]["text"]
        given = text_of()
        assert given == text_of(temperature=0.9, seed=7, max_tokens=5)
        assert given not in (text_of(seed=8, max_tokens=5), text_of(temperature=0, max_tokens=5))
        assert len(text_of(max_tokens=9)) > len(given) and text_of(max_tokens=9).startswith(given)
        one, two = post(COMPLETIONS, prompt="The sea is", n=2)["choices"]
        assert (one["text"], two["text"]) == (given, text_of(seed=8))
        chat = post("/v1/chat/completions", messages=message)["choices"][0]
        same = ask(s.client, temperature=0.9, seed=7, max_tokens=5).json()["choices"][0]
        assert chat == same and chat["finish_reason"] == "length"
        response = post("/v1/responses", input=message)
        assert response["output"][0]["content"][0]["text"] == chat["message"]["content"]
        said = post("/v1/messages", messages=message, max_tokens=5)["content"][0]["text"]
        assert said == chat["message"]["content"].lstrip()
        params = s.client.get("/props").json()["default_generation_settings"]["params"]
        assert params == {"temperature": 0.9, "seed": 7, "n_predict": 5}
