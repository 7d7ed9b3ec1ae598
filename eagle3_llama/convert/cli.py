"""`eagle3-llama convert` and scripts/convert_eagle.py."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from ..errors import EagleError, ErrorKind


def convert(head_dir: Annotated[Path, typer.Argument(help="folder with config.json and model.safetensors", show_default=False)],
            target: Annotated[Path, typer.Option(help="the model that the head was trained for, GGUF", show_default=False)],
            out: Annotated[Path, typer.Option(help="the GGUF to write", show_default=False)],
            outtype: Annotated[str, typer.Option(help="type of the matrices: f32, f16, bf16, q8_0 or q4_0")] = "f16",
            extract_layers: Annotated[Optional[str], typer.Option(
                metavar="A,B,C", help="target layers whose inputs the head reads, if config.json is wrong")] = None,
            ) -> None:  # fmt: skip
    """Convert an EAGLE-3 head (SafeAILab, SpecForge, AngelSlim) to GGUF."""
    from . import convert as run

    try:
        with _bar() as progress:
            report = run(head_dir, target, out, outtype, _layers(extract_layers), progress)
    except (EagleError, MemoryError) as e:
        message = str(e) if isinstance(e, EagleError) else f"not enough memory to convert {head_dir}: close other programs"
        print(f"error: {one_line(message)}", file=sys.stderr)
        raise typer.Exit(2) from None
    for note in report.notes:
        print(note)
    print(f"wrote {report.out}: {report.n_tensors} tensors, {report.n_bytes / 1e6:.1f} MB")


def main() -> None:
    """Entry point of the script: what is wrong with the input is one line on stderr, exit code 2, and no output file."""
    typer.run(convert)


def one_line(message: str, longest: int = 600) -> str:
    """Names from a file may hold anything: nothing reaches the terminal but printable characters."""
    clean = "".join(c if c.isprintable() else "?" for c in " ".join(message.split()))
    return clean if len(clean) <= longest else f"{clean[:longest]}..."


def _layers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise EagleError(ErrorKind.BAD_ARGUMENT, f"--extract-layers is {text!r:.60}, expected numbers as in 2,15,27") from None


@contextlib.contextmanager
def _bar() -> Iterator:
    """A progress callback; a bar only where someone sees it."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("converting", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
