"""What the server keeps: slots in files, and its log."""

import functools
import json
import logging
import os
import re

import pytest
from server_tools import CHAT, Streams, ask, idle, metric, other, running, settings, until

ACCESS = "eagle3_llama.server.access"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(scope="module")
def server(folder):
    with running(settings(n_parallel=2, slot_save_path=str(folder))) as s:
        yield s


def slot(server, action, filename, i=0):
    return server.client.post(f"/slots/{i}", params={"action": action}, json={"filename": filename})


def test_slots_are_saved_and_restored(server, folder):
    before = {p.name for p in folder.iterdir()}
    ask(server.client, max_tokens=8)
    used = max(server.client.get("/slots").json(), key=lambda s: s["n_past"])
    saved = slot(server, "save", "a.bin", used["id"]).json()
    assert saved["n_saved"] == used["n_past"] > 0 and saved["n_written"] == (folder / "a.bin").stat().st_size
    restored = slot(server, "restore", "a.bin", 1 - used["id"]).json()
    assert restored["n_restored"] == saved["n_saved"] and restored["n_read"] == saved["n_written"]
    assert {p.name for p in folder.iterdir()} - before == {"a.bin"}  # no temporary file is left
    assert ask(server.client, max_tokens=8).status_code == 200


def test_slots_are_erased(server):
    """The next request decodes the whole prompt, with the same text. A busy slot stays as it is."""
    expected = ask(server.client, max_tokens=8).json()["choices"][0]["message"]["content"]
    for i in range(2):
        held = server.client.get("/slots").json()[i]["n_past"]
        r = server.client.post(f"/slots/{i}?action=erase")  # as llama.cpp's server has it, without a body
        assert r.json() == {"id_slot": i, "n_erased": held}
    assert [s["n_past"] for s in server.client.get("/slots").json()] == [0, 0]
    again = ask(server.client, max_tokens=8).json()
    assert again["choices"][0]["message"]["content"] == expected
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    with Streams(server, 2):
        until(lambda: all(s["busy"] for s in server.client.get("/slots").json()))
        assert "busy" in server.client.post("/slots/0?action=erase").json()["error"]["message"]
    until(lambda: idle(server))
    assert server.client.post("/slots/9?action=erase").status_code == 404


def test_slot_files_that_are_wrong(server, folder):
    """400, and the next request works."""
    expected = ask(server.client, max_tokens=8).json()["choices"][0]["message"]["content"]
    used = max(server.client.get("/slots").json(), key=lambda s: s["n_past"])["id"]
    assert slot(server, "save", "good.bin", used).status_code == 200
    data = (folder / "good.bin").read_bytes()
    middle = bytearray(data)
    middle[len(data) // 2] ^= 0x55
    flipped = bytearray(data)
    flipped[-40] ^= 1  # in the head's state
    for i, bad in enumerate(
        (
            b"",
            data[:9],
            data[: len(data) // 2],
            data[:-1],
            data + b"x",
            b"GGUF" + data[4:],
            bytes(middle),
            bytes(flipped),
            os.urandom(5000),
        )
    ):
        (folder / "bad.bin").write_bytes(bad)
        r = slot(server, "restore", "bad.bin", used)
        assert r.status_code == 400 and r.json()["error"]["code"] in ("bad_value", "truncated"), (i, r.text)
        assert ask(server.client, max_tokens=8).json()["choices"][0]["message"]["content"] == expected


def test_slot_names(server, folder):
    for name in (
        "../x",
        "/etc/passwd",
        "a/b",
        "..",
        ".",
        "",
        ".hidden",
        "x\0",
        "x" * 200,
        "a\\b",
        "c:x",
        "x\n",
    ):
        assert slot(server, "save", name).status_code == 400, name
    os.symlink("/etc/passwd", folder / "link")
    os.mkfifo(folder / "pipe")
    for name in ("link", "pipe"):
        assert slot(server, "restore", name).status_code == 400
    assert slot(server, "restore", "none").status_code == 404 == slot(server, "save", "a", 99).status_code
    assert (
        slot(server, "move", "a").status_code
        == 400
        == server.client.post("/slots/x?action=save", json={"filename": "a"}).status_code
    )
    assert server.client.post(f"/slots/{10**30}?action=save", json={"filename": "a"}).status_code in (
        400,
        404,
    )
    with other(server) as s:
        assert "--slot-save-path" in slot(s, "save", "a").json()["error"]["message"]


def test_a_busy_slot_is_not_saved(server):
    with Streams(server, 2):
        until(lambda: all(s["busy"] for s in server.batcher.slots()))
        assert slot(server, "save", "busy.bin").status_code == 400
    until(lambda: idle(server))


def lines_of(caplog, *ids):
    """The log's lines of these requests, in their order. Requests of other tests may end meanwhile."""
    lines = [json.loads(record.message) for record in caplog.records if record.message.startswith("{")]
    return [line for each in ids for line in lines if line["request_id"] == each]


def test_slot_files_are_their_owners(server, folder):
    """Nobody else on the machine reads what clients have written."""
    before = os.umask(0o022)
    try:
        assert slot(server, "save", "mine.bin").status_code == 200
    finally:
        os.umask(before)
    assert (folder / "mine.bin").stat().st_mode & 0o777 == 0o600


def test_prompts_of_a_list_count_in_full(server, caplog):
    """In the log and for the client; one that several choices answer counts once."""
    with other(server, api_key=("one: key-one",)) as s, caplog.at_level(logging.INFO, ACCESS):
        body = {"prompt": ["One two three.", "Four."], "n": 2, "max_tokens": 2}
        r = s.client.post("/v1/completions", json=body, headers={"X-Request-Id": "list"})
        n = r.json()["usage"]["prompt_tokens"]
        until(lambda: lines_of(caplog, "list"))
        assert metric(s, "eagle3_client_tokens_total", 'kind="prompt"') == n
    assert lines_of(caplog, "list")[0]["prompt_tokens"] == n > 4


def test_each_metric_says_what_it_is(server):
    said = dict(re.findall(r"^# HELP (\S+) (.+)$", server.client.get("/metrics").text, re.M))
    assert said["eagle3_request_seconds"] == "from the request to the end of the answer"
    assert said["eagle3_client_tokens_total"].startswith("tokens of each API key's requests")
    ours = [
        text for name, text in said.items() if name.startswith("eagle3_") and not name.endswith("_created")
    ]
    assert len(ours) == len(set(ours))


@pytest.mark.parametrize("log_prompts", [False, True])
def test_one_line_of_log(server, caplog, log_prompts):
    with other(server, log_prompts=log_prompts) as s, caplog.at_level(logging.INFO, ACCESS):
        r = s.client.post(
            CHAT,
            json={"messages": [{"role": "user", "content": "xyzzy"}], "max_tokens": 4},
            headers={"X-Request-Id": "mine-1"},
        )
        assert r.headers["x-request-id"] == "mine-1" and r.json()["id"] == "chatcmpl-mine-1"
        odd = s.client.post(
            CHAT,
            json={"messages": [{"role": "user", "content": "xyzzy"}], "nn": 1},
            headers={"X-Request-Id": 'a"b c'},
        )
        assert odd.headers["x-request-id"] != 'a"b c'
        lines = functools.partial(lines_of, caplog, "mine-1", odd.headers["x-request-id"])
        until(lambda: len(lines()) >= 2)
    first, second = lines()
    assert first["route"] == CHAT and first["status"] == 200 and first["seconds"] > 0
    assert (
        first["completion_tokens"] == r.json()["usage"]["completion_tokens"] >= 4
    )  # more where the fourth ends within a character
    assert second["status"] == 400 and second["error"] == "unknown_field"
    assert ("xyzzy" in caplog.text) == log_prompts == ("xyzzy" in json.dumps(first.get("input")))
    assert isinstance(first["prompt"], float)  # seconds
