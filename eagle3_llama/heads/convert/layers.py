"""Infers which target layers a head reads, explains the choice, and checks it.

Id k means the input of layer k, llama.cpp's layer_inp k. Id n_layer means the output of the last layer. Some
configs list these ids, others the layers whose *outputs* are read, which are one less. A head with the wrong
shift still runs, at a fifth of its acceptance rate. Where a list may be either, and where a list is missing
that should be there, only a trial can tell: the command lets the self-test decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import EagleError, ErrorKind
from .config import Config
from .geometry import Geometry
from .layouts.base import Ids, Layout
from .target import TargetFile

_OVERRIDE = "set --extract-layers"
# nvidia/gpt-oss-120b-Eagle3-long-context lists [1, 17, 32]: inputs for SGLang (pull request 32334), outputs
# for others
_COUNTED_BOTH_WAYS = ("gpt-oss",)


@dataclass(frozen=True)
class Inferred:
    """ids: the layers whose inputs are read. why: an explanation. other: what the list may mean as well.

    guessed: a list is missing, and this layout's heads have one otherwise.
    """

    ids: list[int]
    why: str
    other: list[int] | None = None
    guessed: bool = False


def infer_layers(
    config: Config, layout: Layout, g: Geometry, target: TargetFile, override: Sequence[int] | None
) -> Inferred:
    """The layers that a head reads.

    Raises EagleError BAD_CONFIG, or BAD_ARGUMENT for the override, unless there are g.n_features ascending
    ids in 0..n_layer.
    """
    if override is not None:
        found, key, kind = Inferred(list(override), "given"), "--extract-layers", ErrorKind.BAD_ARGUMENT
    else:
        found, key = _from_config(config, layout, g, target)
        kind = ErrorKind.BAD_CONFIG
    _check(found.ids, key, g, target.n_layer, kind)
    return Inferred(found.ids, f"layers {found.ids}: {found.why}", found.other, found.guessed)


def _from_config(config: Config, layout: Layout, g: Geometry, target: TargetFile) -> tuple[Inferred, str]:
    """(the layers, what gave them)."""
    n_layer = target.n_layer
    if g.last_state and not layout.interleaved:
        head = "EAGLE-1" if layout.arch == "eagle" else "without features of inner layers, it"
        why = f"{head} reads the output of the last layer after the target's final norm"
        return Inferred([n_layer], why), "the rule n"
    own = [2, n_layer // 2, n_layer - 3]
    lists = {key: listed for key, _ in layout.layer_ids if (listed := config.integers(key)) is not None}
    for key, meaning in layout.layer_ids:
        if key in lists:
            found = _resolve(lists[key], meaning, own, target, list(lists.values()))
            return found, f"key {key} of config.json"
    if g.n_features != 3:
        raise EagleError(
            ErrorKind.BAD_CONFIG,
            f"fc.weight takes the features of {g.n_features} layers, but config.json lists none: {_OVERRIDE}",
        )
    rule = "EAGLE's rule 2, n/2, n-3"
    why = f"config lists none, so {rule} for {n_layer} layers applies"
    if layout.lists_layers:
        why += f"; heads of {layout.name} that list none may read others"
    return Inferred(own, why, guessed=layout.lists_layers), rule


def _resolve(
    listed: list[int], meaning: Ids, own: list[int], target: TargetFile, lists: list[list[int]]
) -> Inferred:
    """The meaning of a list. lists: those of all keys; two that differ by one are outputs and inputs.

    Source: SGLang, pull request 25454. Of lists in eagle_config, those that begin with 1 are outputs; others
    were trained as inputs by some projects and as outputs by others, and SGLang takes them for inputs.
    """
    shifted, n_layer = [i + 1 for i in listed], target.n_layer
    if shifted in lists:
        return Inferred(shifted, f"config lists outputs {listed}, and inputs {shifted}")
    if n_layer in listed:
        why = f"config lists inputs {listed}, used unchanged ({n_layer} is after the last layer)"
        return Inferred(listed, why)
    if listed == own:
        why = f"config lists {listed}, as EAGLE's own rule for {n_layer} layers, used unchanged"
        return Inferred(listed, why)
    if listed[0] == 1:
        if shifted == own and target.architecture not in _COUNTED_BOTH_WAYS:
            return Inferred(shifted, f"config lists outputs {listed}, shifted by one")
        return Inferred(shifted, f"config lists outputs {listed}, shifted by one; they may be inputs", listed)
    if meaning is Ids.INPUTS or lists.count(listed) > 1:
        return Inferred(listed, f"config lists inputs {listed}, used unchanged")
    either = f"config lists {listed}, used unchanged; they may be outputs, which are inputs {shifted}"
    return Inferred(listed, either, shifted)


def _check(ids: list[int], key: str, g: Geometry, n_layer: int, kind: ErrorKind) -> None:
    mend = "correct it" if kind is ErrorKind.BAD_ARGUMENT else _OVERRIDE
    if len(ids) != g.n_features:
        takes = (
            f"fc.weight takes the features of {g.n_features} layers" if g.fuses else "it takes one layer's"
        )
        raise EagleError(kind, f"{takes}, but {key} gives {ids}: {mend}")
    if any(type(i) is not int or not 0 <= i <= n_layer for i in ids):
        raise EagleError(
            kind,
            f"{key} gives layers {ids}, the target has 0..{n_layer}: give this head's own target, or {mend}",
        )
    if any(a >= b for a, b in zip(ids, ids[1:])):
        raise EagleError(kind, f"{key} gives layers {ids}, which are not ascending: {mend}")
