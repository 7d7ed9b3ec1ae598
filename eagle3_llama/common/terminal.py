"""How the commands say what is wrong: in the words of the command line, one line each, without Python."""

from __future__ import annotations

import errno
import faulthandler
import io
import os
import re
import sys
import warnings
from collections.abc import Iterable
from typing import Any, TextIO

import typer

from ..errors import EagleError, ErrorKind

_PHRASES = (  # settings whose names are words too
    (r"\bgive eagle\b", "give --eagle"),
    (r"\b(leave|instead of|or) tree\b", r"\1 --tree"),
    (r"^tree (has|is)\b", r"--tree \1"),
    (r"\band tree for\b", "and --tree for"),
    (r"\ba Tree\b", "--tree"),
)


def as_options(message: str, names: Iterable[str]) -> str:
    """A message in which settings are options: n_min is --n-min, flash_attn=True is --flash-attn.

    names: the settings, such as n_min. Names inside paths stay as they are.
    """

    def option(found: re.Match[str]) -> str:
        value = f" {found[2]}" if found[2] and found[2][0].isdigit() else ""
        return ("--no-" if found[2] == "False" else "--") + found[1].replace("_", "-") + value

    known = "|".join(sorted((n for n in names if "_" in n), key=len, reverse=True))
    if known:
        message = re.sub(rf"(?<![\w/.-])({known})(?:=(True|False|[0-9]+))?(?![\w=-]|[./]\w)", option, message)
    for phrase, words in _PHRASES:
        message = re.sub(phrase, words, message)
    return message


def option_names(app: typer.Typer) -> set[str]:
    """The names of all parameters of an application's commands."""
    command: Any = typer.main.get_command(app)
    commands = getattr(command, "commands", {"": command}).values()
    return {p.name for c in commands for p in c.params}


def accept_any_text() -> None:
    """From now on what an answer has and the terminal's encoding does not, is a ? there, and no exception."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")


def run(app: typer.Typer, **arguments: Any) -> None:
    """Runs an application, as its program. What is wrong is one line on stderr, with exit code 2."""
    _open_streams()
    faulthandler.enable()  # a crash in native code says where
    accept_any_text()
    say_warnings(app)
    try:
        try:
            app(**arguments)
        finally:
            sys.stdout.flush()  # here it can be said what the end of the process would hide
    except EagleError as e:
        say_error(e, app)
        raise SystemExit(2) from None
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EIO):
            raise
        _drop(sys.stdout)
        what = f"the output cannot be written: {e.strerror}"
        say_error(EagleError(ErrorKind.NO_SPACE, what), app)
        raise SystemExit(2) from None


def _open_streams() -> None:
    """Opens the standard streams that a caller has closed, as `2>&-` does.

    The next file that is opened would get the number of one, and what libraries print would go into it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False, encoding="utf-8"))


def say_error(error: Exception, app: typer.Typer) -> None:
    """Prints an error as one line on stderr."""
    _say(f"error: {as_options(str(error), option_names(app))}")


def _say(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:  # as on a full disk: nobody can be told
        _drop(sys.stderr)


def _drop(stream: TextIO) -> None:
    """Lets the system forget what is written from now on, and what Python writes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say_warnings(app: typer.Typer) -> None:
    """From now on a warning is one line on stderr, without the place in the source."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        _say(f"warning: {as_options(str(message), option_names(app))}")

    warnings.showwarning = show
