"""Servers of one batcher with chat templates of several models: what tests of chats share."""

import contextlib

import pytest
import templates
from server_tools import running, settings

from eagle3_llama.batching import Batcher, BatchSettings

OWN_AND_QWEN = {"own": "own", "qwen": "Qwen-Qwen3-0.6B"}  # knows no tools; knows tools and thoughts


def demo_batcher(n_ctx):
    """A batcher of the demo's model and head, with slots of n_ctx tokens; a context manager."""
    return contextlib.closing(Batcher(BatchSettings(**settings(n_ctx=n_ctx).batch())))


@contextlib.contextmanager
def serving(batcher, kinds, **more):
    """A server for each of kinds, which has templates' names (see templates.file_of), by the same keys.

    more: settings of all of them. A template of another model may take a while to open.
    """
    given = {"n_ctx": batcher.settings.n_ctx, "template_timeout": 20.0, **more}
    with contextlib.ExitStack() as stack:
        made = {}
        for kind, name in kinds.items():
            file = templates.file_of(name)
            made[kind] = stack.enter_context(running(settings(chat_template_file=file, **given), batcher))
        yield made


def chat_fixtures(n_ctx, kinds, **more):
    """The fixtures `batcher` and `servers` of a module: see demo_batcher() and serving()."""

    @pytest.fixture(scope="module")
    def batcher():
        with demo_batcher(n_ctx) as b:
            yield b

    @pytest.fixture(scope="module")
    def servers(batcher):
        with serving(batcher, kinds, **more) as made:
            yield made

    return batcher, servers
