"""Infers which target layers a head reads, explains the choice, and checks it.

Id k means the input of layer k, llama.cpp's layer_inp k. Id n_layer means the output of the last layer. Some
configs list these ids, others the layers whose *outputs* are read, which are one less. A head with the wrong
shift still runs, at a fifth of its acceptance rate.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import EagleError, ErrorKind
from .config import Config
from .layouts.base import Ids, Layout

_OVERRIDE = "set --extract-layers"


def infer_layers(
    config: Config, layout: Layout, n_features: int, n_layer: int, override: Sequence[int] | None
) -> tuple[list[int], str]:
    """(ids, an explanation). n_features: number of layers that fc.weight takes. n_layer: the target's layers.

    Raises EagleError BAD_CONFIG, or BAD_ARGUMENT for the override, unless there are n_features ascending ids
    in 0..n_layer.
    """
    if override is not None:
        ids, why, key, kind = list(override), "given", "--extract-layers", ErrorKind.BAD_ARGUMENT
    else:
        ids, why, key = _from_config(config, layout, n_features, n_layer)
        kind = ErrorKind.BAD_CONFIG
    _check(ids, key, n_features, n_layer, kind)
    return ids, f"layers {ids}: {why}"


def _from_config(config: Config, layout: Layout, n_features: int, n_layer: int) -> tuple[list[int], str, str]:
    if layout.arch == "eagle" and not layout.interleaved:
        return (
            [n_layer],
            "EAGLE-1 reads the output of the last layer after the target's final norm",
            "EAGLE-1's rule n",
        )
    own = [2, n_layer // 2, n_layer - 3]
    for key, meaning in layout.layer_ids:
        listed = config.integers(key)
        if listed is not None:
            ids, why = _resolve(listed, meaning, own, n_layer)
            return ids, why, f"key {key} of config.json"
    if n_features != 3:
        raise EagleError(
            ErrorKind.BAD_CONFIG,
            f"fc.weight takes the features of {n_features} layers, but config.json lists none: {_OVERRIDE}",
        )
    rule = "EAGLE's rule 2, n/2, n-3"
    return own, f"config lists none, so {rule} for {n_layer} layers applies", rule


def _resolve(listed: list[int], meaning: Ids, own: list[int], n_layer: int) -> tuple[list[int], str]:
    if n_layer in listed:
        return listed, f"config lists inputs {listed}, used unchanged ({n_layer} is after the last layer)"
    if listed == own:
        return listed, f"config lists {listed}, as EAGLE's own rule for {n_layer} layers, used unchanged"
    if meaning is Ids.OUTPUTS or listed[0] == 1:
        return [i + 1 for i in listed], f"config lists outputs {listed}, shifted by one"
    return listed, f"config lists inputs {listed}, used unchanged"


def _check(ids: list[int], key: str, n_features: int, n_layer: int, kind: ErrorKind) -> None:
    mend = "correct it" if kind is ErrorKind.BAD_ARGUMENT else _OVERRIDE
    if len(ids) != n_features:
        raise EagleError(
            kind, f"fc.weight takes the features of {n_features} layers, but {key} gives {ids}: {mend}"
        )
    if any(type(i) is not int or not 0 <= i <= n_layer for i in ids):
        raise EagleError(
            kind,
            f"{key} gives layers {ids}, the target has 0..{n_layer}: give this head's own target, or {mend}",
        )
    if any(a >= b for a, b in zip(ids, ids[1:])):
        raise EagleError(kind, f"{key} gives layers {ids}, which are not ascending: {mend}")
