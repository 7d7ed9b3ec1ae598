"""The file of --config: options of `serve` in TOML. The command line and the environment come before it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..common import extras
from ..common.keywords import unknown
from ..common.settings import option, settings_of
from ..errors import EagleError, ErrorKind
from .settings import ServerSettings

_PLAIN = (str, int, float, bool)
_KINDS = {name: setting.option_types[0] for name, setting in settings_of(ServerSettings).items()}


def use(context: typer.Context, file: Path | None) -> Path | None:
    """The callback of --config: the file's options become the defaults of the command's options.

    Raises EagleError BAD_FILE for a file that cannot be read or is no TOML, and BAD_ARGUMENT for an option
    that the command does not have or for a value that no option can have.
    """
    if file is None or context.resilient_parsing:
        return file
    given = _read(file)
    known = {p.name: p for p in context.command.params if p.name not in (None, "config", "help")}
    values: dict[str, Any] = {}
    for written, value in given.items():
        name = written.replace("-", "_")
        if name not in known:
            names = [str(n).replace("_", "-") for n in known]
            raise unknown(written, names, f"{file}: there is no option", "eagle3-llama serve --help has all")
        if name in values:
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"{file} has {written} twice, with - and with _")
        values[name] = _checked(file, written, value, known[name])
    context.default_map = {**(context.default_map or {}), **values}
    return file


ConfigFile = Annotated[
    Path | None,
    option("file with options, in TOML; the command line comes first", callback=use, is_eager=True),
]


def _read(file: Path) -> dict[str, Any]:
    try:
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
    except ModuleNotFoundError as e:
        raise extras.missing("--config needs", "server", e) from e
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as e:
        message = f"cannot read --config {file}: {getattr(e, 'strerror', None) or e}"
        raise EagleError(ErrorKind.BAD_FILE, message) from e
    except tomllib.TOMLDecodeError as e:
        raise EagleError(ErrorKind.BAD_FILE, f"--config {file} is no TOML: {e}") from e


def _checked(file: Path, name: str, value: Any, param: Any) -> Any:
    """The value, if an option can have it. Typer checks its type as it does on the command line.

    There all values are texts: of a number it would take true for 1, and 2.5 for 2.
    """
    several, kind = param.multiple, _KINDS.get(param.name)
    if several and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return value
    if several or not isinstance(value, _PLAIN):
        wanted = "a list of strings" if several else "a string, a number, true or false"
    elif isinstance(value, bool) and not param.is_flag:
        wanted = "a number" if kind in (int, float) else "a string"
    elif isinstance(value, float) and kind is int:
        wanted = "a whole number"
    else:
        return value
    said = json.dumps(value) if isinstance(value, bool) else repr(value)
    raise EagleError(ErrorKind.BAD_ARGUMENT, f"{file}: {name} is {said:.60}, expected {wanted}")
