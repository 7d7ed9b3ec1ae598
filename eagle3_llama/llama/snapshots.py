"""How many snapshots of a recurrent state a context keeps, so that drafts can be taken back (n_rs_seq).

A snapshot is written for each row of a decode. Where a state is small beside the weights that costs nothing;
where it is large, a checkpoint of the state before a draft is cheaper (native/src/target_memory.hpp).
"""

from __future__ import annotations

from collections.abc import Mapping

from ..common.limits import MAX_DRAFT
from ..runtime.params import check_int
from .metadata import number

MOST = 16  # rows of a draft that are taken back so: longer ones are rare
MOST_BYTES = 64 << 20  # of all snapshots of a context
SHARE = 200  # a snapshot is worth it in a model of at least so many times its bytes
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


def choose(metadata: Mapping[str, str], weights: int, n_slots: int, n_ubatch: int) -> int:
    """n_rs_seq for a model with so many bytes of weights; 0: checkpoints are cheaper, or there is no state.

    llama.cpp keeps none for architectures that cannot write them.
    """
    state = state_bytes(metadata)
    if state == 0 or state * SHARE > weights:
        return 0
    return max(min(MOST, MOST_BYTES // (state * n_slots), n_ubatch - 2), 0)
