#!/usr/bin/env python3
"""Writes the tables of options in serve.md and scaling.md from the fields of the settings.

    scripts/option_tables.py             # in the environment that scripts/_env.py makes
    scripts/option_tables.py --check     # exit status 1 if a page differs from the settings

The first sentence of a row is the option's help. Sentences behind it are the page's own, and stay.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from eagle3_llama.common.settings import Range, settings_of
from eagle3_llama.server.cli import serve
from eagle3_llama.server.ray.deployment import Scale, serve_replicas
from eagle3_llama.server.settings import ServerSettings

DOCS = Path(__file__).resolve().parents[1] / "eagle3_llama" / "docs"
TABLE = re.compile(r"^\| option \| default \| range \| \|\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check, stale = parser.parse_args().check, 0
    for page, text in rendered():
        if text != page.read_text(encoding="utf-8"):
            stale += 1
            print(f"{page.name} {'differs from the settings' if check else 'is written'}")
            if not check:
                page.write_text(text, encoding="utf-8")
    return int(check and stale > 0)


def rendered() -> Iterator[tuple[Path, str]]:
    """Each page, and its text as the settings make it."""
    plain, replicas = options(serve), options(serve_replicas)
    more = {name: option for name, option in replicas.items() if name not in plain}
    for name, params in (("serve", plain), ("scaling", more)):
        page = DOCS / f"{name}.md"
        text = page.read_text(encoding="utf-8")
        found = TABLE.search(text)
        if found is None:
            raise ValueError(f"{page} has no table with the columns option, default and range")
        own = {line.split("`")[1]: line.rpartition(" | ")[2][:-2] for line in found[1].splitlines()}
        rows = "".join(f"{row(param, own)}\n" for param in params.values())
        yield page, text[: found.start(1)] + rows + text[found.end(1) :]


def options(command: Any) -> dict[str, Any]:
    """The options of a command by name, as Click has them."""
    app = typer.Typer(add_completion=False)
    app.command()(command)
    params = typer.main.get_command(app).params
    return {str(p.name): p for p in params if p.name != "help"}


def row(param: Any, own: dict[str, str]) -> str:
    """A row of the table. own: the texts of the rows that the page has, by the first name of the option."""
    names = sorted(param.opts, key=len, reverse=True)
    names += param.secondary_opts if param.default is not False else []
    names += [param.envvar] if param.envvar else []
    said, _, otherwise = str(param.help).partition("; default: ")
    _, dot, more = own.get(names[0], "").partition(". ")
    cells = ", ".join(f"`{name}`" for name in names), default(param, otherwise), span(param.name)
    return f"| {' | '.join(cells)} | {marked(said)}{dot}{more} |".replace("|  |", "| |").replace(
        "|  |", "| |"
    )


def default(param: Any, otherwise: str) -> str:
    """otherwise: what the help says of an option that is left out."""
    if param.required or otherwise:
        return marked(otherwise)
    if isinstance(param.default, bool):
        return "on" if param.default else "off"
    return "none" if param.default is None else number(param.default)


def span(name: str) -> str:
    limit = (settings_of(ServerSettings) | settings_of(Scale)).get(name)
    if limit is None or not isinstance(limit.limit, Range):
        return ""
    return f"{number(limit.limit.least, ',')} to {number(limit.limit.most, ',')}"


def number(value: Any, form: str = "") -> str:
    return f"{value:{form}.15g}" if isinstance(value, float) else f"{value:{form}}"


def marked(text: str) -> str:
    """Options and sizes as code."""
    return re.sub(r"(?<![\w`])(--[a-z-]+[a-z]|(?<=\()\d+[MG](?=\)))", r"`\1`", text)


if __name__ == "__main__":
    sys.exit(main())
