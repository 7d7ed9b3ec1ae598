"""What the server shows of prompts: the template's text, its tokens, their number. Paths without /v1."""

import pytest
from server_tools import CHAT, running, settings
from template_servers import OWN_AND_QWEN, chat_fixtures
from tiers import crossed

RIVERS = {"role": "user", "content": "Name three rivers."}
TOOL = {"type": "function", "function": {"name": "train", "parameters": {"type": "object", "properties": {}}}}
COUNT, TEMPLATE, COMPLETIONS = f"{CHAT}/input_tokens", "/apply-template", "/v1/completions"


batcher, servers = chat_fixtures(2048, OWN_AND_QWEN)


def post(server, path, **body):
    r = server.client.post(path, json=body)
    assert r.status_code == 200, r.text
    return r.json()


MORE = [
    {},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "none"},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [RIVERS, {"role": "assistant", "content": "1. The"}], "continue_final_message": True},
    {"messages": [{"role": "system", "content": "Be \u00e9 brief."}, RIVERS]},
]


@pytest.mark.parametrize(
    "kind, more",
    crossed(OWN_AND_QWEN, MORE),
    ids=lambda m: m if isinstance(m, str) else ",".join(m) or "plain",
)
def test_the_prompt_is_that_of_a_chat(servers, kind, more):
    """As many tokens are counted, and a completion of the prompt has the chat's text."""
    server, body = servers[kind], {"messages": [RIVERS], **more}
    prompt = post(server, TEMPLATE, **body)["prompt"]
    tokens = post(server, "/tokenize", content=prompt)["tokens"]
    sampling = {"temperature": 0, "max_tokens": 12, "logprobs": True}
    chat = post(server, CHAT, **body, **sampling)
    counted = post(server, COUNT, **body)
    assert counted == {"object": "response.input_tokens", "input_tokens": len(tokens)}
    assert chat["usage"]["prompt_tokens"] == len(tokens)
    text = post(server, COMPLETIONS, prompt=tokens, temperature=0, max_tokens=12, logprobs=1)
    first = text["choices"][0]["logprobs"]["token_logprobs"]
    assert first == [t["logprob"] for t in chat["choices"][0]["logprobs"]["content"]] and len(first) > 3


@pytest.mark.parametrize("kind", ["own", "qwen"])
def test_without_the_words_that_begin_an_answer(servers, kind):
    whole = post(servers[kind], TEMPLATE, messages=[RIVERS])["prompt"]
    assert whole.endswith("<|im_start|>assistant\n")
    short = post(servers[kind], f"/v1{TEMPLATE}", messages=[RIVERS], add_generation_prompt=False)["prompt"]
    assert short == whole.removesuffix("<|im_start|>assistant\n")
    assert post(servers[kind], TEMPLATE, messages=[RIVERS], add_generation_prompt=True)["prompt"] == whole


def test_responses_are_counted(servers):
    server = servers["qwen"]
    flat = {"type": "function", **TOOL["function"]}
    asked = {"input": "Name three rivers.", "instructions": "Be brief.", "tools": [flat]}
    chat = {"messages": [{"role": "system", "content": "Be brief."}, RIVERS], "tools": [TOOL]}
    assert post(server, "/v1/responses/input_tokens", **asked) == post(server, COUNT, **chat)
    first = post(server, "/v1/responses", **asked, max_output_tokens=4)
    more = {"previous_response_id": first["id"], "input": "And lakes?"}
    assert (
        post(server, "/v1/responses/input_tokens", **more)["input_tokens"]
        == (post(server, "/v1/responses", **more, max_output_tokens=1)["usage"]["input_tokens"])
    )
    r = server.client.post("/v1/responses/input_tokens", json={**more, "previous_response_id": "no"})
    assert r.status_code == 404 and r.json()["error"]["code"] == "response_not_found"
    r = server.client.post("/v1/responses/input_tokens", json={"input": ""})
    assert r.status_code == 400 and r.json()["error"]["param"] == "input"


def test_what_is_refused(servers, batcher):
    for path in (TEMPLATE, COUNT):
        r = servers["own"].client.post(path, json={"messages": [RIVERS], "tool_choice": "required"})
        assert r.status_code == 400 and r.json()["error"]["param"] == "tool_choice"
        long = {"role": "user", "content": "a river " * 9000}
        r = servers["own"].client.post(path, json={"messages": [long]})
        assert r.status_code == 400 and r.json()["error"]["code"] == "context_length_exceeded"
    with running(settings(n_ctx=2048, chat_format="chatml"), batcher) as s:
        for path in (TEMPLATE, COUNT):
            r = s.client.post(path, json={"messages": [RIVERS]})
            assert r.status_code == 400 and r.json()["error"]["code"] == "chat_format"


def test_tokens_with_their_texts(servers):
    """A part of a character is no text, and has bytes."""
    text = "River \u00e9\u00e8 \u5abd \U0001f917<|im_end|>"
    ids = post(servers["own"], "/tokenize", content=text)["tokens"]
    pieces = post(servers["own"], "/tokenize", content=text, with_pieces=True)["tokens"]
    assert [p["id"] for p in pieces] == ids
    raw = [p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces]
    assert b"".join(raw).decode() == text and any(isinstance(p["piece"], list) for p in pieces)


@pytest.mark.parametrize(
    "path, body",
    [
        ("/chat/completions", {"messages": [RIVERS], "max_tokens": 1}),
        ("/completions", {"model": "any", "prompt": "The", "max_tokens": 1}),
        ("/responses", {"input": "Hi.", "max_output_tokens": 1}),
        ("/messages", {"messages": [RIVERS], "max_tokens": 1}),
        ("/chat/completions/input_tokens", {"messages": [RIVERS]}),
        ("/models", None),
    ],
)
def test_paths_without_v1(servers, path, body):
    client = servers["own"].client
    call = lambda p: client.get(p) if body is None else client.post(p, json=body)
    assert call(path).status_code == 200 and call(path).json().keys() == call(f"/v1{path}").json().keys()
    document = client.get("/openapi.json").json()
    assert path not in document["paths"] and f"/v1{path}" in document["paths"]


PARTS = [
    ("image_url", "no mmproj file for images"),
    ("image", "no mmproj file for images"),
    ("input_image", "no mmproj file for images"),
    ("input_audio", "no mmproj file for audio"),
    ("video_url", "no mmproj file for video"),
    ("document", "text alone:"),
    ("file", "text alone:"),
    ("input_file", "text alone:"),
    ("smell", "no parts of type 'smell', only text"),
]


@pytest.mark.parametrize("path, kind, why", crossed([CHAT, TEMPLATE, "/v1/messages", "/v1/responses"], PARTS))
def test_parts_that_are_no_text(servers, path, kind, why):
    """They are refused in words that say what the server lacks, in the user's message and a tool's result."""
    if path == "/v1/responses":
        why = why.removesuffix("text")
    part = {"type": kind, kind: {"url": "data:,x"}, "source": {"type": "url", "url": "data:,x"}}
    text = {"type": "input_text" if path == "/v1/responses" else "text", "text": "What is it?"}
    turn = {"role": "user", "content": [text, part]}
    field = "input" if path == "/v1/responses" else "messages"
    r = servers["own"].client.post(path, json={field: [turn]})
    error = r.json()["error"]
    assert r.status_code == 400 and why in error["message"], error
    assert error["message"].startswith(f"{field}[0].content[1]: ") and error["message"].count("\n") == 0
