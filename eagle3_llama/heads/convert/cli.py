"""`eagle3-llama convert` and scripts/convert_eagle.py."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, ProgressColumn, TextColumn

from ...common.options import CONTEXT
from ...common.progress import progress
from ...errors import EagleError, ErrorKind


def convert(
    head: Annotated[
        Path,
        typer.Argument(
            help="folder with config.json and model.safetensors, or a head's GGUF", show_default=False
        ),
    ],
    model: Annotated[
        Path,
        typer.Option(
            "--model", "-m", "--target", help="target that the head was trained for, GGUF", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option(help="the GGUF to write", show_default=False)],
    outtype: Annotated[
        str | None,
        typer.Option(
            help="type of the matrices: f32, f16, bf16, q8_0 or q4_0; f16 if left out, or what the GGUF has"
        ),
    ] = None,
    extract_layers: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,C", help="target layers whose inputs the head reads, if config.json is wrong"
        ),
    ] = None,
    self_test: Annotated[
        bool,
        typer.Option("--self-test", help="then try it on stored texts, also with the layers beside its own"),
    ] = False,
) -> None:
    """Convert a head (SafeAILab, SpecForge, AngelSlim, vLLM speculators, NVIDIA ModelOpt, EAGLE-1, GGUF) to GGUF."""
    from . import convert as run

    try:
        with _bar("converting", "bytes", DownloadColumn()) as done:
            report = run(head, model, out, outtype, _layers(extract_layers), done)
    except (EagleError, MemoryError) as e:
        message = (
            str(e)
            if isinstance(e, EagleError)
            else f"not enough memory to convert {head}: close other programs"
        )
        print(f"error: {one_line(message)}", file=sys.stderr)
        raise typer.Exit(2) from None
    for note in report.notes:
        print(note)
    print(f"wrote {report.out}: {report.n_tensors} tensors, {report.n_bytes / 1e6:.1f} MB")
    if self_test:
        try:
            _self_test(report.out, model)
        except EagleError as e:
            print(f"error: {one_line(str(e))}", file=sys.stderr)
            raise typer.Exit(2) from None


def _self_test(head: Path, target: Path) -> None:
    from ..self_test import Verdict, self_test, verdict

    with _bar("self-test", "texts", TextColumn("{task.completed} of {task.total} texts")) as done:
        found = self_test(head, target, on_passage=done)
    own, *others = found.trials
    print(
        f"self-test, layers {own.layers}: {own.accepted:.1%} of first guesses accepted at {found.positions} positions"
    )
    for t in others:
        print(
            f"self-test, layers {t.layers}: {t.accepted:.1%}, which is {t.acceptance}; log-likelihood {t.likelihood}"
        )
    kind, line = verdict(found)
    if kind is Verdict.WRONG:
        Console(stderr=True).print(
            f"WARNING: {line}", style="bold red", markup=False, highlight=False, soft_wrap=True
        )
    else:
        print(f"self-test: {line}")


def main() -> None:
    """Entry point of the script: what is wrong with the input is one line on stderr, exit code 2, and no output file."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings=CONTEXT)(convert)
    app()


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
        raise EagleError(
            ErrorKind.BAD_ARGUMENT, f"--extract-layers is {text!r:.60}, expected numbers as in 2,15,27"
        ) from None


@contextlib.contextmanager
def _bar(what: str, unit: str, done_of_total: ProgressColumn) -> Iterator:
    """A progress callback."""
    columns = TextColumn("{task.description}", markup=False), BarColumn(), done_of_total
    with progress(
        Console(stderr=True), *columns, transient=True, begins=False
    ) as bar:  # what fails at once is said in one line
        task = bar.add_task(what, total=None, unit=unit)
        yield lambda done, total: bar.update(task, completed=done, total=total)
