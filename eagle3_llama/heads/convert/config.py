"""A head's config.json, every value checked when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.files import parse_object, reading
from ...errors import EagleError, ErrorKind

REQUIRED = object()


@dataclass(frozen=True)
class Config:
    """Keys may be dotted ("eagle_config.use_aux_hidden_state"); null counts as absent.

    Every method raises EagleError BAD_CONFIG naming the key: absent without a default, of another type, or out
    of range.
    """

    data: dict[str, Any]

    def get(self, key: str) -> Any:
        value: Any = self.data
        for part in key.split("."):
            if value is None:
                return None
            if not isinstance(value, dict):
                raise bad(key, "is not inside an object")
            value = value.get(part)
        return value

    def integer(self, key: str, default: Any = REQUIRED, lo: int = 1, hi: int = 1 << 30) -> Any:
        value = self._or_default(key, default)
        if value is default:
            return value
        if type(value) is not int or not lo <= value <= hi:
            raise bad(key, f"is {value!r:.40}, expected an integer {lo}..{hi}")
        return value

    def number(self, key: str, default: Any = REQUIRED, zero: bool = False) -> Any:
        """A finite number above 0 that a float32 can hold, or 0 if `zero`."""
        value = self._or_default(key, default)
        if value is default:
            return value
        fits = type(value) in (int, float) and -3e38 < value < 3e38  # NaN is not
        if not fits or value < 0 or (value == 0 and not zero):
            raise bad(key, f"is {value!r:.40}, expected a positive number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._or_default(key, default)
        if type(value) is not bool:
            raise bad(key, f"is {value!r:.40}, expected true or false")
        return value

    def string(self, key: str, default: Any = REQUIRED) -> Any:
        value = self._or_default(key, default)
        if value is not default and not isinstance(value, str):
            raise bad(key, f"is {value!r:.40}, expected a string")
        return value

    def integers(self, key: str) -> list[int] | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not value or not all(type(v) is int for v in value):
            raise bad(key, f"is {value!r:.40}, expected a list of integers")
        return value

    def architectures(self) -> list[str]:
        value = self.get("architectures")
        return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []

    def _or_default(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is not None:
            return value
        if default is REQUIRED:
            raise bad(key, "is missing")
        return default


def bad(key: str, what: str) -> EagleError:
    return EagleError(ErrorKind.BAD_CONFIG, f"key {key} of config.json {what}")


def read_config(head_dir: Path) -> Config:
    path = head_dir / "config.json"
    with reading(path):
        text = path.read_bytes()
    return Config(parse_object(text, str(path), ErrorKind.BAD_CONFIG))
