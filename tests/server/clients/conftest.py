"""Servers that the official clients are tried on: one model, with its own template and with Qwen3's."""

import pytest
from template_servers import OWN_AND_QWEN, demo_batcher, serving


@pytest.fixture(scope="module")
def batcher():
    with demo_batcher(4096) as b:
        yield b


@pytest.fixture(scope="module")
def servers(batcher):
    """own: the demo model's template, which knows no tools. qwen: one with tools, and with thoughts unless
    a request asks for none. still: the same without thoughts, for clients that cannot ask."""
    kwargs = '{"enable_thinking": false}'
    still = {"still": OWN_AND_QWEN["qwen"]}
    with (
        serving(batcher, OWN_AND_QWEN) as made,
        serving(batcher, still, chat_template_kwargs=kwargs) as without,
    ):
        yield {**made, **without}


@pytest.fixture(scope="module", params=["own", "still"])
def server(servers, request):
    return servers[request.param]
