"""Calls in threads of their own: one that waits for ever fails the test."""

import contextlib
import threading


def started(work, *args):
    """A thread that runs work(*args), and the list that its result or error will be in."""
    got = []

    def run():
        try:
            got.append(work(*args))
        except BaseException as e:
            got.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, got


def ended(thread):
    thread.join(60)
    assert not thread.is_alive(), "it waits for ever"


def outcome(work, *args):
    """What work(*args) returns or raises."""
    thread, got = started(work, *args)
    ended(thread)
    return got[0]


@contextlib.contextmanager
def held(batcher):
    """The batcher's thread does nothing in this block, so that requests of it begin together."""
    inside, go_on = threading.Event(), threading.Event()
    thread, _ = started(batcher._on_thread, lambda: (inside.set(), go_on.wait()))
    try:
        assert inside.wait(60), "the batcher is busy"
        yield
    finally:
        go_on.set()
    ended(thread)
