"""`python -m eagle3_llama.server` takes the options of `eagle3-llama serve`, with - or _ between words."""

from __future__ import annotations

import typer

from ..common.options import APP, CONTEXT
from ..common.synonyms import Command
from ..common.terminal import run
from .cli import serve


def main() -> None:
    """Entry point. Prints an EagleError as one line and exits with code 2."""
    app = typer.Typer(add_completion=False, **APP)
    app.command(context_settings=CONTEXT, cls=Command)(serve)
    run(app, prog_name="python -m eagle3_llama.server")


main()
