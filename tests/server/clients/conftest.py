"""Servers that the official clients are tried on: one model, with its own template and with Qwen3's."""

import contextlib

import pytest
import templates
from server_tools import running, settings

from eagle3_llama.batching import Batcher, BatchSettings

N_CTX = 4096


@pytest.fixture(scope="module")
def batcher():
    with contextlib.closing(Batcher(BatchSettings(**settings(n_ctx=N_CTX).batch()))) as b:
        yield b


@pytest.fixture(scope="module")
def servers(batcher):
    """own: the demo model's template, which knows no tools. qwen: one with tools, and with thoughts unless
    a request asks for none. still: the same without thoughts, for clients that cannot ask."""
    qwen, still = templates.file_of("Qwen-Qwen3-0.6B"), '{"enable_thinking": false}'
    given = {
        "own": {},
        "qwen": {"chat_template_file": qwen},
        "still": {"chat_template_file": qwen, "chat_template_kwargs": still},
    }
    with contextlib.ExitStack() as stack:
        own = {"n_ctx": N_CTX, "template_timeout": 20.0}
        yield {k: stack.enter_context(running(settings(**own, **more), batcher)) for k, more in given.items()}


@pytest.fixture(scope="module", params=["own", "still"])
def server(servers, request):
    return servers[request.param]
