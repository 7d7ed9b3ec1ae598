"""Infers which target layers a head reads, explains the choice, and checks it.

Id k means the input of layer k, llama.cpp's layer_inp k. Id n_layer means the output of the last layer. Some
configs list these ids, others the layers whose *outputs* are read, which are one less. A head with the wrong
shift still runs, at a fifth of its acceptance rate. Where a list may be either, only a trial can tell:
`Inferred` has the other reading, and the command lets the self-test decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import EagleError, ErrorKind
from .config import Config
from .layouts.base import Ids, Layout

_OVERRIDE = "set --extract-layers"
_UNSETTLED = ("target_layer_ids", "eagle_config.target_layer_ids")  # counted by inputs here, by outputs there


@dataclass(frozen=True)
class Inferred:
    """ids: the layers whose inputs are read. why: an explanation. other: what the list may mean as well."""

    ids: list[int]
    why: str
    other: list[int] | None = None


def infer_layers(
    config: Config, layout: Layout, n_features: int, n_layer: int, override: Sequence[int] | None
) -> Inferred:
    """The layers that a head reads. n_features: how many fc.weight takes. n_layer: the target's layers.

    Raises EagleError BAD_CONFIG, or BAD_ARGUMENT for the override, unless there are n_features ascending ids
    in 0..n_layer.
    """
    if override is not None:
        found, key, kind = Inferred(list(override), "given"), "--extract-layers", ErrorKind.BAD_ARGUMENT
    else:
        found, key = _from_config(config, layout, n_features, n_layer)
        kind = ErrorKind.BAD_CONFIG
    _check(found.ids, key, n_features, n_layer, kind)
    return Inferred(found.ids, f"layers {found.ids}: {found.why}", found.other)


def _from_config(config: Config, layout: Layout, n_features: int, n_layer: int) -> tuple[Inferred, str]:
    """(the layers, what gave them)."""
    if layout.arch == "eagle" and not layout.interleaved:
        why = "EAGLE-1 reads the output of the last layer after the target's final norm"
        return Inferred([n_layer], why), "EAGLE-1's rule n"
    own = [2, n_layer // 2, n_layer - 3]
    lists = {key: listed for key, _ in layout.layer_ids if (listed := config.integers(key)) is not None}
    for key, meaning in layout.layer_ids:
        if key in lists:
            found = _resolve(lists[key], meaning, own, n_layer, list(lists.values()))
            return found, f"key {key} of config.json"
    _refuse_unsettled(config)
    if n_features != 3:
        raise EagleError(
            ErrorKind.BAD_CONFIG,
            f"fc.weight takes the features of {n_features} layers, but config.json lists none: {_OVERRIDE}",
        )
    rule = "EAGLE's rule 2, n/2, n-3"
    return Inferred(own, f"config lists none, so {rule} for {n_layer} layers applies"), rule


def _resolve(
    listed: list[int], meaning: Ids, own: list[int], n_layer: int, lists: list[list[int]]
) -> Inferred:
    """What a list means. lists: those of all keys; two that differ by one are outputs and inputs.

    Source: SGLang, pull request 25454. Of lists in eagle_config, those that begin with 1 are outputs; others
    were trained as inputs by some projects and as outputs by others, and SGLang takes them for inputs.
    """
    shifted = [i + 1 for i in listed]
    if shifted in lists:
        return Inferred(shifted, f"config lists outputs {listed}, and inputs {shifted}")
    if n_layer in listed:
        why = f"config lists inputs {listed}, used unchanged ({n_layer} is after the last layer)"
        return Inferred(listed, why)
    if listed == own:
        why = f"config lists {listed}, as EAGLE's own rule for {n_layer} layers, used unchanged"
        return Inferred(listed, why)
    if listed[0] == 1:
        return Inferred(shifted, f"config lists outputs {listed}, shifted by one")
    if meaning is Ids.INPUTS or lists.count(listed) > 1:
        return Inferred(listed, f"config lists inputs {listed}, used unchanged")
    either = f"config lists {listed}, used unchanged as SGLang does; they may be outputs, inputs {shifted}"
    return Inferred(listed, either, shifted)


def _refuse_unsettled(config: Config) -> None:
    for key in _UNSETTLED:
        if (listed := config.integers(key)) is not None:
            inputs, outputs = (",".join(map(str, ids)) for ids in (listed, [i + 1 for i in listed]))
            raise EagleError(
                ErrorKind.BAD_CONFIG,
                f"config.json lists layers under {key}, which some projects count by inputs and some by"
                f" outputs: {_OVERRIDE} {inputs} if they are inputs, or {outputs} if they are outputs;"
                " --self-test shows which are right",
            )


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
