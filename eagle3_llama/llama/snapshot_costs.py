"""Measures what snapshots of a recurrent state take, in small contexts of their own, and keeps it in a file.

How many snapshots a context keeps is settled when it is made: so they are measured before that, once.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..common.files import make_folder, replacing
from ..errors import EagleError
from ..runtime.binding import llama_cpp
from ..runtime.cost_files import CALM, costs_dir
from ..runtime.costs import switches

BUDGET = 0.6  # seconds of decodes, unless LEAST of each kind take longer
LEAST, MOST = 2, 16  # decodes of each kind that count
SETTLING = 2  # decodes of each kind before these
COPIES = 3  # times that a checkpoint is copied; the fastest counts
N_CTX = 256
N_BATCH = 64


@dataclasses.dataclass(frozen=True)
class Ways:
    """Seconds of a decode of one row, without and with snapshots, and of a checkpoint with its restore."""

    plain: float
    snapshots: float
    checkpoint: float

    @property
    def extra(self) -> float:
        """Of a decode of one row, what snapshots add."""
        return max(self.snapshots / self.plain - 1.0, 0.0)


def kept(model: Any, params: Any, n: int, key: Sequence[object]) -> Ways | None:
    """The costs of n snapshots, from the file of an earlier load with this key, or measured now.

    model: a llama_model. params: llama_context_params; its threads and its cache count. None if llama.cpp
    keeps no snapshots for the model, or has no memory for another context; or if other programs disturbed the
    measurement, which then is not kept: a percent is easily lost.
    """
    digest = hashlib.sha256(json.dumps([str(k) for k in ("snapshots", n, *key)]).encode()).hexdigest()
    found: Ways | None
    with contextlib.suppress(EagleError, OSError, ValueError, TypeError, RecursionError):
        path = costs_dir() / f"{digest[:24]}.json"
        found = Ways(**json.loads(path.read_text(encoding="utf-8")))
        if all(isinstance(s, float) and 0 < s < math.inf for s in dataclasses.astuple(found)):
            return found
    before, start = switches(), time.perf_counter()
    found = measure(model, params, n)
    if switches() - before > CALM * (time.perf_counter() - start):
        return None
    if found is not None:
        with contextlib.suppress(EagleError):  # the next load measures again
            _write(costs_dir() / f"{digest[:24]}.json", found)
    return found


def _write(path: Path, ways: Ways) -> None:
    make_folder(path.parent)
    with replacing(path) as part:
        part.write_text(json.dumps(dataclasses.asdict(ways)) + "\n", encoding="utf-8")


def measure(model: Any, params: Any, n: int) -> Ways | None:
    """Decodes rows in turns with n snapshots and with none. See kept()."""
    with _context(model, params, n) as with_them, _context(model, params, 0) as without:
        if not with_them or not without or llama_cpp.llama_n_rs_seq(with_them) < n:
            return None
        batch = llama_cpp.llama_batch_init(1, 0, 1)
        try:
            seconds = _in_turns((without, with_them), batch, llama_cpp.llama_model_get_vocab(model))
            return Ways(seconds[0], seconds[1], _checkpoint(without)) if seconds else None
        finally:
            llama_cpp.llama_batch_free(batch)


@contextlib.contextmanager
def _context(model: Any, params: Any, n: int) -> Iterator[Any]:
    """A context of one sequence with n snapshots; null if there is no memory for it."""
    small = type(params).from_buffer_copy(params)
    small.n_ctx, small.n_batch, small.n_ubatch = N_CTX, N_BATCH, N_BATCH
    small.n_seq_max, small.n_rs_seq = 1, n
    ctx = llama_cpp.llama_init_from_model(model, small)
    try:
        yield ctx
    finally:
        if ctx:
            llama_cpp.llama_free(ctx)


def _in_turns(contexts: Sequence[Any], batch: Any, vocab: Any) -> list[float] | None:
    """The least seconds of a decode in each context: a disturbance only makes one longer."""
    least = [math.inf] * len(contexts)
    n_vocab = llama_cpp.llama_vocab_n_tokens(vocab)
    end = time.perf_counter() + BUDGET
    for i in range(SETTLING + MOST):
        if i >= SETTLING + LEAST and time.perf_counter() > end:
            break
        for k, ctx in enumerate(contexts):
            batch.n_tokens = 1
            batch.token[0] = (100 + 37 * i) % n_vocab
            batch.pos[0], batch.n_seq_id[0], batch.seq_id[0][0], batch.logits[0] = i, 1, 0, 1
            start = time.perf_counter()
            if llama_cpp.llama_decode(ctx, batch) != 0:
                return None
            llama_cpp.llama_synchronize(ctx)
            if i >= SETTLING:
                least[k] = min(least[k], time.perf_counter() - start)
    return least


def _checkpoint(ctx: Any) -> float:
    """The least seconds in which the state is copied out of the context and back."""
    flags = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
    n = llama_cpp.llama_state_seq_get_size_ext(ctx, 0, flags)
    data = (ctypes.c_uint8 * n)()
    least = math.inf
    for _ in range(COPIES):
        start = time.perf_counter()
        llama_cpp.llama_state_seq_get_data_ext(ctx, data, n, 0, flags)
        llama_cpp.llama_state_seq_set_data_ext(ctx, data, n, 0, flags)
        least = min(least, time.perf_counter() - start)
    return least
