"""The command: `scripts/convert_eagle.py` and `eagle3-llama convert`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.progress import Progress

from ..errors import EagleError
from . import convert as run


def convert(
    head_dir: Annotated[Path, typer.Argument(help="directory with config.json and safetensors")],
    target: Annotated[Path, typer.Option(help="the target model, GGUF")],
    out: Annotated[Path, typer.Option(help="GGUF to write")],
    outtype: Annotated[str, typer.Option(help="f32, f16, bf16, q8_0 or q4_0")] = "f16",
    extract_layers: Annotated[Optional[str], typer.Option(help="layer ids, e.g. 2,15,27, instead of what the config says")] = None,
) -> None:
    """Converts an EAGLE-3 head to a GGUF that this project and upstream llama.cpp read."""
    try:
        layers = None if extract_layers is None else [int(i) for i in extract_layers.split(",")]
    except ValueError:
        print(f"error: --extract-layers is {extract_layers!r}, expected ids such as 2,15,27", file=sys.stderr)
        raise typer.Exit(2) from None
    console = Console(stderr=True, highlight=False)
    try:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("converting")
            report = run(head_dir, target, out, outtype, layers, lambda n, total: bar.update(task, completed=n, total=total))
    except EagleError as e:
        print(f"error: {e}".replace("\n", " "), file=sys.stderr)
        raise typer.Exit(2) from None
    for note in report.notes:
        print(note)
    print(f"{report.out}: {report.layout} layout, {report.n_tensors} tensors, {report.out.stat().st_size / 1e6:.1f} MB")


def main() -> None:
    """Entry point of the script."""
    typer.run(convert)
