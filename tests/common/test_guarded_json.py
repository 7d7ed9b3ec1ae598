"""JSON of clients and models: whatever it is, it is read, or refused with a ValueError."""

import json
import re

import pytest
from paths import ROOT

from eagle3_llama.common.guarded_json import DEEPEST, read_json
from eagle3_llama.server.grammar.nulls import with_nulls
from eagle3_llama.server.prompt import message, tools_as_text
from eagle3_llama.server.responses.items import InputText

BAD = [
    "[" * 100_000,
    '{"a":' * 100_000,
    "[" * 900 + "]" * 900,
    "1e999",
    "-1e999",
    "NaN",
    "Infinity",
    "-Infinity",
]
BAD += ["1" * 10_000, '["\\q"]', "", "{", '{"a": 1e400}', '"\t"', "\ufeff1", "nul"]
GOOD = ["[" * DEEPEST + "]" * DEEPEST, '{"a": [1.5, -0.0, 1e308, null, true, "\\ud800"]}', "1" * 4000]


@pytest.mark.parametrize("text", BAD, ids=lambda text: repr(text[:12]))
def test_what_is_refused(text):
    with pytest.raises(ValueError, match=""):
        read_json(text)


@pytest.mark.parametrize("text", GOOD, ids=lambda text: repr(text[:12]))
def test_what_is_read_can_be_written(text):
    assert json.loads(json.dumps(read_json(text))) == json.loads(text)
    assert read_json(text.encode()) == read_json(text)
    assert read_json('"\t"', strict=False) == "\t"


@pytest.mark.parametrize("text", BAD, ids=lambda text: repr(text[:12]))
def test_arguments_of_calls(text):
    """In answers, in histories, and as the input of a tool whose input is a text."""
    assert not message._is_json(text)
    call = {"function": {"name": "f", "arguments": text}}
    told = tools_as_text.messages([{"role": "assistant", "content": "", "tool_calls": [call]}], [])
    assert json.loads(told[-1]["content"]) == {"name": "f", "arguments": text}
    given = InputText()
    assert given.add(text) + given.end() == text
    given = InputText()
    assert given.add('{"input": "a", "more": ' + text[:5000]) == "a" and given.end() == ""


def test_names_that_are_no_json():
    message = {"content": r'{"name": "\q", "arguments": {}}'}
    assert tools_as_text.split(message, False, ["f"]) == message
    assert with_nulls(r'{"\q": "null", "a": "null"}', ["q", "a"]) == r'{"\q": "null", "a": null}'


# what the server has written itself: files of it that read JSON without the guard
OWN = {
    "sandbox/pool.py": "messages between its processes",
    "sandbox/chat_library.py": "the library's",
    "responses/store.py": "stored answers",
    "settings.py": "an option",
    "grammar/tool_schemas.py": "marks and rules of its own",
    "prompt/choices.py": "a cache's entry",
}


def test_nothing_else_reads_json():
    server = ROOT / "eagle3_llama/server"
    readers = {
        path.relative_to(server).as_posix()
        for path in server.rglob("*.py")
        if re.search(r"json\.loads?\b", path.read_text()) and "ray" not in path.parts
    }
    assert readers == set(OWN)
