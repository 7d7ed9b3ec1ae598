"""Whatever a client sends is read in time that grows with its length, and not with its square.

What is measured is the processor's time for an input and for one that is eight times as long. It grows
eightfold where each byte is looked at once, and sixty-fourfold where each is compared with all others.
"""

import json
import time

import pytest
from server_tools import settings
from starlette.datastructures import Headers
from tiers import each

from eagle3_llama import EagleLlama
from eagle3_llama.server.anthropic import body as messages_body
from eagle3_llama.server.anthropic.body import CountBody, MessagesBody
from eagle3_llama.server.body.chat import ChatBody
from eagle3_llama.server.body.completions import CompletionBody
from eagle3_llama.server.embeddings.body import EmbeddingBody
from eagle3_llama.server.errors import ApiError
from eagle3_llama.server.grammar import patterns, schemas
from eagle3_llama.server.grammar.marks import Marks
from eagle3_llama.server.grammar.nulls import with_nulls
from eagle3_llama.server.http import body_reader
from eagle3_llama.server.http.keys import Guard
from eagle3_llama.server.llama_server.body import LlamaBody
from eagle3_llama.server.llama_server.routes import _names_model
from eagle3_llama.server.llama_server.slots_body import SlotFile
from eagle3_llama.server.prompt import tools_as_text
from eagle3_llama.server.prompt.completion import TextOfTokens
from eagle3_llama.server.responses import store, to_chat
from eagle3_llama.server.responses.body import ResponseBody, ResponseItem
from eagle3_llama.server.responses.items import InputText
from eagle3_llama.server.tokens.body import DetokenizeBody, TemplateBody, TokenizeBody

BODIES = [ChatBody, CompletionBody, LlamaBody, MessagesBody, CountBody, ResponseBody, TemplateBody]
BODIES += [TokenizeBody, DetokenizeBody, EmbeddingBody, SlotFile]
TIMES, MOST = 8, 24  # as long; as much work as is allowed for it
LEAST = 0.002  # seconds: shorter times are mostly the clock's and the caches'


def seconds(work):
    start = time.process_time()
    try:
        work()
    except (ApiError, patterns.Unsupported):
        pass
    return time.process_time() - start


def check_grows(make, n):
    """make(n): a call that reads an input of this length. What is measured may be disturbed: a few tries."""
    tries = []
    for _ in range(5):
        short, long = make(n), make(TIMES * n)
        tries.append((min(seconds(short) for _ in range(3)), seconds(long)))
        if tries[-1][1] <= MOST * max(tries[-1][0], LEAST):
            return
    raise AssertionError(f"seconds for an input, and for one {TIMES} times as long: {tries}")


def test_the_check_finds_squares():
    with pytest.raises(AssertionError, match="times as long"):
        check_grows(lambda n: lambda: [x for x in range(n) for y in range(n)], 300)
    check_grows(lambda n: lambda: [x for x in range(n)], 30_000)


# -- bodies -----------------------------------------------------------------------------------------------

# n -> what a body has, or is cut within
RAW = {
    "escaped quotes without an end": lambda n: b'{"x":"' + b'\\"' * (n // 2),
    "backslashes without an end": lambda n: b'{"x":"' + b"\\" * n,
    "quotes": lambda n: b'"' * n,
    "keys without values": lambda n: b'{"":' * (n // 4),
    "keys in a text": lambda n: b'{"x":"' + b'\\":' * (n // 3) + b'"}',
    "many keys": lambda n: b"{%b}" % b",".join(b'"%d":1' % i for i in range(n // 8)),
    "one key again and again": lambda n: b"{%b}" % b",".join([b'"a":1'] * (n // 6)),
    "a long name": lambda n: b'{"%b":1}' % (b"a" * n),
    "a name like a place": lambda n: b'{"%b":1}' % (b"a[0].b " * (n // 7)),
    "brackets": lambda n: b"[" * n,
    "blanks": lambda n: b'{"x"' + b" \n" * (n // 2) + b":1}",
    "digits": lambda n: b'{"seed":' + b"1" * n + b"}",
    "a long number": lambda n: b'{"temperature":0.' + b"1" * n + b"}",
}
# n -> the value of each field
VALUES = {
    "a text": lambda n: "a[0]: " * (n // 6),
    "escapes": lambda n: '\\"\n' * (n // 3),
    "texts": lambda n: ["x"] * (n // 4),
    "long texts": lambda n: ["x" * (n // 16)] * 16,
    "numbers": lambda n: [7] * (n // 2),
    "a dictionary": lambda n: {f"k{i}": i for i in range(n // 10)},
    "dictionaries": lambda n: [{"type": "x" * 10, "role": "user"}] * (n // 40),
    "messages": lambda n: [{"type": "message", "role": "user", "content": "x" * 40}] * (n // 90),
    "parts": lambda n: [{"role": "user", "content": [{"type": "text", "text": "x"}] * (n // 40)}],
}


def reading(model, raw):
    return lambda: body_reader.parse(raw, model)


@pytest.mark.parametrize("name", RAW)
def test_bodies(monkeypatch, name):
    monkeypatch.setattr(body_reader, "MAX_KEYS", 1 << 30)  # so that all are counted
    check_grows(lambda n: lambda: body_reader._has_many_keys(RAW[name](n)), 4_000)
    for model in (ChatBody, LlamaBody, ResponseBody):
        check_grows(lambda n: reading(model, RAW[name](n)), 20_000)
    check_grows(lambda n: lambda: _names_model(RAW[name](n) + b'"model"'), 20_000)


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
@pytest.mark.parametrize("name", VALUES)
def test_all_fields_at_once(model, name):
    raw = lambda n: json.dumps(dict.fromkeys(model.model_fields, VALUES[name](n))).encode()
    check_grows(lambda n: reading(model, raw(n // len(model.model_fields))), 20_000)


FIELDS = [(model, field) for model in BODIES for field in model.model_fields]


@pytest.mark.parametrize(
    "model, field", each(FIELDS, FIELDS[:3], [f"{model.__name__}-{field}" for model, field in FIELDS])
)
def test_each_field(model, field):
    for value in VALUES.values():
        check_grows(lambda n: reading(model, json.dumps({field: value(n)}).encode()), 20_000)


# -- what becomes of a body -------------------------------------------------------------------------------

ITEM = {"type": "message", "content": "x" * 2000}


def messages_of(role):
    """n items of one role, which become one message."""

    def make(n):
        items = [ResponseItem.model_validate({**ITEM, "role": role})] * n
        return lambda: to_chat.messages_of("x", items)

    return make


def turns_of(role):
    def make(n):
        turns = [{"role": "user", "content": "x"}, *[{"role": role, "content": "x" * 2000}] * n]
        made = [messages_body.Turn.model_validate(turn) for turn in turns]
        body = CountBody.model_construct(messages=made, system="x")
        return lambda: messages_body._Chat().of(body)

    return make


def told(n):
    """The events of a text of n characters, which comes in pieces."""

    def work():
        text = InputText()
        text.add('{"input": "')
        for _ in range(n // 4):
            text.add("abc\\n")
        text.add('"}')
        text.end()

    return work


def listed(n):
    items = [json.dumps(ITEM | {"role": "user"}).encode()] * n
    return lambda: store.page("resp_x", items, 20, "desc", f"msg_x_{n // 2}")


def generated(n):
    def work():
        text = TextOfTokens(["a" * 200 + "b", "xyz"])
        for _ in range(n):
            text.add(b"aaaa")
            text.stopped()
            list(text.take())

    return work


def deep(n):
    properties = {f"p{i}": {"type": "string", "pattern": "^[a-z]{1,9}$", "minLength": 1} for i in range(n)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return lambda: schemas.unenforced(schemas.enforceable(schema), Marks(schema))


MADE = {
    "instructions": (messages_of("system"), 400),
    "answers": (messages_of("assistant"), 400),
    "turns of the user": (turns_of("user"), 400),
    "turns of the assistant": (turns_of("assistant"), 400),
    "a conversation in words": (
        lambda n: lambda: tools_as_text.messages([{"role": "user", "content": "x" * 2000}] * n, []),
        400,
    ),
    "a call that was begun": (
        lambda n: lambda: tools_as_text.split({"content": '{"name": "' + '\\"' * n}, True, ["f"]),
        5000,
    ),
    "blanks before a call": (
        lambda n: lambda: tools_as_text.split({"content": " " * n + "x"}, True, ["f"]),
        20_000,
    ),
    "nulls": (lambda n: lambda: with_nulls('{"a": "' + '\\"' * n, ["a"]), 20_000),
    "a tool's text": (told, 2000),
    "a page of items": (listed, 2000),
    "a text with stop strings": (generated, 300),
    "a schema": (deep, 100),
    "alternatives": (lambda n: lambda: patterns.written("|".join(["ab"] * n)), 1000),
    "groups": (lambda n: lambda: patterns.written("(a)" * n), 1000),
    "a class": (lambda n: lambda: patterns.written(f"[{'a-c' * n}]"), 1000),
    "a count": (lambda n: lambda: patterns.written("a{" + "1" * n + "}"), 2000),
    "a name of a group": (lambda n: lambda: patterns.written("(?<" + "a" * n), 5000),
}


@pytest.mark.parametrize("name", MADE)
def test_what_becomes_of_a_body(name):
    check_grows(*MADE[name])


# -- headers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["authorization", "x-api-key", "origin", "host", "content-type", "x-other"])
@pytest.mark.parametrize("text", ["a", "Basic YTph", "http://[::1", "https://a.b/", "é", ",;= "])
def test_headers(name, text):
    guard = Guard(settings(api_key=("one", "two")))
    open_guard = Guard(settings(cors_origin=("https://a.example",)))

    def make(n):
        headers = Headers({name: text * (n // len(text))})

        def work():
            for one in (guard, open_guard):
                one.refusal("POST", "/v1/models", headers, one.key(headers) is not None)

        return work

    check_grows(make, 8_000)


@pytest.mark.parametrize("text", ["x5 ", "\u00e9", "\U0001f98a"], ids=["words", "two bytes", "four bytes"])
def test_texts_of_tokens_that_are_bytes(files, text):
    """What is no token of a SentencePiece vocabulary becomes one for each of its bytes."""
    with EagleLlama(files[0], n_ctx=256, verbose=False) as llm:
        check_grows(lambda n: lambda: llm.tokenize((text * n).encode()), 20_000)
