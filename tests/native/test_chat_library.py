"""libe3chat: calls that are enforced are calls for the parser too, in each of llama.cpp's templates."""

import json

import pytest
import templates
from commands import run
from grammar_walks import Characters, begun
from paths import ROOT

import eagle3_llama
from eagle3_llama.server.body.chat import ChatBody
from eagle3_llama.server.prompt import later_system
from eagle3_llama.server.prompt.template_client import ChatLibrary
from eagle3_llama.server.prompt.template_request import marks_of
from eagle3_llama.server.prompt.tools import tools_of
from eagle3_llama.server.sandbox import chat_library
from eagle3_llama.server.sandbox.chat_library import ChatError, ChatTemplate, WrongOutput, parse
from eagle3_llama.server.sandbox.child import Templates
from eagle3_llama.server.sandbox.pool import SandboxError

PLACE = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "day": {"type": "integer", "minimum": 1, "maximum": 31}},
    "required": ["sure", "day"],
}
TOOLS = [
    {"type": "function", "function": {"name": n, "description": f"About the {n}.", "parameters": PLACE}}
    for n in ("get_weather", "get_time", "find_route")
]
ASKED = [{"role": "user", "content": "Which coat in Oslo?"}]
# of the templates, those that describe no calls
NO_CALLS = {
    "HuggingFaceTB-SmolLM3-3B",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "google-gemma-2-2b-it",
    "ibm-granite-granite-3.3-2B-Instruct",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}

# whose grammars know the calls' names, and of their arguments only that they are a dictionary
LOOSE = {"LFM2-8B-A1B", "LFM2.5-8B-A1B", "LFM2.5-Instruct", "openbmb-MiniCPM5-1B"}
# whose grammars let any text stand within a call, where a random walk does not end: a call as they write it
_GEMMA = "<|tool_call>call:get_time{sure:true,day:3}<tool_call|>"
_ARGUMENT = '<|open|>argument key="sure" type="boolean"<|sep|>true<|close|>argument<|sep|>'
WRITTEN = {
    "Kimi-K3": '<|open|>tools<|sep|><|open|>call tool="get_time" index="1"<|sep|>'
    + _ARGUMENT
    + _ARGUMENT.replace("sure", "day").replace("boolean", "number").replace(">true", ">3")
    + "<|close|>call<|sep|><|close|>tools<|sep|>",
    "Mistral-Small-3.2-24B-Instruct-2506": '[TOOL_CALLS]get_time[ARGS][ARGS]{"sure": true, "day": 3}',
    "google-gemma-4-31B-it": _GEMMA,
    "google-gemma-4-31B-it-interleaved": _GEMMA,
    "muse-glimmer": ' to=get_time<|message|><atem:function_calls><atem:invoke name="get_time">'
    '<atem:parameter name="sure">true</atem:parameter><atem:parameter name="day">3</atem:parameter>'
    "</atem:invoke></atem:function_calls>",
}


@pytest.fixture(scope="module")
def characters():
    return Characters()


def asked(name, **more):
    t = ChatTemplate(templates.text(name), "<s>", "</s>")
    return t.apply({"messages": ASKED, "tools": TOOLS, "tool_choice": "required", **more})


@pytest.mark.parametrize("name", templates.names())
def test_forced_calls(characters, name):
    """What the grammar lets a model write is one call of an allowed tool, its arguments by the schema.

    The walk writes few blanks: some of llama.cpp's grammars allow more of them than its parsers do.
    """
    if name in NO_CALLS:
        assert asked(name)["forced"] == ""
        return
    for seed, (thinking, called) in enumerate([(False, None), (True, ["get_time"]), (False, ["find_route"])]):
        written = WRITTEN.get(name, "").replace("get_time", (called or ["get_time"])[0])
        chosen = {"called": called} if called else {}
        made = asked(name, enable_thinking=thinking, **chosen)
        text = characters.walk(made["forced"], begun(made, thinking), seed, written)
        message = parse(made, text, partial=False)
        assert len(message["tool_calls"]) == 1, text
        call = message["tool_calls"][0]
        assert call["name"] in (called or [t["function"]["name"] for t in TOOLS])
        arguments = json.loads(call["arguments"])
        if name in LOOSE:
            continue
        assert type(arguments["sure"]) is bool and arguments["day"] in range(1, 32), text
        assert message["content"].strip() == ""
        assert ("coat" in message["reasoning_content"]) == ("coat" in text)


@pytest.mark.parametrize("name", templates.names())
def test_later_system_messages(name):
    """Each stands where it was said, also for the many templates that refuse, leave out or move them."""
    setup = {"template": templates.text(name), "tool_use": None, "bos": "<s>", "eos": "</s>"}
    library, apply = ChatLibrary(1.0, setup, convert=None), Templates(setup).apply

    def call(do, **request):
        try:
            return apply(**request)
        except ChatError as e:
            raise SandboxError(str(e)) from None

    library._templates.call = call
    body = ChatBody(messages=[{"role": "user", "content": "x"}])
    asked = {"messages": later_system.PROBE, "enable_thinking": False}
    assert later_system.are_shown(library.prepare(asked, tools_of(body), None, marks_of(body)).prompt)
    turned = later_system.as_users(later_system.PROBE)
    assert [m["role"] for m in turned] == ["system", "user", "assistant", "user"]


def test_named_tools_leave_the_prompt_as_it_is():
    """Its beginning is found in a slot again, whichever tool a turn names."""
    prompts = {asked("Qwen-Qwen3-0.6B", **more)["prompt"] for more in ({}, {"called": ["get_time"]})}
    assert len(prompts) == 1 and "find_route" in prompts.pop()


def test_a_growing_answer():
    """Each prefix of an answer is read, and nothing of it is taken back."""
    made = ChatTemplate(templates.text("Qwen-Qwen3-0.6B"), "", "").apply({"messages": ASKED, "tools": TOOLS})
    assert made["lazy"] and [t["word"] for t in made["triggers"]] == ["<tool_call>\n"]
    call = '<tool_call>\n{"name": "get_time", "arguments": {"sure": true, "day": 3}}\n</tool_call>'
    text, before = f"<think>\nHm.\n</think>\n\nI look. {call}", {"content": "", "reasoning_content": ""}
    for n in range(len(text) + 1):
        message = parse(made, text[:n], partial=n < len(text))
        for field, was in before.items():
            assert message[field].startswith(was.rstrip()), text[:n]
            before[field] = message[field]
    assert before == {"content": "I look. ", "reasoning_content": "Hm.\n"}
    assert message["tool_calls"][0]["arguments"] == '{"sure": true, "day": 3}'


def test_what_is_refused():
    for text in ("{% if %}", "{{ raise_exception('no tools') }}", ""):
        with pytest.raises(ChatError) as told:
            ChatTemplate(text, "", "").apply({"messages": ASKED})
        assert str(told.value) and "std::exception" not in str(told.value)
    t = ChatTemplate("{{ messages[0].content }}", "", "")
    for request in ({}, {"messages": 5}, {"messages": [{"role": "user"}]}, {"messages": ASKED, "tools": [5]}):
        with pytest.raises(ChatError):
            t.apply(request)
    with pytest.raises(WrongOutput):
        parse(asked("openai-gpt-oss-120b"), "<|channel|>nowhere<|message|>", partial=False)
    with pytest.raises(ChatError):
        parse({"format": 99, "generation_prompt": "", "parser": ""}, "", partial=False)


def test_schemas():
    """The bounds of integers are kept. What is not enforced is named, not let through."""
    whole = chat_library.schema('{"type": "integer", "minimum": 0, "maximum": 9}')
    assert "[0-9]" in whole["grammar"] and whole["incomplete"] == []
    odd = chat_library.schema('{"type": "string", "pattern": "^(?=a)b$"}')
    assert "pattern" in odd["incomplete"][0]
    assert chat_library.schema('{"type": "string"}')["incomplete"] == []  # it was the other schema's
    for wrong in ('{"type": "nothing"}', "{", '{"$ref": "#/nowhere"}'):
        with pytest.raises(ChatError):
            chat_library.schema(wrong)


def test_nothing_else_is_exported():
    """The library hides llama.cpp's functions: another copy of them in the process would be mixed with it."""
    lib = eagle3_llama.runtime.library.find_lib_dir() / chat_library._NAME
    if lib.suffix != ".so":
        pytest.skip("nm reads the names of Linux's libraries")
    names = run(["nm", "-D", "--defined-only", lib]).stdout.split("\n")
    ours = {line.split()[-1] for line in names if " T " in line}
    header = (ROOT / "native" / "include" / "e3chat.h").read_text()
    assert ours == {name for name in ours if name.startswith("e3chat_") and f"{name}(" in header} and ours
