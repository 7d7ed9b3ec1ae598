"""What a draft may be: one frozen dataclass, validated once."""

from __future__ import annotations

import dataclasses
import difflib
import math

from .errors import EagleError, ErrorKind

MAX_DRAFT = 63  # native/src/session.cpp: with the token itself, the rows that are computed alike


@dataclasses.dataclass(frozen=True)
class EagleParams:
    """Fixed drafting settings, named as in llama.cpp.

    n_max: most tokens drafted a round, 0..63; 0 decodes plainly.
    n_min: drafts shorter than this are dropped.
    p_min: a draft ends before the first token whose probability (over the draft vocabulary) is below this.
    """

    n_max: int = 1
    n_min: int = 0
    p_min: float = 0.0

    def __post_init__(self) -> None:
        for name in ("n_max", "n_min"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_DRAFT:
                raise EagleError(ErrorKind.BAD_ARGUMENT, f"{name} is {value!r}, expected an integer 0..{MAX_DRAFT}")
        if self.n_min > self.n_max:
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"n_min {self.n_min} exceeds n_max {self.n_max}")
        if not isinstance(self.p_min, (int, float)) or not math.isfinite(self.p_min) or not 0 <= self.p_min <= 1:
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"p_min is {self.p_min!r}, expected a number 0..1")

    @classmethod
    def of(cls, **settings: object) -> "EagleParams":
        """From keyword arguments; an unknown name is refused with the nearest right one."""
        names = [f.name for f in dataclasses.fields(cls)]
        for name in settings:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f", did you mean {near[0]}?" if near else f"; known are {', '.join(names)}"
                raise EagleError(ErrorKind.BAD_ARGUMENT, f"unknown setting {name!r}{hint}")
        return cls(**settings)  # type: ignore[arg-type]
