"""A head's config.json. Each value is checked when it is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.files import parse_object, reading
from ...errors import EagleError, ErrorKind

REQUIRED = object()


@dataclass(frozen=True)
class Config:
    """Keys may be dotted ("eagle_config.use_aux_hidden_state"). A null value counts as missing.

    Every method raises EagleError BAD_CONFIG, which names the key, if the value is missing and there is no
    default, has the wrong type, or is out of range.
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
        """A positive number within the range of float32. 0 is allowed if `zero` is set."""
        value = self._or_default(key, default)
        if value is default:
            return value
        fits = type(value) in (int, float) and -3e38 < value < 3e38  # false for NaN
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
