"""Tools, thoughts and schemas of chats: templates that know tools, and the demo model's, which knows none."""

import json

import pytest
from client_tools import NAMED, TOOLS, tool
from server_tools import ask, events, idle, running, settings, until
from template_servers import chat_fixtures
from tiers import crossed, each

from eagle3_llama.batching.samplers import LazyGrammar

WHOLE = 200  # tokens that a call has room in
INTERVALS = [0, 0.08]  # seconds; the latter is what a server has by default
# the demo model's own template knows no tools; the others write calls in ways of their own
KINDS = ["own", "Qwen-Qwen3-0.6B", "meta-llama-Llama-3.1-8B-Instruct", "Qwen3-Coder", "openai-gpt-oss-120b"]


batcher, servers = chat_fixtures(4096, {kind: kind for kind in KINDS})


@pytest.fixture(scope="module")
def server(servers):
    return servers["Qwen-Qwen3-0.6B"]


@pytest.fixture(scope="module")
def by_interval(server, batcher):
    """The same server, by the seconds for which its streams collect tokens."""
    with running(settings(**{**vars(server.settings), "stream_interval": 0}), batcher) as other:
        yield {server.settings.stream_interval: server, 0: other}


def choice_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def joined(response):
    """A stream's deltas, joined: content, reasoning_content, calls (name, arguments), finish_reason."""
    out, finish = {"content": "", "reasoning_content": "", "calls": []}, None
    for e in events(response):
        for c in e["choices"] if e else ():
            assert "error" not in e
            for field in ("content", "reasoning_content"):
                out[field] += c["delta"].get(field) or ""
            for call in c["delta"].get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(out["calls"]) and call["type"] == "function"
                    out["calls"].append([call["function"]["name"], ""])
                out["calls"][call["index"]][1] += call["function"]["arguments"]
            finish = c["finish_reason"] or finish
    return {**out, "finish_reason": finish}


CHOICES = [
    ("required", {"weather", "train"}),
    (NAMED, {"train"}),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}, {"train"}),
]


ENFORCED = [(kind, *choice) for kind in KINDS for choice in CHOICES]


# each kind's form of calls is in test_tool_schemas.py too
@pytest.mark.parametrize("kind, chosen, names", each(ENFORCED, [ENFORCED[0], ENFORCED[4], ENFORCED[8]]))
def test_calls_are_enforced(servers, kind, chosen, names):
    """The model was never trained for tools: without the grammar it writes none."""
    body = {"tools": TOOLS, "tool_choice": chosen, "max_tokens": WHOLE, "parallel_tool_calls": False}
    body["chat_template_kwargs"] = {"enable_thinking": False}
    choice = choice_of(ask(servers[kind].client, "What is it like in Oslo?", **body))
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and not message["content"]
    assert len(message["tool_calls"]) == 1
    called = message["tool_calls"][0]["function"]
    arguments = json.loads(called["arguments"])
    assert called["name"] in names and arguments["day"] <= 31 and isinstance(arguments["city"], str)
    streamed = joined(ask(servers[kind].client, "What is it like in Oslo?", stream=True, **body))
    assert streamed["calls"] == [[called["name"], called["arguments"]]]
    assert streamed["finish_reason"] == "tool_calls" and not streamed["content"].strip()


@pytest.mark.parametrize("kind", each(KINDS, KINDS[:2]))
def test_a_call_that_is_cut(servers, kind):
    """By a limit it ends with `length`: half a call is no call."""
    body = {"tools": TOOLS, "tool_choice": NAMED, "chat_template_kwargs": {"enable_thinking": False}}
    choice = choice_of(ask(servers[kind].client, max_tokens=9, **body))
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    assert joined(ask(servers[kind].client, max_tokens=9, stream=True, **body))["finish_reason"] == "length"


ARGUMENTS = '{"city": "Oslo", "day": 3}'
CALL = f'<tool_call>\n{{"name": "train", "arguments": {ARGUMENTS}}}\n</tool_call>'


WRITTEN = [
    (CALL, ("", "", [["train", ARGUMENTS]])),
    (f"I look. {CALL}", ("I look. ", "", [["train", ARGUMENTS]])),
    (f"<think>\nHm.\n</think>\n\n{CALL}", ("", "Hm.\n", [["train", ARGUMENTS]])),
    ("<think>\nHm, so.\n</think>\n\nHello.", ("Hello.", "Hm, so.\n", [])),
    ("No call, 2 < 3.", ("No call, 2 < 3.", "", [])),
    (CALL.replace("train", "fly"), (CALL.replace("train", "fly"), "", [])),  # there is no such tool
]


@pytest.mark.parametrize("interval, written, expected", crossed(INTERVALS, WRITTEN))
def test_what_a_model_writes_with_auto(server, by_interval, written, expected, interval):
    """The text is told by a grammar; content, thoughts and calls come apart, whole and streamed."""
    body = {"tools": TOOLS, "grammar": f"root ::= {json.dumps(written)}", "max_tokens": WHOLE}
    choice = choice_of(ask(server.client, **body))
    message = choice["message"]
    calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", ())]
    content, thoughts, expected_calls = expected
    assert calls == expected_calls and (message["content"] or "").strip() == content.strip()
    assert message.get("reasoning_content", "") == thoughts
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    streamed = joined(ask(by_interval[interval].client, stream=True, **body))
    assert streamed["calls"] == expected_calls and streamed["content"].strip() == content.strip()
    assert streamed["reasoning_content"] == thoughts and streamed["finish_reason"] == choice["finish_reason"]


TAGGED = """<tool_call>
<function=train>
<parameter=city>
Oslo
</parameter>
<parameter=day>
3
</parameter>
</function>
</tool_call>"""
BARE = CALL.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
FORMS = {"own": BARE, "Qwen-Qwen3-0.6B": CALL, "Qwen3-Coder": TAGGED}
FORMS["meta-llama-Llama-3.1-8B-Instruct"] = BARE.replace("arguments", "parameters")
CUTS = [  # kind, text, stop string, whether it stands in a call
    *((kind, text, "lo", True) for kind, text in FORMS.items()),
    *((kind, f"I look.\n{text}", "day", True) for kind, text in FORMS.items() if kind[:4] == "Qwen"),
    *((KINDS[1], CALL, stop, True) for stop in ("name", "train", ": {", "3}", "}}")),
    *((KINDS[1], CALL, stop, False) for stop in ("</tool_call>", "\n</")),
    ("own", f"{BARE}\n", "\n", False),
    (KINDS[1], "Hello there, Oslo.", "Oslo", False),
    (KINDS[1], "<think>\nHm, so.\n</think>\n\nHello.", "so", False),
    (KINDS[1], "<think>\nHm, so.\n</think>\n\nHello.", "Hello", False),
]
QUICK_CUTS = [*CUTS[:2], CUTS[7], CUTS[10], CUTS[11], *CUTS[13:]]


@pytest.mark.parametrize("kind, written, stop, within", each(CUTS, QUICK_CUTS))
def test_a_stop_string_within_a_call(servers, kind, written, stop, within):
    """It is like a limit there: half a call is no call. Elsewhere it ends an answer."""
    body = {"tools": TOOLS, "grammar": f"root ::= {json.dumps(written)}", "max_tokens": WHOLE, "stop": stop}
    choice = choice_of(ask(servers[kind].client, **body))
    streamed = joined(ask(servers[kind].client, stream=True, **body))
    calls = choice["message"].get("tool_calls", [])
    if within:
        assert not calls and choice["finish_reason"] == streamed["finish_reason"] == "length"
    else:
        assert choice["finish_reason"] == streamed["finish_reason"] == ("tool_calls" if calls else "stop")
        assert [[c["function"]["name"], c["function"]["arguments"]] for c in calls] == streamed["calls"]
        assert bool(calls) is ("train" in written)
    assert (choice["message"]["content"] or "").strip() == streamed["content"].strip()
    if stop == "}}":
        several = ask(servers[kind].client, n=2, **body).json()["choices"]
        assert [c["finish_reason"] for c in several] == ["length"] * 2


@pytest.mark.parametrize("kind", each([KINDS[1], KINDS[4]], [KINDS[1]]))
def test_what_no_parser_reads_is_content(servers, kind):
    written = '<tool_call>\n{"name": "nope"}x'
    body = {"tools": TOOLS, "grammar": f"root ::= {json.dumps(written)}", "max_tokens": WHOLE}
    choice = choice_of(ask(servers[kind].client, **body))
    assert choice["message"]["content"] == written and "tool_calls" not in choice["message"]
    streamed = joined(ask(servers[kind].client, stream=True, **body))
    assert streamed["content"] == written and streamed["finish_reason"] == choice["finish_reason"] == "stop"


def test_a_call_once_begun_follows_the_schema(server):
    """The lazy grammar waits for the words that begin a call, and lets any text pass before."""
    earlier = []
    for city, day in (("Rome", 4), ("Paris", 7), ("Berlin", 9), ("Madrid", 2)):
        arguments = json.dumps({"city": city, "day": day})
        call = {"id": "c", "type": "function", "function": {"name": "train", "arguments": arguments}}
        earlier += [
            {"role": "user", "content": f"train {city} {day}"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
    asked = [*earlier, {"role": "user", "content": "train Oslo 3"}]
    body = {"messages": asked, "tools": TOOLS, "max_tokens": WHOLE}
    choice = choice_of(ask(server.client, **body))
    assert choice["finish_reason"] == "tool_calls", choice
    for call in choice["message"]["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        assert set(arguments) == {"city", "day"} and arguments["day"] <= 31
    text = choice_of(ask(server.client, "Hello!", tools=TOOLS, tool_choice="none"))["message"]
    assert "tool_calls" not in text and text["content"]


def test_a_lazy_grammar(batcher):
    """It begins at the group of its pattern; what came before was free, and what follows is not."""
    prompt = "One, two, three, four, five, six. One, two, three, four,"
    grammar = LazyGrammar('root ::= " six" " and 77 more"', [r"five,( six)"])
    with batcher.request() as llm:
        free = llm.create_completion(prompt, max_tokens=6, temperature=0)["choices"][0]["text"]
        bound = llm.create_completion(prompt, max_tokens=20, temperature=0, grammar=grammar)["choices"][0]
    assert free.startswith(" five, six") and not free.startswith(" five, six and")
    assert bound["text"] == " five, six and 77 more" and bound["finish_reason"] == "stop"


WORDS = [("own", "arguments"), ("meta-llama-Llama-3.1-8B-Instruct", "parameters")]
ALONE = [  # the answer, whose "a" is the word for arguments, and its number of calls
    (f'{{"name": "train", "a": {ARGUMENTS}}}', 1),
    (f'{{"name": "Ada", "a": {ARGUMENTS}}}', 0),
    ('{"name": "Ada", "age": 3}', 0),
    ('{"name": "train"}', 0),
    ('{"name": "Ada"}', 0),
    ("Hello.", 0),
]
CASES = [(*word, *alone) for word in WORDS for alone in ALONE]
# of each template the call, and each of the others once
QUICK = [case for i, case in enumerate(CASES) if case[3] or (i + i // len(ALONE)) % 2]


@pytest.mark.parametrize("kind, word, text, n", each(CASES, QUICK))
def test_own_form_with_auto(servers, kind, word, text, n):
    """Without a sign of its own, a call alone in the answer is one, and other JSON is content."""
    text = text.replace('"a": {', f'"{word}": {{')
    body = {"tools": TOOLS, "grammar": f"root ::= {json.dumps(text)}", "max_tokens": WHOLE}
    message = choice_of(ask(servers[kind].client, **body))["message"]
    assert len(message.get("tool_calls", ())) == n
    streamed = joined(ask(servers[kind].client, stream=True, **body))
    assert len(streamed["calls"]) == n and streamed["content"] == (message["content"] or "")


# the demo model may never end the free texts of other forms
@pytest.mark.parametrize("kind", each(KINDS[:3], KINDS[:1]))
def test_many_tools(servers, kind):
    """128 are the most that a request may have."""
    many = [tool(f"tool_{i}") for i in range(128)]
    body = {"tools": many, "chat_template_kwargs": {"enable_thinking": False}, "parallel_tool_calls": False}
    named = {"type": "function", "function": {"name": "tool_77"}}
    r = ask(servers[kind].client, tool_choice=named, max_tokens=WHOLE, **body)
    if r.status_code == 400:  # 128 descriptions are longer than the context of the test
        assert r.json()["error"]["code"] == "context_length_exceeded", r.text
        few = {**body, "tools": many[70:80]}
        r = ask(servers[kind].client, tool_choice=named, max_tokens=WHOLE, **few)
    assert choice_of(r)["message"]["tool_calls"][0]["function"]["name"] == "tool_77"


def test_bounds_are_kept_or_refused(servers):
    """An integer's are kept. What no grammar enforces is named, unless the request does without."""
    form = lambda schema, **more: {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}
    }
    whole = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 9}},
        "required": ["n"],
    }
    odd = {**whole, "properties": {"n": {"type": "number", "multipleOf": 9}}}
    for kind in ("own", "Qwen-Qwen3-0.6B"):
        client = servers[kind].client
        off = {"chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 40}
        text = choice_of(ask(client, "Say 1000.", **off, **form(whole)))["message"]["content"]
        assert 3 <= json.loads(text)["n"] <= 9
        r = ask(client, **form(odd, strict=True))
        assert r.status_code == 400 and "multipleOf" in r.json()["error"]["message"]
        pattern = {"type": "string", "pattern": "^(?=a)b$"}
        r = ask(client, **form(pattern, strict=True))
        assert r.status_code == 400 and "pattern" in r.json()["error"]["message"]
        assert ask(client, **off, **form(odd, strict=False)).status_code == 200
        strict = [tool("f", {"type": "object", "properties": {"n": {"multipleOf": 3}}}, strict=True)]
        r = ask(client, tools=strict)
        assert r.status_code == 400 and "multipleOf" in r.json()["error"]["message"]


@pytest.mark.parametrize("kind, seed", crossed(KINDS[:2], range(3)))
def test_numbers_keep_their_bounds(servers, kind, seed):
    """Of a template with thoughts, and of one without. test_schemas.py has which bounds there are."""
    number = {"type": "number", "minimum": 0.25, "exclusiveMaximum": 0.5}
    schema = {"type": "object", "properties": {"score": number}, "required": ["score"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    body = {"response_format": form, "max_tokens": 60, "temperature": 1.5, "seed": seed}
    body["chat_template_kwargs"] = {"enable_thinking": False}
    choice = choice_of(ask(servers[kind].client, "Say 1000.", **body))
    assert choice["finish_reason"] == "stop", choice
    assert 0.25 <= json.loads(choice["message"]["content"])["score"] < 0.5


def test_a_schema_beside_tools(server):
    """The answer is a call or JSON of the schema, and nothing else."""
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    kwargs = {"enable_thinking": False}
    body = {"tools": TOOLS, "response_format": form, "max_tokens": WHOLE, "chat_template_kwargs": kwargs}
    message = choice_of(ask(server.client, "Say 1000.", **body))["message"]
    for call in message.get("tool_calls", ()):
        assert json.loads(call["function"]["arguments"])["day"] <= 31
    assert message.get("tool_calls") or json.loads(message["content"])["n"] <= 9


@pytest.mark.parametrize(
    "field, body",
    [
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}),
        ("tool_choice", {"tool_choice": "required"}),
        ("grammar", {"tools": TOOLS, "tool_choice": "required", "grammar": 'root ::= "x"'}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"enable_thinking": "yes"}}),
        ("tools", {"tools": [tool("f", {"type": "sting"})], "tool_choice": "required"}),
    ],
)
def test_what_is_refused(servers, field, body):
    for kind in ("own", "Qwen-Qwen3-0.6B"):
        r = ask(servers[kind].client, **body)
        assert r.status_code == 400 and r.json()["error"]["param"] == field, r.text
        until(lambda: idle(servers[kind]))


def test_variables_of_the_template(batcher, tmp_path):
    """From the command line, from a request, which comes first, and reasoning_effort by its own field."""
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages[0].content }}{{ tone }}{{ reasoning_effort }}{{ enable_thinking }}")
    given = settings(n_ctx=4096, chat_template_file=str(file), chat_template_kwargs='{"tone": "calm"}')
    with running(given, batcher) as s:
        tokens = lambda **body: ask(s.client, "Hi", max_tokens=1, **body).json()["usage"]["prompt_tokens"]
        count = lambda text: len(s.client.post("/tokenize", json={"content": text}).json()["tokens"])
        assert tokens() == count("HicalmTrue")
        assert tokens(chat_template_kwargs={"tone": "very loud"}) == count("Hivery loudTrue")
        assert tokens(reasoning_effort="high") == count("HicalmhighTrue")
        off = count("HicalmFalse")
        assert tokens(reasoning_effort="none") == off
        names = [{"enable_thinking": False}, {"thinking": {"type": "disabled"}}]
        names.append({"chat_template_kwargs": {"thinking": False}})
        asked = {"messages": [{"role": "user", "content": "Hi"}]}
        routes = [("/v1/responses/input_tokens", {"input": "Hi"}), ("/v1/messages/count_tokens", asked)]
        for same in names:
            assert tokens(**same) == off
            for path, body in routes:
                assert s.client.post(path, json={**body, **same}).json()["input_tokens"] == off, path
        assert tokens(thinking={"type": "enabled"}) == count("HicalmTrue")
        error = ask(s.client, "Hi", enable_thinking=True, thinking={"type": "disabled"}).json()["error"]
        assert error["param"] == "thinking" and "enable_thinking" in error["message"]


@pytest.mark.parametrize("kind", each(KINDS, KINDS[:2]))
def test_a_message_that_is_continued(servers, kind):
    """The prompt ends with the last message, and the answer has only what follows it, streamed too."""
    asked = {"role": "user", "content": "Count from one to nine in digits."}
    begun = {"role": "assistant", "content": "1, 2, 3, 4,"}
    body = {"max_tokens": 24, "chat_template_kwargs": {"enable_thinking": False}, "temperature": 0}
    client, on = servers[kind].client, {"continue_final_message": True}
    choice = choice_of(ask(client, messages=[asked, begun], **body, **on))
    text = choice["message"]["content"]
    assert text.startswith(" 5, 6") and "1, 2" not in text[:9]
    assert joined(ask(client, messages=[asked, begun], stream=True, **body, **on))["content"] == text
    refused = ask(client, messages=[begun, asked], **body, **on)
    assert refused.status_code == 400 and "assistant's" in refused.json()["error"]["message"]


def test_special_tokens_that_a_parser_needs(batcher):
    """They are written out; others are left out of the text as before."""
    name = "<file_sep>"
    token = batcher.base.tokenize(name.encode(), add_bos=False, special=True)
    assert len(token) == 1
    for shown, text in (([name], name * 2), ([], "")):
        with batcher.request() as llm:
            llm.show_tokens(shown)
            made = llm.create_completion("x", max_tokens=2, logit_bias={token[0]: 100.0}, temperature=0)
        assert made["choices"][0]["text"] == text
