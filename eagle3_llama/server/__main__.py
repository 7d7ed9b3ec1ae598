"""`python -m eagle3_llama.server` takes the options of `eagle3-llama serve`, with - or _ between words."""

from __future__ import annotations

import typer

from ..common.options import CONTEXT
from ..common.terminal import run
from .cli import serve


def main() -> None:
    """Entry point. Prints an EagleError as one line and exits with code 2."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings=CONTEXT)(serve)
    run(app, prog_name="python -m eagle3_llama.server")


main()
