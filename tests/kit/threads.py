"""Calls in threads of their own: one that waits for ever fails the test."""

import contextlib
import threading
import time


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


def ended(*threads, seconds=60):
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), "it waits for ever"


def outcome(work, *args):
    """What work(*args) returns or raises."""
    thread, got = started(work, *args)
    ended(thread)
    return got[0]


def in_threads(n_threads, work, jobs):
    """work(job) for each job, on so many threads; results in order."""
    results, todo, lock = [None] * len(jobs), list(range(len(jobs))), threading.Lock()

    def run():
        while True:
            with lock:
                if not todo:
                    return
                i = todo.pop(0)
            try:
                results[i] = work(jobs[i])
            except Exception as e:
                results[i] = e

    ended(*[started(run)[0] for _ in range(n_threads)], seconds=240)
    return results


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextlib.contextmanager
def held(batcher):
    """The batcher's thread does nothing in this block, so that requests of it begin together."""
    inside, go_on = threading.Event(), threading.Event()
    thread, _ = started(batcher.inbox.run, lambda: (inside.set(), go_on.wait()))
    try:
        assert inside.wait(60), "the batcher is busy"
        yield
    finally:
        go_on.set()
    ended(thread)
