"""What answers say at their edges: characters of several tokens, the context's end. On a tiny model."""

import pytest
from server_tools import CHAT, ask, events, running, settings
from tiny_models import PROMPT

COMPLETIONS = "/v1/completions"
N_CTX = 256
WORLD = {"grammar": 'root ::= "世"+', "logit_bias": {"2": -100}}  # a character is three tokens; no end


@pytest.fixture(scope="module")
def server(files):
    with running(settings(model=files[0], eagle=files[1], n_ctx=N_CTX, n_parallel=2, threads=1)) as s:
        yield s


def streamed(client, path, **body):
    """(text, finish reason) of a stream."""
    choices = [e["choices"][0] for e in events(ask(client, path=path, stream=True, **body)) if e is not None]
    texts = [c["text"] if path == COMPLETIONS else c["delta"].get("content", "") for c in choices]
    return "".join(texts), choices[-1]["finish_reason"]


@pytest.mark.parametrize("n_prompt", [239, 240, 241])  # the context ends behind each byte of a character
def test_an_answer_that_the_context_cuts(server, n_prompt):
    body = {"prompt": [*PROMPT, *[60] * (n_prompt - len(PROMPT))], "max_tokens": 1000, **WORLD}
    choice = ask(server.client, path=COMPLETIONS, **body).json()["choices"][0]
    expected = "世" * ((N_CTX - n_prompt + 1) // 3), "length"
    assert (choice["text"], choice["finish_reason"]) == expected
    assert streamed(server.client, COMPLETIONS, **body) == expected


@pytest.mark.parametrize("more", [0, 1, 2])
def test_a_chat_that_the_context_cuts(server, more):
    body = {"text": "a" * (150 + more), "max_tokens": None, **WORLD}
    whole = ask(server.client, **body).json()
    text, n = whole["choices"][0]["message"]["content"], whole["usage"]["prompt_tokens"]
    assert text == "世" * ((N_CTX - n + 1) // 3) and whole["choices"][0]["finish_reason"] == "length"
    assert streamed(server.client, CHAT, **body) == (text, "length")
