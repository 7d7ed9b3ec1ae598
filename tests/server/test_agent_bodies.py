"""What agents send is taken: hosted tools, namespaces, pictures and other servers' items in a history."""

import json
import logging

import pytest
from agent_bodies import CYCLE, PATCH, PNG, SESSIONS, TURNS, codex, codex_of_openai, codex_tools
from starlette.responses import Response

from eagle3_llama.server.anthropic import body as messages_body
from eagle3_llama.server.body.chat import MAX_TOOLS, ChatBody
from eagle3_llama.server.errors import ApiError
from eagle3_llama.server.http import left_out
from eagle3_llama.server.http.body_reader import parse
from eagle3_llama.server.responses.body import ResponseBody
from eagle3_llama.server.responses.items import Items
from eagle3_llama.server.responses.to_chat import chat_of, items_of
from eagle3_llama.server.responses.tools import HOSTED

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def read(path, body):
    """(the chat that a body stands for, what of it is left out)."""
    raw = json.dumps(body).encode()
    if path == CHAT:
        return parse(raw, ChatBody), []
    if path == MESSAGES:
        made = parse(raw, messages_body.MessagesBody)
        return messages_body.chat_of(made), made.left_out
    made = parse(raw, ResponseBody)
    chat, tools = chat_of(made, items_of(made))
    return chat, tools.left_out


def error(path, body):
    with pytest.raises(ApiError) as e:
        read(path, body)
    assert e.value.status == 400
    return e.value


# what they have found, the time, and files stand near the end of each request
MOVING = ("codex_of_openai", "goose", "aider")


@pytest.mark.parametrize("name", SESSIONS)
def test_sessions(name):
    """Each request, from the first on. A history is read alike in all of them, so its prompt is found."""
    path, body_of = SESSIONS[name]
    before = []
    for turn in range(TURNS):
        chat, _ = read(path, body_of(turn))
        made = [m.model_dump(exclude_none=True) for m in chat.messages]
        if name not in MOVING:
            assert made[: len(before)] == before, turn
        before = made
    said, picture = json.dumps(before), PNG.partition(",")[2]
    assert picture not in said
    assert ("which this model cannot read" in said) is (picture in json.dumps(body_of(TURNS - 1)))
    results = len([m for m in before if m["role"] == "tool"])
    assert results >= TURNS - 2 * (TURNS // CYCLE) - 1 or not chat.tools


def test_codexs_first_request():
    """Of its 0.171: a namespace's tools are functions, a hosted tool is left out."""
    chat, without = read(RESPONSES, codex(0))
    names = [tool.function.name for tool in chat.tools]
    assert without == ["web_search"] and len(names) == 12 and names[0] == "exec_command"
    assert "multi_agent_v1__spawn_agent" in names and chat.tool_choice == "auto"
    about = {tool.function.name: tool.function.description for tool in chat.tools}
    assert about["multi_agent_v1__close_agent"].startswith("Tools for spawning")
    assert [m.role for m in chat.messages] == ["system", "user", "user"]


def test_tools_of_openais_models():
    chat, without = read(RESPONSES, codex_of_openai(CYCLE + 1))
    assert without == ["web_search", "grammar of 'apply_patch'", "image_generation"]
    about = {tool.function.name: tool.function for tool in chat.tools}
    assert PATCH in about["apply_patch"].description
    assert "command" in about["local_shell"].parameters["properties"]
    assert about["mcp__calendar__create_event"].description == "A calendar.\n\nThe tool create_event."
    assert "mcp__calendar__create_event" not in [
        t.function.name for t in read(RESPONSES, codex_of_openai(0))[0].tools
    ]


@pytest.mark.parametrize("kind", HOSTED)
def test_every_hosted_tool_is_left_out(kind):
    tool = {"type": kind, "vector_store_ids": ["x"], "container": {"type": "auto"}}
    chat, without = read(RESPONSES, codex(0) | {"tools": [tool, codex_tools()[0]]})
    assert without == [kind] and len(chat.tools) == 1


NAMED = {"type": "function", "name": "spawn_agent"}
SPACED = NAMED | {"namespace": "multi_agent_v1"}


@pytest.mark.parametrize(
    "choice",
    [NAMED, SPACED, {"type": "allowed_tools", "mode": "auto", "tools": [NAMED, {"type": "web_search"}]}],
)
def test_a_choice_of_a_namespaces_tool(choice):
    chosen = read(RESPONSES, codex(0) | {"tool_choice": choice})[0].tool_choice
    named = chosen.allowed_tools.tools[0] if choice["type"] == "allowed_tools" else chosen
    assert named.function.name == "multi_agent_v1__spawn_agent"


HOSTED_ONE = {"type": "web_search", "external_web_access": True}


ALLOWED = {"type": "allowed_tools", "mode": "auto"}
REFUSED = [
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", "runs no tools"),
    ({"tool_choice": ALLOWED | {"tools": [HOSTED_ONE]}}, "tool_choice", "external_web_access"),
    (
        {"tool_choice": ALLOWED | {"tools": [{"type": "mcp", "server_label": "x"}]}},
        "tool_choice",
        "runs none",
    ),
    ({"tools": [HOSTED_ONE], "tool_choice": "required"}, "tool_choice", "has no web_search"),
    ({"tools": [{"type": "functoin", "name": "f"}]}, "tools", "'functoin' is not possible"),
    ({"tools": [{"type": "namespace", "name": "x"}]}, "tools", "needs tools"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item_reference"),
    ({"input": [{"type": "compaction_trigger"}]}, "input", "compaction_trigger"),
]


@pytest.mark.parametrize("body, param, says", REFUSED)
def test_what_is_named_is_refused(body, param, says):
    e = error(RESPONSES, codex(0) | body)
    assert says in str(e) and (e.param or "").startswith(param), (e.param, str(e))


def test_two_tools_of_one_name():
    space = lambda name: {"type": "namespace", "name": name, "tools": [{"type": "function", "name": "f"}]}
    e = error(RESPONSES, {"input": "x", "tools": [space("a"), space("a_")]})
    assert e.param == "tools" and "name them apart" in str(e)


# a part that is no text, by each API, and a part in words
IMAGES = {
    CHAT: [{"type": "image_url", "image_url": {"url": PNG}}],
    MESSAGES: [{"type": "image", "source": {}}],
    RESPONSES: [{"type": "input_image", "image_url": PNG}],
}


@pytest.mark.parametrize("path", IMAGES)
def test_pictures(path):
    """In an earlier turn a line stands for each. In the user's newest they are refused, by their place."""
    shown = {"role": "user", "content": IMAGES[path]}
    said, field = {"role": "assistant", "content": "A cat."}, "input" if path == RESPONSES else "messages"
    more = {"max_tokens": 3} if path == MESSAGES else {}
    body = lambda *turns: {field: list(turns), **more}
    chat, _ = read(path, body(shown, said, {"role": "user", "content": "And now?"}))
    assert [m.content for m in chat.messages[:2]] == [
        "[An image was here, which this model cannot read.]",
        "A cat.",
    ] or (chat.messages[0].content[0].text.startswith("[An image was here"))
    for turns in ([shown], [shown, said, shown], [shown, said], [said, shown, said]):
        at = max(i for i, turn in enumerate(turns) if turn is shown)
        e = error(path, body(*turns))
        assert "text alone" in str(e) and e.param == f"{field}[{at}].content[0]"


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_pictures_behind_a_result(path):
    """Some agents put the picture that a tool gave into a message of the user's."""
    shown = {"role": "user", "content": IMAGES[path]}
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    if path == CHAT:
        turns = [
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": ""},
        ]
    else:
        turns = [{"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}]
        turns += [{"type": "function_call_output", "call_id": "c", "output": ""}]
    asked = [{"role": "user", "content": "Look."}, *turns]
    field = "messages" if path == CHAT else "input"
    for more in ([shown], [shown, {"role": "user", "content": "Well?"}]):
        read(path, {field: [*asked, *more]})
    assert "text alone" in str(error(path, {field: [*asked, {"role": "user", "content": "x"}, shown]}))


def test_parts_that_are_texts():
    """In the newest turn too."""
    block = lambda text: [{"type": "text", "text": text}]
    plain = {"type": "text", "media_type": "text/plain", "data": "One."}
    parts = [
        {"type": "document", "title": "T", "source": plain},
        {"type": "document", "source": {"type": "content", "content": block("Two.")}},
        {"type": "search_result", "source": "s", "title": "S", "content": block("Three.")},
    ]
    turn = {"role": "user", "content": parts}
    chat, _ = read(MESSAGES, {"messages": [turn], "max_tokens": 3})
    assert chat.messages[0].content == "T\nOne.\nTwo.\nS\ns\nThree."
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}
    e = error(MESSAGES, {"messages": [{"role": "user", "content": [pdf]}], "max_tokens": 3})
    assert "text alone" in str(e) and e.param == "messages[0].content[0]"
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    chat, _ = read(
        CHAT, {"messages": [{"role": "user", "content": []}, said, {"role": "user", "content": "Why?"}]}
    )
    assert chat.messages[1].content[0].text == "No."


def test_more_calls_than_a_turn_may_have():
    """An error of the request, in whichever API."""
    uses = [{"type": "tool_use", "id": f"t{i}", "name": "f", "input": {}} for i in range(MAX_TOOLS + 1)]
    result = {"type": "tool_result", "tool_use_id": "t0", "content": "x"}
    turns = [("user", "x"), ("assistant", uses), ("user", [result])]
    body = {"messages": [{"role": role, "content": content} for role, content in turns], "max_tokens": 1}
    assert f"at most {MAX_TOOLS}" in str(error(MESSAGES, body))
    calls = [
        {"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"}
        for i in range(MAX_TOOLS + 1)
    ]
    assert f"at most {MAX_TOOLS}" in str(
        error(RESPONSES, {"input": [{"role": "user", "content": "x"}, *calls]})
    )


def test_damaged_items_are_errors():
    """Whatever stands in a field that another server fills."""
    odd = (None, 1, "x", [1], {"type": 1}, [{"type": [1]}], [{"name": 1}])
    kinds = "agent_message tool_search_output tool_search_call local_shell_call computer_call_output"
    for kind in (*kinds.split(), "message", "function_call_output", "additional_tools", "web_search_call"):
        for field in ("content", "tools", "output", "action", "arguments", "call_id", "author", "role"):
            for value in odd:
                item = {"type": kind, "call_id": "c", field: value}
                turn = {"role": "user", "content": [{"type": "document", "source": value, "content": value}]}
                for path, body in (
                    (RESPONSES, {"input": [item]}),
                    (MESSAGES, {"messages": [turn], "max_tokens": 1}),
                ):
                    try:
                        read(path, body)
                    except ApiError as e:
                        assert e.status == 400


def grown(calls, name, arguments):
    """The item that a call of a function becomes, and the events that tell it."""
    items = Items(calls)
    call = lambda **more: {"tool_calls": [{"index": 0, **more}]}
    events = items.add(call(id="call_1", function={"name": name, "arguments": arguments[:5]}), [])
    events += items.add(call(function={"name": name, "arguments": arguments[5:]}), [])
    return items, events + items.end("completed")


ARGUMENTS = '{"cmd": "ls"}'
FUNCTION = {"type": "function_call", "arguments": ARGUMENTS}
ACTION = {"type": "exec", "env": {}, "command": [], "cmd": "ls"}
CALLS = [
    ("exec_command", FUNCTION | {"name": "exec_command"}),
    ("multi_agent_v1__spawn_agent", FUNCTION | {"name": "spawn_agent", "namespace": "multi_agent_v1"}),
    ("local_shell", {"type": "local_shell_call", "action": ACTION}),
    ("tool_search", {"type": "tool_search_call", "execution": "client", "arguments": {"cmd": "ls"}}),
]


@pytest.mark.parametrize("name, item", CALLS)
def test_what_a_call_becomes(name, item):
    """The item that the agent expects, in OpenAI's form. Sent back it is the call that the model wrote."""
    body = parse(json.dumps(codex_of_openai(0)).encode(), ResponseBody)
    _, tools = chat_of(body, items_of(body))
    items, events = grown(tools.calls, name, ARGUMENTS)
    (made,) = items.output
    assert {k: v for k, v in made.items() if k != "id"} == {
        "call_id": "call_1",
        "status": "completed",
        **item,
    }
    assert events[0]["item"]["status"] == "in_progress" and events[-1]["item"] == made
    result = {"type": "function_call_output", "call_id": "call_1", "output": "x"}
    chat, _ = read(
        RESPONSES, codex_of_openai(0) | {"input": [{"role": "user", "content": "x"}, made, result]}
    )
    (call,) = chat.messages[1].tool_calls
    assert call.function.name == name and json.loads(call.function.arguments)["cmd"] == "ls"


def test_the_header_and_the_log(caplog):
    """A name of the client's cannot leave its line; the log has the same once."""
    left_out._note.cache_clear()
    odd = {"type": "custom", "name": "é\r\nX-Evil: 1", "format": {"type": "grammar", "definition": "x"}}
    _, without = read(RESPONSES, codex(0) | {"tools": [odd, *[HOSTED_ONE] * 3]})
    with caplog.at_level(logging.WARNING, "eagle3_llama.server"):
        for _ in range(2):
            answer = left_out.tell(Response(), without)
    assert answer.headers["X-Left-Out"] == r"grammar of '\xe9\r\nX-Evil: 1', web_search"
    assert len(caplog.records) == 2 and "Evil" not in caplog.text and "web_search of requests" in caplog.text
    assert "X-Left-Out" not in left_out.tell(Response(), []).headers
    tool = {"type": "web_search_\n日本", "name": "x"}
    assert "no tool of type" in str(
        error(MESSAGES, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "tools": [tool]})
    )
