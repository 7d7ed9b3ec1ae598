"""Servers of one batcher with chat templates of several models: what tests of chats share."""

import collections.abc
import contextlib

import pytest
import templates
from server_tools import batcher_of, running, settings

OWN_AND_QWEN = {"own": "own", "qwen": "Qwen-Qwen3-0.6B"}  # knows no tools; knows tools and thoughts


def demo_batcher(n_ctx):
    """A batcher of the demo's model and head, with slots of n_ctx tokens; a context manager."""
    return contextlib.closing(batcher_of(settings(n_ctx=n_ctx)))


class Servers(collections.abc.Mapping):
    """Servers by kind. start(kind) is called when one is first asked for."""

    def __init__(self, kinds, start):
        self.kinds, self.start, self.made = kinds, start, {}

    def __getitem__(self, kind):
        if kind not in self.made:
            self.made[kind] = self.start(kind)
        return self.made[kind]

    def __iter__(self):
        return iter(self.kinds)

    def __len__(self):
        return len(self.kinds)


@contextlib.contextmanager
def serving(batcher, kinds, **more):
    """A server for each of kinds, which has templates' names (see templates.file_of), by the same keys.

    more: settings of all of them. A template of another model may take a while to open.
    """
    given = {"n_ctx": batcher.settings.n_ctx, "template_timeout": 20.0, **more}
    with contextlib.ExitStack() as stack:

        def start(kind):
            file = templates.file_of(kinds[kind])
            return stack.enter_context(running(settings(chat_template_file=file, **given), batcher))

        yield Servers(kinds, start)


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
