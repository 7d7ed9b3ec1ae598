"""Counts what three ways of taking drafts back take on a hybrid, from what their parts take on this machine.

    compare.py HYBRID.gguf --modes checkpoint,snapshots,again [--p 0.7] [--most 4] [-t 2]

A chain of n tokens, each accepted with chance p if those before it were, brings (1 - p^(n+1)) / (1 - p)
tokens. Its round takes a decode of n + 1 rows and, beside the head's passes, which are the same for all:

- checkpoint: a copy of the state; after a rejection another one, and the kept rows again in the next decode;
- snapshots: a decode that writes the state before each row (n_rs_seq);
- again: after a rejection the kept rows once more through the operation that updates the state, over the
  state before the batch, from kept keys, values and gates. This way is not built. Here neither the state
  before the batch nor what is kept costs a copy, nor the further graph anything: it is the most that this
  way could gain.

Decodes are timed in turns, and the least of each counts. --passes: milliseconds of the round's other parts,
such as the head's passes.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import time
from typing import Any

from tables import table

from eagle3_llama.llama import snapshot_costs
from eagle3_llama.llama.flash import FlashLlama
from eagle3_llama.runtime import library
from eagle3_llama.runtime.binding import llama_cpp

WAYS = {"checkpoint", "snapshots", "again"}
TURNS = 12
RECURRENT = (b"GATED_DELTA_NET", b"SSM_SCAN", b"RWKV_WKV6", b"RWKV_WKV7")


def run(given: argparse.Namespace, path: str) -> None:
    """The parts, and the table of the chains."""
    p = 0.7 if given.p is None else given.p
    threads = {"n_threads": given.t, "n_threads_batch": given.t}
    llm = FlashLlama(path, n_ctx=512, flash_attn=None, verbose=False, **threads)
    plain, snapshots, checkpoint, recurrence, state = parts(llm, given.most)
    ms = lambda values: ", ".join(f"{1e3 * s:.2f}" for s in values)
    print(f"state: {state / 1e6:.2f} MB; a checkpoint and its restore: {1e3 * checkpoint:.2f} ms")
    print(f"decode of 1 to {given.most + 1} rows, ms: {ms(plain[1:])}; with snapshots: {ms(snapshots[1:])}")
    print(f"of that what updates the state: {ms(recurrence[1:])}\n")
    titles = "chain|tokens|checkpoint, ms|snapshots, ms|again, ms|again over the better of both".split("|")
    lines = []
    for n in range(1, given.most + 1):
        tokens, kept, rejected = chain(n, p)
        row = (plain[n + 1] - plain[1]) / n
        by_copy = plain[n + 1] + checkpoint / 2 + rejected * checkpoint / 2 + kept * row
        first, further = recurrence[1], (recurrence[-1] - recurrence[1]) / given.most
        again = plain[n + 1] + rejected * first + max(kept - rejected, 0.0) * further
        by_copy, by_snapshots, again = (s + given.passes / 1e3 for s in (by_copy, snapshots[n + 1], again))
        best = min(by_copy, by_snapshots)
        took = [f"{1e3 * s:.2f}" for s in (by_copy, by_snapshots, again)]
        lines.append([str(n), f"{tokens:.2f}", *took, f"{best / again:.3f}"])
    print(table(titles, lines))


def chain(n: int, p: float) -> tuple[float, float, float]:
    """Tokens of a round, the rows kept of drafts that are rejected in part, and how often that is."""
    kept = sum(p**k * (1 - p) * (k + 1) for k in range(n))
    return sum(p**k for k in range(n + 1)), kept, 1 - p**n


def parts(llm: Any, most: int) -> tuple[list[float], list[float], float, list[float], int]:
    """Seconds of decodes by rows, without and with snapshots, of a checkpoint, of updating the state by rows.

    And the bytes of the state.
    """
    model, params = llm._model.model, llm.context_params
    ways = snapshot_costs.measure(model, params, most)
    assert ways is not None, "llama.cpp keeps no snapshots for this model"
    with snapshot_costs._context(model, params, 0) as a, snapshot_costs._context(model, params, most) as b:
        least = {(k, n): math.inf for k in range(2) for n in range(1, most + 2)}
        for turn in range(TURNS):
            for n in range(1, most + 2):
                for k, ctx in enumerate((a, b)):
                    took = decode(ctx, n, turn * (most + 1) + n)
                    least[k, n] = min(least[k, n], took) if turn else least[k, n]
        state = llama_cpp.llama_state_seq_get_size_ext(a, 0, llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
    by_rows = [[0.0, *(least[k, n] for n in range(1, most + 2))] for k in range(2)]
    return by_rows[0], by_rows[1], ways.checkpoint, recurrent_seconds(model, params, most), state


def decode(ctx: Any, n: int, first: int) -> float:
    """Seconds of a decode of n rows of an empty sequence."""
    memory = llama_cpp.llama_get_memory(ctx)
    llama_cpp.llama_memory_clear(memory, False)
    batch = llama_cpp.llama_batch_init(n, 0, 1)
    batch.n_tokens = n
    for i in range(n):
        batch.token[i], batch.pos[i] = 100 + 37 * (first + i), i
        batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
    start = time.perf_counter()
    assert llama_cpp.llama_decode(ctx, batch) == 0
    llama_cpp.llama_synchronize(ctx)
    took = time.perf_counter() - start
    llama_cpp.llama_batch_free(batch)
    return took


def recurrent_seconds(model: Any, params: Any, most: int) -> list[float]:
    """By rows, the least seconds of all operations that update the state, each computed by itself."""
    folder = library.find_lib_dir()
    assert folder is not None
    base = ctypes.CDLL(str(next(folder.glob("*ggml-base*"))))
    base.ggml_op_desc.restype, base.ggml_op_desc.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    seconds, began = 0.0, 0.0

    def watch(tensor: int, ask: bool, _: int) -> bool:
        nonlocal seconds, began
        if not ask and base.ggml_op_desc(tensor) in RECURRENT:
            seconds += time.perf_counter() - began
        began = time.perf_counter()
        return True

    callback = llama_cpp.ggml_backend_sched_eval_callback(watch)
    watched = type(params).from_buffer_copy(params)
    watched.cb_eval = callback
    least = [0.0, *[math.inf] * (most + 1)]
    with snapshot_costs._context(model, watched, 0) as ctx:
        for turn in range(TURNS):
            for n in range(1, most + 2):
                seconds = 0.0
                decode(ctx, n, turn)
                least[n] = min(least[n], seconds) if turn else least[n]
    return least
