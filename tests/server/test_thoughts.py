"""Thoughts in chats: a budget that ends them, and calls within them, which are none."""

import functools

import pytest
import templates
from server_tools import ask, events, running, settings
from template_servers import demo_batcher, serving
from tiers import crossed, each

from eagle3_llama import EagleParams
from eagle3_llama.batching.samplers import LazyGrammar, Thoughts
from eagle3_llama.server.prompt.completion import complete

BEGUN = "Qwen-QwQ-32B"  # its prompt ends within thoughts
PLACE = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "", "parameters": PLACE}}
DRAFTS = [{"enabled": False}, {"n_max": 4}, {"tree": "12x3x4"}]


@pytest.fixture(scope="module")
def batcher():
    with demo_batcher(2048) as b:
        yield b


@pytest.fixture(scope="module")
def server(batcher):
    with serving(batcher, {"begun": BEGUN}) as made:
        yield made["begun"]


def message_of(server, **body):
    r = ask(server.client, **{"max_tokens": 40, "temperature": 0, **body})
    assert r.status_code == 200, r.text
    return r.json()["choices"][0]["message"]


def n_tokens(server, text):
    return len(server.client.post("/tokenize", json={"content": text}).json()["tokens"])


@pytest.fixture(scope="module")
def free(server):
    """free(seed): what asks for long thoughts, and its thoughts without a budget."""

    @functools.cache
    def asked(seed):
        sampling = {} if seed is None else {"temperature": 0.9, "seed": seed}
        body = {"max_tokens": 45, "ignore_eos": True, **sampling}
        return body, message_of(server, **body)["reasoning_content"]

    return asked


@pytest.mark.parametrize("seed, budget, drafts", crossed([None, 5], [3, 9, 30], DRAFTS))
def test_a_budget_ends_thoughts(server, free, seed, budget, drafts):
    """After its number of tokens, which are those without it; with any drafts, and in streams."""
    body, thoughts_without = free(seed)
    given = {**body, "thinking_budget_tokens": budget}
    expected = message_of(server, **given)
    thoughts = expected["reasoning_content"]
    assert thoughts_without.startswith(thoughts) and thoughts != thoughts_without
    assert expected["content"].strip()
    assert abs(n_tokens(server, thoughts) - budget) <= 1  # blanks before the tag are none of them
    assert message_of(server, speculative=drafts, **given) == expected
    sent = [e for e in events(ask(server.client, stream=True, **{"temperature": 0, **given})) if e]
    deltas = [e["choices"][0]["delta"] for e in sent]
    for field in ("reasoning_content", "content"):
        assert "".join(d.get(field) or "" for d in deltas).strip() == expected[field].strip()


@pytest.mark.parametrize("seed", each([None, 5], [None]))
def test_no_budget(server, free, seed):
    body, thoughts = free(seed)
    assert message_of(server, thinking_budget_tokens=-1, **body)["reasoning_content"] == thoughts


def test_neighbours_change_nothing(server):
    """The text is the same beside others, and with the slot's own prefix."""
    body = {"max_tokens": 50, "temperature": 0.8, "seed": 3, "thinking_budget_tokens": 12}
    alone = message_of(server, **body)
    r = ask(server.client, n=3, **body)
    assert r.json()["choices"][0]["message"] == alone


def test_no_thoughts_at_all(server):
    message = message_of(server, thinking_budget_tokens=0, ignore_eos=True)
    assert "reasoning_content" not in message and message["content"].strip()


@pytest.mark.parametrize("budget", [0, 6])
def test_what_is_enforced_follows_thoughts(server, budget):
    """A call that must come, and an answer by a schema."""
    given = {"thinking_budget_tokens": budget, "max_tokens": 120}
    called = message_of(server, tools=[TOOL], tool_choice="required", **given)
    assert called["tool_calls"][0]["function"]["name"] == "weather"
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": PLACE}}
    told = message_of(server, response_format=form, **given)
    assert told["content"].strip().startswith('{"city"') or '"city"' in told["content"]
    for message in (called, told):
        assert n_tokens(server, message.get("reasoning_content", "")) <= budget + 1


def test_where_a_budget_comes_from(server, batcher):
    """From the server's option, a request's field, or Anthropic's; a grammar of one's own has none."""
    expected = message_of(server, thinking_budget_tokens=7)["reasoning_content"]
    file = templates.file_of(BEGUN)
    with running(settings(n_ctx=2048, chat_template_file=file, reasoning_budget=7), batcher) as s:
        assert message_of(s)["reasoning_content"] == expected
        longer = message_of(s, thinking_budget_tokens=20)["reasoning_content"]
        assert longer.startswith(expected) and longer != expected
        assert message_of(s, grammar='root ::= "a </think> b"')["content"].strip() == "b"
    messages = [{"role": "user", "content": "Name three rivers."}]
    body = {"messages": messages, "max_tokens": 40, "temperature": 0}
    thinking = {"type": "enabled", "budget_tokens": 7}
    got = server.client.post("/v1/messages", json={**body, "thinking": thinking}).json()["content"]
    assert got[0]["type"] == "thinking" and got[0]["thinking"].strip() == expected.strip()
    r = ask(server.client, thinking_budget_tokens=7, grammar='root ::= "a"')
    assert r.status_code == 400 and r.json()["error"]["param"] == "thinking_budget_tokens"


def test_a_call_within_thoughts_is_none(server):
    """With `auto`, a lazy grammar waits until thoughts have ended. The model repeats what it began."""
    said = "one two <tool_call>\n" * 6
    messages = [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": "", "reasoning_content": said + "one two"},
    ]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 24, "tools": [TOOL]}
    message = message_of(server, **body)
    assert message["reasoning_content"].count("<tool_call>\none two") >= 2 and "tool_calls" not in message


@pytest.mark.parametrize("params", each([EagleParams(n_max=4), EagleParams(0), None], [EagleParams(n_max=4)]))
def test_a_lazy_grammar_waits(batcher, params):
    """Its pattern counts behind the end tag alone, with drafts and without."""
    prompt = "One, two, three, four, five, six. One, two, three, four, five, six. One, two, three,"
    bound = " four, five and 77 more"
    grammar = LazyGrammar('root ::= " five" " and 77 more"', [r"four,( five)"])
    with batcher.request(params=params) as llm:

        def text(**more):
            given = {"max_tokens": 20, "temperature": 0.0, "seed": 0, **more}
            return complete(llm, prompt, stream=False, **given)["choices"][0]["text"]

        free = text()
        assert free.startswith(" four, five, six") and text(grammar=grammar) == bound
        for end, expected in ((" four", bound), (" six", free), ("</t>", free)):
            assert text(grammar=grammar, thoughts=Thoughts("<t>", (end,), True)) == expected
        assert text(grammar=grammar, thoughts=Thoughts("<t>", ("</t>",))) == bound
