"""Settings that are written once: the fields of a dataclass make the options of a command and the checks.

    @dataclass(frozen=True)
    class Settings:
        port: Annotated[int, "port to listen on; 0: any free port", Range(0, 65535)] = 8000

        def __post_init__(self) -> None:
            check(self)

    @with_options(Settings)
    def serve(**given): ...  # serve(Settings(**given))

A field's type is what the settings hold. Behind it stand, in any order: the option's help, or an option()
for more than that; the option's type, if it differs; a Range or OneOf. A field without help is for Python
alone.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from ..errors import EagleError, ErrorKind


@dataclasses.dataclass(frozen=True)
class Option:
    """A field's option. more: arguments of typer.Option. parser: of a text, and of the field's name."""

    help: str
    names: tuple[str, ...]
    parser: Callable[[Any, str], Any] | None
    more: dict[str, Any]


def option(help: str, *names: str, parser: Callable[[Any, str], Any] | None = None, **more: Any) -> Option:
    return Option(help, names, parser, more)


@dataclasses.dataclass(frozen=True)
class Range:
    """Least and most of a finite number. kind: what the error asks for; None: by the field's type."""

    least: float
    most: float = math.inf
    kind: str | None = None

    def wanted(self, value: Any, types: tuple[Any, ...]) -> str:
        """The value that the error asks for; empty if the value is in the range."""
        whole = int in types
        right = type(value) is int if whole else isinstance(value, numbers.Real)
        if right and math.isfinite(value) and self.least <= value <= self.most:
            return ""
        kind = self.kind if self.kind is not None else "an integer " if whole else ""
        return f"at least {self.least}" if self.most == math.inf else f"{kind}{self.least}..{self.most}"


def seconds(least: float, most: float) -> Range:
    return Range(least, most, "seconds ")


class OneOf:
    """The values that a field may have."""

    def __init__(self, *values: str) -> None:
        self.values = values

    def wanted(self, value: Any, types: tuple[Any, ...]) -> str:
        return "" if value in self.values else " or ".join(self.values)


@dataclasses.dataclass(frozen=True)
class NamedSetting:
    """The parts of a field of settings. types: those that it can have. option_type: that of its option."""

    name: str
    default: Any
    types: tuple[Any, ...]
    limit: Range | OneOf | None
    option_type: Any
    option: Option | None

    @property
    def option_types(self) -> tuple[Any, ...]:
        return _members(self.option_type)

    def parameter(self) -> inspect.Parameter:
        """The command's parameter. Where the settings cannot hold None, it stands for their default."""
        import typer  # not before a command is made: whoever uses the settings from Python needs none

        assert self.option is not None
        default = self.default
        if type(None) in self.option_types and type(None) not in self.types:
            default = None
        elif isinstance(default, tuple):  # it has numbers
            default = ",".join(f"{value:g}" for value in default)
        elif default is dataclasses.MISSING:
            default = inspect.Parameter.empty
        parser = None if self.option.parser is None else self.parsed
        info = typer.Option(*self.option.names, help=self.option.help, parser=parser, **self.option.more)
        kind: Any = Annotated[self.option_type, info]  # type: ignore[name-defined]  # made at run time
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)

    def parsed(self, given: Any) -> Any:
        """The parser's value of a text, from the command line or from Python."""
        parser = self.option.parser if self.option is not None else None
        return given if parser is None else parser(given, self.name)

    def held(self, given: Any) -> Any:
        """The settings' form of an option's value: text for paths, tuples for lists."""
        if isinstance(given, list):
            return tuple(map(self.held, given))
        if given is None:
            return self.default
        return str(given) if isinstance(given, Path) and Path not in self.types else given


@functools.cache
def settings_of(cls: type) -> dict[str, NamedSetting]:
    """The fields of a dataclass by name."""
    hints = get_type_hints(cls, include_extras=True)
    return {f.name: _setting(f.name, f.default, hints[f.name]) for f in dataclasses.fields(cls)}


def _setting(name: str, default: Any, hint: Any) -> NamedSetting:
    kind, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    option_type, limit, own = kind, None, None
    for said in metadata:
        if get_origin(said) is Annotated:  # an option of common/options.py
            option_type, own = get_args(said)
        elif isinstance(said, (Range, OneOf)):
            limit = said
        elif isinstance(said, (str, Option)):
            own = option(said) if isinstance(said, str) else said
        else:
            option_type = said
    return NamedSetting(name, default, _members(kind), limit, option_type, own)


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def check(settings: Any, named: Callable[[str], str] = str) -> None:
    """Parses the texts in frozen settings, and checks their ranges. named: a field's name in errors.

    Raises EagleError BAD_ARGUMENT.
    """
    for name, setting in settings_of(settings.__class__).items():
        value = getattr(settings, name)
        if value is None and type(None) in setting.types:
            continue
        object.__setattr__(settings, name, setting.parsed(value))
        if setting.limit is not None and (wanted := setting.limit.wanted(value, setting.types)):
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"{named(name)} is {value!r}, expected {wanted}")


def require(ok: bool, message: str, kind: ErrorKind = ErrorKind.BAD_ARGUMENT) -> None:
    """Raises an EagleError of this kind unless it is so."""
    if not ok:
        raise EagleError(kind, message)


def option_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def with_options(*classes: type, before: int = 2) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of a command of Typer: its **given are the fields of these dataclasses that are options.

    Its own parameters are written as fields are, or as Typer's. In --help, those that must be given come
    first. before: fields that come before the command's own options.
    """
    shared = {n: s for cls in classes for n, s in settings_of(cls).items() if s.option is not None}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        all_of = inspect.signature(command, eval_str=True).parameters.values()
        own = [_parameter(p) for p in all_of if p.kind is not p.VAR_KEYWORD]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            command(**{n: shared[n].held(value) if n in shared else value for n, value in given.items()})

        theirs = [s.parameter() for s in shared.values()]
        parameters = [*theirs[:before], *own, *theirs[before:]]
        parameters.sort(key=lambda p: p.default is not p.empty)
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _parameter(own: inspect.Parameter) -> inspect.Parameter:
    setting = _setting(own.name, own.default, own.annotation)
    return own.replace(kind=own.KEYWORD_ONLY) if setting.option is None else setting.parameter()
