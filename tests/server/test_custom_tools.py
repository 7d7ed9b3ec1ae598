"""Custom tools of POST /v1/responses: an input that is a text, whole and streamed, there and back."""

import json
import random

import pytest
from client_tools import PLACE, RIVERS, WHOLE, openai_client, refused, written
from event_checks import response_event, response_of
from template_servers import OWN_AND_QWEN, demo_batcher, serving
from tiers import crossed, each

from eagle3_llama.server.responses.items import InputText
from eagle3_llama.server.responses.tools import arguments_of

PATCH = '*** Begin Patch\n*** Update File: "a.py"\n-x\\y\n+é —\t1\n*** End Patch\n'
TOOL = {"type": "custom", "name": "apply_patch", "description": "Changes files."}
FUNCTION = {"type": "function", "name": "weather", "description": "Looks it up.", "parameters": PLACE}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def servers():
    with demo_batcher(4096) as batcher, serving(batcher, OWN_AND_QWEN) as made:
        yield made


@pytest.fixture(params=each(OWN_AND_QWEN, ["own"]))  # and `qwen` where a test says so
def kind(request):
    return request.param


@pytest.fixture
def client(servers, kind):
    return openai_client(servers[kind])


def said(kind, text, name="apply_patch"):
    """What makes the model call a tool with this text, in the form of the template."""
    call = json.dumps({"name": name, "arguments": {"input": text}}, ensure_ascii=False)
    return written(call if kind == "own" else f"<tool_call>\n{call}\n</tool_call>")


def ask(client, asked=RIVERS, *, extra=(), **more):
    """The response, checked by OpenAI's models and against the events of its stream."""
    from openai.types.responses import Response

    given = {"model": "any", "input": asked, "temperature": 0, "max_output_tokens": WHOLE, "tools": [TOOL]}
    given |= {**more, "extra_body": {**OFF, **dict(extra)}}
    whole = Response.model_validate(client.responses.create(**given).to_dict())
    told = client.responses.create(**given, stream=True)
    final = response_of([response_event(e.to_dict()) for e in told])
    bare = lambda r: [{k: v for k, v in i.to_dict().items() if k not in ("id", "call_id")} for i in r.output]
    assert bare(final) == bare(whole)
    return whole


def test_a_call_and_its_result(client, kind):
    """The conversation goes on with the call as it was made, however the client sends it back."""
    first = ask(client, extra=said(kind, PATCH), tools=[FUNCTION, TOOL])
    (call,) = first.output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", PATCH)
    assert call.id.startswith("ctc_") and call.call_id and call.to_dict()["status"] == "completed"
    assert first.tools[1].to_dict() == {**TOOL, "format": None}
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
    more = {"tools": [TOOL, FUNCTION], "extra": written("So be it.")}
    stored = ask(client, [result], previous_response_id=first.id, **more)
    items = [{"role": "user", "content": RIVERS}, call.to_dict(), result]
    echoed = ask(client, items, **more)
    assert (stored.output_text, stored.usage.input_tokens) == (echoed.output_text, echoed.usage.input_tokens)
    as_function = {"type": "function_call", "name": "apply_patch", "call_id": call.call_id}
    as_function["arguments"] = arguments_of(PATCH)
    same = ask(client, [items[0], as_function, {**result, "type": "function_call_output"}], **more)
    assert same.usage.input_tokens == echoed.usage.input_tokens
    listed = client.responses.input_items.list(stored.id, order="asc").data
    assert [item.type for item in listed] == ["message", "custom_tool_call", "custom_tool_call_output"]
    assert listed[1].input == PATCH and listed[1].id.startswith("ctc_")


NAMED = {"type": "custom", "name": "apply_patch"}
CHOICES = ["required", NAMED, {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}]


@pytest.mark.parametrize("kind, choice", crossed(OWN_AND_QWEN, CHOICES), indirect=["kind"])
def test_a_call_that_must_be(client, choice):
    """Whatever the model would say. Its input is a text, which a limit may cut."""
    given = {"model": "any", "input": RIVERS, "temperature": 0, "max_output_tokens": 60, "tools": [TOOL]}
    given |= {"tool_choice": choice, "parallel_tool_calls": False, "extra_body": OFF}
    told = client.responses.create(**given, stream=True)
    (call,) = response_of([response_event(e.to_dict()) for e in told]).output
    assert call.type == "custom_tool_call" and call.name == "apply_patch"
    made = client.responses.create(**given)
    if made.status == "completed":
        assert [(c.type, c.input) for c in made.output] == [("custom_tool_call", call.input)]


def test_a_call_that_is_cut(client, kind):
    """It is an item of the stream alone, and incomplete: half a patch is none."""
    given = {"model": "any", "input": RIVERS, "temperature": 0, "max_output_tokens": 30, "tools": [TOOL]}
    told = list(client.responses.create(**given, stream=True, extra_body={**OFF, **said(kind, PATCH * 3)}))
    response = told[-1].response
    assert told[-1].type == "response.incomplete"
    calls = [item for item in response.output if item.type == "custom_tool_call"]
    assert all(call.to_dict()["status"] == "incomplete" for call in calls)
    assert calls and all((PATCH * 3).startswith(call.input) for call in calls)
    then = client.responses.create(**{**given, "input": "Go on."}, previous_response_id=response.id)
    assert then.status in ("completed", "incomplete")


@pytest.mark.parametrize(
    "tools, says",
    [
        ([{**TOOL, "format": {"type": "regex", "definition": "a"}}], "'regex' is not possible"),
        ([TOOL, {**FUNCTION, "name": "apply_patch"}], "a function and a custom tool"),
        ([{"type": "custom"}], "name"),
        ([{"type": "websearch"}], "'websearch' is not possible"),
    ],
)
def test_what_is_refused(client, tools, says):
    error = refused(lambda: client.responses.create(model="any", input=RIVERS, tools=tools))
    assert says in error["message"] and error["param"].startswith("tools")


def test_items_that_do_not_fit(client):
    for item, says in (
        ({"type": "custom_tool_call", "call_id": "c", "name": "apply_patch"}, "needs input"),
        ({"type": "custom_tool_call_output", "call_id": "c", "output": "x"}, "no call 'c'"),
    ):
        error = refused(lambda: client.responses.create(model="any", input=[item]))
        assert says in error["message"]


@pytest.mark.parametrize(
    "text", ["", PATCH, "😀, 😀", "\ud800x", '\\"', "\x00\x1f", "a" * 99, "\\u00e9"], ids=repr
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_the_text_grows_with_its_json(text, ascii_only):
    """Cut anywhere, also within an escape or between the halves of a surrogate pair."""
    whole, rng = json.dumps({"input": text}, ensure_ascii=ascii_only), random.Random(len(text))
    for most in (1, 2, 3, 7, 1000):
        read, told, at = InputText(), [], 0
        while at < len(whole):
            n = rng.randint(1, most)
            told.append(read.add(whole[at : at + n]))
            at += n
        assert "".join(told) == text
        assert read.end() == "" and read.text == text
        assert len([part for part in told if part]) > 1 or most == 1000 or len(text) < 8


@pytest.mark.parametrize(
    "text", ["\\ud83d\\ude00", "x\\\\ud83d😀", "\ud83d\ud83d\ude00", "\ud83d\\u0041"], ids=repr
)
def test_a_text_that_has_escapes_of_its_own(text):
    """A backslash is an escape too, and what follows it is then none. Cut in three, everywhere."""
    whole = json.dumps({"input": text})
    for first in range(len(whole) + 1):
        for second in range(first, len(whole) + 1):
            read = InputText()
            told = [read.add(part) for part in (whole[:first], whole[first:second], whole[second:])]
            assert "".join(told) + read.end() == json.loads(whole)["input"] == read.text, (first, second)


@pytest.mark.parametrize("arguments", ["", "patch it", '{"x": 1}', '{"input": 3}', "[1]"])
def test_arguments_of_another_form_are_the_text(arguments):
    read = InputText()
    assert read.add(arguments) + read.end() == arguments == read.text
