"""Which target layers a head reads: inferred, explained, checked.

An id k is llama.cpp's layer_inp k: the input of layer k, n_layer being after the last. Configs list either those
or the layers whose *outputs* are meant, one less; a wrong shift still runs, at a fifth of the acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import EagleError, ErrorKind
from .config import Config
from .layouts.base import Ids, Layout

_OVERRIDE = "give --extract-layers"


def infer_layers(
    config: Config, layout: Layout, n_features: int, n_layer: int, override: Sequence[int] | None
) -> tuple[list[int], str]:
    """(ids, how they were found). `n_features` is what fc.weight takes, `n_layer` the target's.

    Raises EagleError: BAD_CONFIG or BAD_ARGUMENT for ids out of 0..n_layer, not ascending, or not n_features many.
    """
    if override is not None:
        ids, why, key = list(override), "given", "--extract-layers"
    else:
        ids, why, key = _from_config(config, layout, n_features, n_layer)
    _check(
        ids,
        key,
        n_features,
        n_layer,
        ErrorKind.BAD_ARGUMENT if override is not None else ErrorKind.BAD_CONFIG,
    )
    return ids, f"layers {ids}: {why}"


def _from_config(config: Config, layout: Layout, n_features: int, n_layer: int) -> tuple[list[int], str, str]:
    if layout.arch == "eagle" and not layout.interleaved:
        return (
            [n_layer],
            "EAGLE-1 reads the state after the last layer, through the target's final norm",
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
            f"fc.weight takes the features of {n_features} layers and config.json lists none: {_OVERRIDE}",
        )
    return (
        own,
        f"config lists none, EAGLE's rule 2, n/2, n-3 for {n_layer} layers",
        "EAGLE's rule 2, n/2, n-3",
    )


def _resolve(listed: list[int], meaning: Ids, own: list[int], n_layer: int) -> tuple[list[int], str]:
    if n_layer in listed:
        return listed, f"config lists inputs {listed}, taken as they are ({n_layer} is after the last layer)"
    if listed == own:
        return listed, f"config lists {listed}, EAGLE's own rule for {n_layer} layers, taken as they are"
    if meaning is Ids.OUTPUTS or listed[0] == 1:
        return [i + 1 for i in listed], f"config lists outputs {listed}, shifted by one"
    return listed, f"config lists inputs {listed}, taken as they are"


def _check(ids: list[int], key: str, n_features: int, n_layer: int, kind: ErrorKind) -> None:
    mend = "correct it" if kind is ErrorKind.BAD_ARGUMENT else _OVERRIDE
    if len(ids) != n_features:
        raise EagleError(
            kind, f"fc.weight takes the features of {n_features} layers, but {key} gives {ids}: {mend}"
        )
    if any(type(i) is not int or not 0 <= i <= n_layer for i in ids):
        raise EagleError(
            kind,
            f"{key} gives layers {ids}, the target has 0..{n_layer}: is it this head's target? Else {mend}",
        )
    if any(a >= b for a, b in zip(ids, ids[1:])):
        raise EagleError(kind, f"{key} gives layers {ids}, which do not ascend: {mend}")
