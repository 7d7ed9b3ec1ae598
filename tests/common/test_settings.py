"""Settings that are written once: what a field says is the option, the check and its error."""

import dataclasses
import inspect
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from eagle3_llama import EagleError
from eagle3_llama.common.options import APP, Threads, size
from eagle3_llama.common.settings import OneOf, Range, check, option, option_name, seconds, with_options


@dataclasses.dataclass(frozen=True)
class Given:
    file: Annotated[str, "a file", Path]
    folder: Annotated[str | None, "a folder", Path | None] = None
    slots: Annotated[int, option("number of slots", "--slots", "-s"), Range(1, 9)] = 4
    threads: Annotated[int, Threads, Range(0)] = 0
    pause: Annotated[float | None, "seconds to pause; default: none", seconds(0, 10)] = None
    kind: Annotated[str, "one or two", OneOf("one", "two")] = "one"
    cache: Annotated[int | str, size("bytes (1G)")] = 1 << 20
    sites: Annotated[tuple[str, ...], "a site; may be repeated", list[str] | None] = ()
    share: Annotated[float, Range(0, 1)] = 0.5  # no option

    def __post_init__(self):
        check(self, option_name)


def made(*words):
    """The settings and the command's own option that these words give."""
    found = []

    @with_options(Given)
    def command(own: Annotated[int, "of the command"] = 7, **given):
        """A command."""
        found.append((Given(**given), own))

    app = typer.Typer(add_completion=False, **APP)
    app.command()(command)
    done = CliRunner().invoke(app, list(words))
    if isinstance(done.exception, EagleError):
        raise done.exception
    return found[0] if found else done.output


def test_a_command_gives_what_the_settings_hold():
    assert made("--file", "x") == (Given("x"), 7)
    words = "--file x --folder y -s 2 --threads 3 --pause 1 --kind two --cache 2M --sites a --sites b --own 8"
    expected = Given("x", "y", 2, 3, 1.0, "two", 2 << 20, ("a", "b"))
    assert made(*words.split()) == (expected, 8) and type(expected.file) is str


def test_help_has_each_option_once_and_the_fields_order():
    said = made("--help")
    places = [said.index(f"--{n} ") for n in "file folder own slots threads pause kind cache sites".split()]
    assert places == sorted(places) and "share" not in said
    assert "number of slots  [default: 4]" in said and "[default: 1048576]" in said


def test_what_must_be_given_comes_first():
    @with_options(Given, before=0)
    def command(own: int = 7, **given):
        """A command."""

    assert list(inspect.signature(command).parameters)[:3] == ["file", "own", "folder"]


@pytest.mark.parametrize(
    "given, said",
    [
        ({"slots": 10}, "--slots is 10, expected an integer 1..9"),
        ({"slots": True}, "--slots is True, expected an integer 1..9"),
        ({"slots": 2.0}, "--slots is 2.0, expected an integer 1..9"),
        ({"slots": None}, "--slots is None, expected an integer 1..9"),
        ({"threads": -1}, "--threads is -1, expected at least 0"),
        ({"pause": float("nan")}, "--pause is nan, expected seconds 0..10"),
        ({"pause": "1"}, "--pause is '1', expected seconds 0..10"),
        ({"kind": "three"}, "--kind is 'three', expected one or two"),
        ({"share": 2}, r"--share is 2, expected 0..1"),
        ({"cache": "much"}, "cache is 'much', expected 0, or bytes from 65,536 on"),
    ],
)
def test_what_is_out_of_range(given, said):
    with pytest.raises(EagleError, match=said):
        Given("x", **given)


def test_what_is_in_range():
    given = Given("x", slots=9, pause=None, share=1, cache="1M")
    assert given.pause is None and given.cache == 1 << 20  # texts from Python are parsed, too
