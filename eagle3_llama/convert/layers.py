"""Which target layers a head reads: the most expensive trap (a wrong shift still runs, at a fifth of the acceptance).

Ids here are llama.cpp's layer_inp, which are Hugging Face's hidden_states[k]: k is the input of layer k.
"""

from __future__ import annotations

from typing import Any, Sequence

from ..errors import EagleError, ErrorKind

KEY = "eagle_aux_hidden_state_layer_ids"


def resolve_layers(config: dict[str, Any], n: int, n_layer: int, override: Sequence[int] | None) -> tuple[list[int], str]:
    """(ids, reason) of the n layers captured from a target of n_layer."""
    if override is not None:
        ids, why = list(override), "given by --extract-layers"
    else:
        listed = _listed(config)
        if listed is None:
            if n != 3:
                raise EagleError(ErrorKind.BAD_CONFIG, f"config.json: {KEY} is missing, and fc.weight takes {n} layers: "
                                 "name them with --extract-layers")
            ids, why = [2, n_layer // 2, n_layer - 3], "config lists none, EAGLE's own choice for this depth"
        elif listed[-1:] == [n_layer]:
            ids, why = listed, f"config lists {listed}, which ends after the last layer, so they are inputs already"
        elif listed == [2, n_layer // 2, n_layer - 3]:
            ids, why = listed, f"config lists {listed}, EAGLE's own inputs for this depth"
        else:
            ids, why = [i + 1 for i in listed], f"config lists outputs {listed}, shifted by one"
    if len(ids) != n:
        raise EagleError(ErrorKind.BAD_CONFIG, f"{KEY}: {len(ids)} layers {ids}, but fc.weight takes {n}")
    if any(not 0 <= i <= n_layer for i in ids) or any(a >= b for a, b in zip(ids, ids[1:])):
        raise EagleError(ErrorKind.BAD_CONFIG, f"{KEY}: layers {ids} are not ascending ids 0..{n_layer} of this target: {why}")
    return ids, f"layers {ids}: {why}"


def _listed(config: dict[str, Any]) -> list[int] | None:
    inner = config.get("eagle_config")
    ids = inner.get(KEY) if isinstance(inner, dict) else None
    ids = config.get(KEY) if ids is None else ids
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise EagleError(ErrorKind.BAD_CONFIG, f"config.json: {KEY} is {ids!r}, expected a list of integers")
    return ids
