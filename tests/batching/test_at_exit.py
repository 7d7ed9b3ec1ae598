"""Processes that end while something of ours is at work. Each ends in order, and says what it would say."""

import sys

import pytest
from commands import run
from tiers import each

BEGIN = """
import itertools, os, random, signal, sys, threading, time
from eagle3_llama import EagleLlama
from eagle3_llama.batching import Batcher, BatchSettings
PROMPT = [1, *range(20, 90)]
long = lambda: [1, *random.choices(range(20, 300), k=900)]  # it takes a while
def open_batcher():
    return Batcher(BatchSettings(sys.argv[1], n_parallel=2, n_ctx=1024, n_threads=1))
def read_on(llm):
    try:
        while True:
            for _ in itertools.islice(llm.generate(long(), temp=0.0), 20): pass
    except Exception as e:  # of a request or a model that is closed
        assert any(word in str(e) for word in ("shutting down", "closed", "close()")), e
def begun(work, *args):  # in a daemon thread
    threading.Thread(target=work, args=args, daemon=True).start()
    time.sleep(0.3)
"""
WAYS = {
    "half a stream": (
        "b = open_batcher(); s = b.request().generate(PROMPT, temp=0.0)\nfor _ in range(40): next(s)",
        0,
    ),
    "a daemon thread": ("b = open_batcher(); begun(read_on, b.request())", 0),
    "SystemExit": ("b = open_batcher(); begun(read_on, b.request()); sys.exit(3)", 3),
    "an error": ("b = open_batcher(); begun(read_on, b.request()); 1 / 0", 1),
    "nobody holds it": ("begun(read_on, open_batcher().request())", 0),
    "two of them": (
        "a, b = open_batcher(), open_batcher(); begun(read_on, a.request())\n"
        "next(b.request().generate(PROMPT))",
        0,
    ),
    "closed before": ("b = open_batcher(); next(b.request().generate(PROMPT)); b.close()", 0),
    "an EagleLlama": (
        "llm = EagleLlama(sys.argv[1], n_ctx=1024, n_threads=1, verbose=False); begun(read_on, llm)",
        0,
    ),
    "an interrupt": (
        "b = open_batcher(); begun(read_on, b.request()); os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
        -2,
    ),
    "a fork": (
        "b = open_batcher(); begun(read_on, b.request())\n"
        "if (child := os.fork()) == 0: sys.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0",
        0,
    ),
}


@pytest.mark.parametrize("code, status", each(WAYS.values(), [WAYS["half a stream"], WAYS["a fork"]], WAYS))
def test_a_process_ends(endless, code, status):
    """Soon, and without a signal that it did not get: its threads compute until the models are freed."""
    done = run([sys.executable, "-c", BEGIN + code, endless[0]], None, seconds=60)
    assert done.returncode == status, done.stderr
    expected = {1: "ZeroDivisionError", -2: "KeyboardInterrupt"}.get(status, "")
    assert expected in done.stderr and bool(expected) == bool(done.stderr.strip()), done.stderr
