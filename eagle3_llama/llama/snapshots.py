"""How many snapshots of a recurrent state a context keeps, so that drafts can be taken back (n_rs_seq).

A snapshot is written for each row of a decode. Where a state is small beside the weights that costs nothing;
where it is large, a checkpoint of the state before a draft is cheaper
(native/src/target/target_memory.hpp). In between it is measured (snapshot_costs.py).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping

from ..common.limits import MAX_DRAFT
from ..runtime.params import check_int
from .metadata import number
from .snapshot_costs import Ways

MOST = 16  # rows of a draft that are taken back so: longer ones are rare
MOST_BYTES = 64 << 20  # for all snapshots of a context
SHARE = 200  # unless it is measured, a snapshot is worth it in a model of at least so many times its bytes
CHEAP, DEAR = 1000, 70  # with so many times its bytes it costs nothing, with less it costs too much
MOST_EXTRA = 0.01  # share of a plain round: what drafts lose where they gain nothing is 2% in all
FLOAT = 4


def state_bytes(metadata: Mapping[str, str]) -> int:
    """Bytes of the recurrent state of one sequence, or somewhat more; 0 if the metadata tell of none.

    Source: llama_hparams::n_embd_r and n_embd_s. Each layer counts as recurrent.
    """
    layers = number(metadata, "block_count") or 0
    width, heads = number(metadata, "embedding_length") or 0, number(metadata, "attention.head_count") or 0
    convolution = max((number(metadata, "ssm.conv_kernel") or 1) - 1, 0)
    if cache := number(metadata, "shortconv.l_cache"):
        floats = width * (cache - 1)
    elif dim := number(metadata, "kda.head_dim"):
        floats = heads * dim * (dim + 3 * (convolution or 3))
    else:
        inner, state = number(metadata, "ssm.inner_size") or 0, number(metadata, "ssm.state_size") or 0
        groups = number(metadata, "ssm.group_count") or 0
        floats = state * inner + convolution * (inner + 2 * groups * state)
    return layers * floats * FLOAT


def checked(n_rs_seq: int | None) -> int | None:
    """The setting, if it is one. Raises EagleError BAD_ARGUMENT otherwise."""
    if n_rs_seq is not None:
        check_int("n_rs_seq", n_rs_seq, 0, MAX_DRAFT)
    return n_rs_seq


@dataclasses.dataclass(frozen=True)
class Chosen:
    """n_rs_seq of a context, and why. why: empty if it was not chosen here, or there is nothing to say."""

    n: int = 0
    why: str = ""


NOT_CHOSEN = Chosen()


def report(choice: Chosen, verbose: bool) -> None:
    """Says after a load, where llama.cpp says its part, how many snapshots were chosen, and why."""
    if verbose and choice.why:
        print(f"EagleLlama: n_rs_seq {choice.n}: {choice.why}", file=sys.stderr)


def choose(
    metadata: Mapping[str, str],
    weights: int,
    n_slots: int,
    n_ubatch: int,
    measured: Callable[[int], Ways | None],
) -> Chosen:
    """n_rs_seq for a model with so many bytes of weights; 0: checkpoints are cheaper, or there is no state.

    measured: returns what so many snapshots take, None if that cannot be told. llama.cpp keeps none for
    architectures that cannot write them.
    """
    state = state_bytes(metadata)
    if state == 0:
        return NOT_CHOSEN
    n = max(min(MOST, MOST_BYTES // (state * n_slots), n_ubatch - 2), 0)
    size = f"a state has {100 * state / weights:.2g}% of the weights' bytes"
    if n == 0 or state * DEAR > weights:
        return Chosen(0, f"checkpoints: {size}")
    if state * CHEAP <= weights:
        return Chosen(n, size)
    ways = measured(n)
    if ways is None:
        return Chosen(n if state * SHARE <= weights else 0, size)
    why = f"they add {100 * ways.extra:.1f}% to a decode of {1e3 * ways.plain:.2f} ms, a checkpoint takes"
    why += f" {1e3 * ways.checkpoint:.2f} ms"
    return Chosen(n if ways.extra * ways.plain <= min(MOST_EXTRA * ways.plain, ways.checkpoint) else 0, why)
