"""Fields of other servers: those that mean what one here means are taken, the others name what there is."""

import json

import pytest

from eagle3_llama.server.body.chat import ChatBody
from eagle3_llama.server.body.completions import CompletionBody
from eagle3_llama.server.body.fields import MAX_STOP, MAX_STOP_LENGTH, MAX_STOP_TOTAL
from eagle3_llama.server.body.other_servers import OtherServers
from eagle3_llama.server.errors import ApiError
from eagle3_llama.server.http.body_reader import parse
from eagle3_llama.server.llama_server.body import LlamaBody

MESSAGES = [{"role": "user", "content": "x"}]
BODIES = {"chat": (ChatBody, {"messages": MESSAGES}), "completion": (CompletionBody, {"prompt": "x"})}
BODIES["llama"] = (LlamaBody, {"prompt": "x"})
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}


def read(kind, **more):
    model, body = BODIES[kind]
    return parse(json.dumps({**body, **more}).encode(), model)


def error(kind, **more):
    with pytest.raises(ApiError) as e:
        read(kind, **more)
    assert e.value.status == 400
    return e.value


# what is sent, and what it comes to
BUDGET = {"type": "enabled", "budget_tokens": 7}
CHOICE = 'root ::= "yes" | "a \\U00000022b\\U00000022\\U0000000A"'
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
TAKEN = [
    ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
    ({"guided_choice": ["yes", 'a "b"\n']}, {"grammar": CHOICE}),
    ({"typ_p": 0.5}, {"typical_p": 0.5}),
    ({"repeat_last_n": 0, "repeat_penalty": 1.5}, {"repeat_penalty": 1.0, "presence_penalty": 0.0}),
    ({"repeat_last_n": 64, "repeat_penalty": 1.5}, {"repeat_penalty": 1.5}),
    ({"samplers": "kt", "top_k": 5, "top_p": 0.5, "min_p": 0.1}, {"top_k": 5, "top_p": 1.0, "min_p": 0.0}),
    ({"samplers": ["temperature"], "temperature": 0.5}, {"temperature": 0.5, "top_k": 0}),
    ({"stop": ["a", "", "b"]}, {"stop": ["a", "b"]}),
    ({"stop": ""}, {"stop": None}),
]  # fmt: skip
IN_CHATS = [
    ({"max_tokens": 9, "max_completion_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": 5}),
    ({"max_tokens": 5, "max_completion_tokens": 9}, {"max_tokens": 5, "max_completion_tokens": 5}),
    ({"enable_thinking": False}, OFF),
    ({"think": False}, OFF),
    ({"think": "low"}, {"reasoning_effort": "low", "chat_template_kwargs": None}),
    ({"thinking": {"type": "disabled"}}, OFF),
    ({"thinking": BUDGET}, {"thinking_budget_tokens": 7, "enable_thinking": True}),
    ({"think": False, "chat_template_kwargs": {"enable_thinking": False}}, OFF),
]  # fmt: skip


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("given, ours", TAKEN, ids=str)
def test_other_names(kind, given, ours):
    made = read(kind, **given).model_dump()
    assert {name: made[name] for name in ours} == ours


@pytest.mark.parametrize("given, ours", IN_CHATS, ids=str)
def test_other_names_of_chats(given, ours):
    made = read("chat", **given).model_dump()
    assert {name: made[name] for name in ours} == ours


def test_logprobs_that_are_true():
    assert read("completion", logprobs=True).logprobs == 1 and read("completion", logprobs=0).logprobs == 0
    assert read("completion", logprobs=False).logprobs is False


NOTHING = {
    **dict.fromkeys(("min_tokens", "min_new_tokens", "priority", "num_keep", "top_a"), 0),
    **dict.fromkeys(("stop_token_ids", "bad_words", "documents", "images", "allowed_token_ids"), []),
    **dict.fromkeys(("skip_special_tokens", "include_reasoning", "separate_reasoning"), True),
    **dict.fromkeys(("use_beam_search", "early_stopping", "include_stop_str_in_output", "raw"), False),
    "length_penalty": 1.0,
    "reasoning_format": "auto",
    "options": {},
    "guided_decoding_backend": "xgrammar",
    "samplers": "edskypmxt",
    "repeat_last_n": 64,
    **dict.fromkeys(("dry_multiplier", "xtc_probability", "dynatemp_range"), 0.0),
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "t_max_predict_ms": -1,
    "n_keep": 0,
    "keep_alive": "5m",
    "cache_prompt": True,
}


@pytest.mark.parametrize("kind", BODIES)
def test_values_that_change_nothing(kind):
    """Clients send all fields. null is such a value of each."""
    read(kind, **NOTHING)
    made = read(kind, **dict.fromkeys(OtherServers.model_fields))
    assert made == read(kind)


# a value, and the name of what there is here
REFUSED = {
    "guided_regex": ("[a-z]+", "grammar"),
    "regex": ("[a-z]+", "json_schema"),
    "guided_grammar": ("root: x", "grammar"),
    "structured_outputs": ({"json": SCHEMA}, "json_schema"),
    "min_tokens": (5, "ignore_eos"),
    "max_new_tokens": (5, "max_tokens"),
    "stop_token_ids": ([2], "stop"),
    "bad_words": (["x"], "logit_bias"),
    "include_stop_str_in_output": (True, "stop"),
    "use_beam_search": (True, "beam"),
    "prompt_logprobs": (1, "echo"),
    "reasoning": ({"effort": "none"}, "reasoning_effort"),
    "reasoning_format": ("none", "reasoning_content"),
    "chat_template": ("{{ x }}", "--chat-template-file"),
    "options": ({"num_ctx": 8192, "num_predict": 5}, "max_tokens"),
    "num_ctx": (8192, "--n-ctx"),
    "num_predict": (5, "max_tokens"),
    "format": ("json", "response_format"),
    "system": ("Be brief.", "role"),
    "functions": ([{"name": "f"}], "tools"),
    "function_call": ({"name": "f"}, "tool_choice"),
    "dry_multiplier": (0.8, "no DRY"),
    "xtc_probability": (0.5, "no XTC"),
    "repeat_last_n": (-1, "64"),
    "samplers": (["temperature", "top_k"], "order"),
    "guided_choice": (["x" * 70_000], "65536"),
}


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_are_refused(kind, name):
    value, word = REFUSED[name]
    e = error(kind, **{name: value, "repeat_penalty": 1.1})
    assert e.param == name and word in str(e) and str(e).startswith(f"{name}: "), str(e)


@pytest.mark.parametrize(
    "kind, given",
    [
        ("chat", {"guided_json": SCHEMA, "json_schema": {}}),
        ("chat", {"guided_choice": ["x"], "grammar": "root ::= [0-9]"}),
        ("chat", {"think": False, "enable_thinking": True}),
        ("chat", {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}),
        ("chat", {"thinking": {"type": "enabled", "budget_tokens": 5}, "thinking_budget_tokens": 6}),
        ("completion", {"typ_p": 0.5, "typical_p": 0.6}),
    ],
)
def test_two_names_that_differ(kind, given):
    e = error(kind, **given)
    assert e.param in given and "differ" in str(e) or "only one" in str(e)


def test_as_many_as_clients_send():
    """And what is too much says so. Each bound is ten times what clients send."""
    made = read(
        "chat", stop=[f"{i}" * 300 for i in range(10, 27)], logit_bias={str(i): 1 for i in range(10_250)}
    )
    assert len(made.stop) == 17 and len(made.logit_bias) == 10_250
    tool = {"type": "function", "function": {"name": "f"}}
    part = {"type": "text", "text": "x"}
    assert len(read("chat", tools=[tool] * 1290).tools) == 1290
    assert (
        len(read("chat", messages=[{"role": "user", "content": [part] * 2570}]).messages[0].content) == 2570
    )
    assert "together" in str(
        error("chat", stop=["x" * MAX_STOP_LENGTH] * (MAX_STOP_TOTAL // MAX_STOP_LENGTH + 1))
    )
    for stop in (["x"] * (MAX_STOP + 1), ["x" * (MAX_STOP_LENGTH + 1)]):
        assert error("chat", stop=stop).param.startswith("stop")
