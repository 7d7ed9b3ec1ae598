"""The modes of compare.py by their names: the benchmark's, and none and chain:N."""

from __future__ import annotations

from collections.abc import Iterable

from eagle3_llama.bench.mode import Mode
from eagle3_llama.bench.modes import Eagle, parse_modes
from eagle3_llama.runtime.params import EagleParams


def modes_of(names: Iterable[str], head: str | None) -> list[Mode]:
    """head: None, or the one that all modes with a head have. Raises EagleError, ValueError."""
    found: list[Mode] = []
    for name in names:
        kind, _, number = name.partition(":")
        if name == "none":
            found.append(Eagle(name, head, params=EagleParams(n_max=0)))
        elif kind == "chain":
            if not (head and number.isdecimal() and int(number)):
                raise ValueError(f"mode {name}: write chain:N, such as chain:3, and name a head by --eagle")
            found.append(Eagle(name, head, params=EagleParams(n_max=int(number), text=False)))
        else:
            heads = [head] if head and kind in ("eagle", "head", "upstream") else []
            found += parse_modes([name], heads if takes_head(name) else [], None, EagleParams(), [])
    return found


def takes_head(name: str) -> bool:
    """True if the mode of this name needs --eagle."""
    kind, _, spec = name.partition(":")
    return kind in ("eagle", "head") or (kind == "upstream" and (not spec or "draft-" in spec))
