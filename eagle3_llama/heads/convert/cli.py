"""`eagle3-llama convert` and scripts/convert_eagle.py."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, ProgressColumn, TextColumn

from ...common import model_names
from ...common.options import APP, CONTEXT
from ...common.progress import progress
from ...errors import EagleError, ErrorKind

if TYPE_CHECKING:
    from ..self_test import Verdict
    from . import ConvertReport


def convert(
    head: Annotated[
        Path,
        typer.Argument(
            help="folder with config.json and model.safetensors, a GGUF head, or hf:OWNER/REPO",
            show_default=False,
        ),
    ],
    model: Annotated[
        Path,
        typer.Option(
            "--model", "-m", "--target", help="the head's target model: GGUF or hf: name", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option(help="GGUF file to write", show_default=False)],
    outtype: Annotated[
        str | None,
        typer.Option(help="matrix type: f32, f16, bf16, q8_0, q4_0; default: f16, or as in a GGUF head"),
    ] = None,
    extract_layers: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,C", help="target layers whose inputs the head reads, if config.json is wrong"
        ),
    ] = None,
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test", metavar="", help="then test the head on stored texts, also with other layers"
        ),
    ] = False,
) -> None:
    """Convert a head to GGUF.

    Supported formats: SafeAILab, SpecForge, AngelSlim, vLLM speculators, NVIDIA ModelOpt, EAGLE-1, and GGUF.
    """
    from ..hub import head_source

    try:
        target = Path(model_names.model(model))
        with head_source(head) as source:
            _convert(source, target, out, outtype, _layers(extract_layers), self_test)
    except (EagleError, MemoryError) as e:
        no_memory = f"not enough memory for {head}: close other programs"
        print(f"error: {one_line(str(e) if isinstance(e, EagleError) else no_memory)}", file=sys.stderr)
        raise typer.Exit(2) from None


def _convert(
    head: Path, target: Path, out: Path, outtype: str | None, layers: list[int] | None, self_test: bool
) -> None:
    from . import convert as run

    with _bar("converting", "bytes", DownloadColumn()) as done:
        report = run(head, target, out, outtype, layers, done)
    print(*report.notes, sep="\n")
    print(f"wrote {report.out}: {report.n_tensors} tensors, {report.n_bytes / 1e6:.1f} MB")
    if report.other_layers is not None and _other_is_right(report, target):
        with _bar("converting", "bytes", DownloadColumn()) as done:
            report = run(head, target, out, outtype, report.other_layers, done)
        print(f"converted again with layers {report.layers}, because the self-test prefers them")
    elif report.guessed_layers:
        _try_guess(report, target)
    elif self_test and report.other_layers is None:
        _self_test(report.out, target)


def _other_is_right(report: ConvertReport, target: Path) -> bool:
    """Tries the head where config.json's layers have two readings. Says so if the trial cannot decide."""
    from ..self_test import Verdict

    print(f"which layers are right, {report.layers} or {report.other_layers}, is for the self-test to say:")
    kind, best = _self_test_if_it_runs(report, target)
    if kind is Verdict.WRONG and best == report.other_layers:
        return True
    if kind is Verdict.CANNOT_TELL:
        other = ",".join(map(str, report.other_layers or ()))
        print(f"not decided: if few drafts are accepted, convert again with --extract-layers {other}")
    return False


def _try_guess(report: ConvertReport, target: Path) -> None:
    """Tries a head whose layers were guessed. The trial sees the neighbouring layers, not all there are."""
    from ..self_test import Verdict

    print(f"whether layers {report.layers} are right is for the self-test to say:")
    if _self_test_if_it_runs(report, target)[0] is Verdict.CANNOT_TELL:
        print("not decided: if few drafts are accepted, set --extract-layers to the layers it was trained on")


def _self_test_if_it_runs(report: ConvertReport, target: Path) -> tuple[Verdict, list[int]]:
    from ..self_test import Verdict

    try:
        return _self_test(report.out, target)
    except EagleError as e:
        print(f"the self-test cannot run with this target: {one_line(str(e))}")
        return Verdict.CANNOT_TELL, report.layers


def _self_test(head: Path, target: Path) -> tuple[Verdict, list[int]]:
    """Prints the results. Returns the verdict, and the layers that the head likes best."""
    from ..readings import embeddings_alike
    from ..self_test import Verdict, better_readings, self_test, verdict

    with _bar("self-test", "texts", TextColumn("{task.completed} of {task.total} texts")) as done:
        found = self_test(head, target, on_passage=done)
    own, *others = found.trials
    accepted = f"{own.accepted:.1%} of the head's first draft tokens accepted"
    print(f"self-test, layers {own.layers}: {accepted} at {found.positions} positions")
    for t in others:
        gains = f"difference {t.acceptance}, in log-likelihood {t.likelihood}"
        print(f"self-test, layers {t.layers}: {t.accepted:.1%}, {gains}")
    for t in found.readings:
        print(f"self-test, {t.reading}: {t.accepted:.1%}, in log-likelihood {t.likelihood}")
    if (alike := embeddings_alike(head, target)) is not None:
        print(f"self-test: the head's own embeddings have a mean cosine of {alike:.2f} with the target's")
    kind, line = verdict(found)
    warnings = better_readings(found)
    if kind is Verdict.WRONG:
        warnings.append(line)
    else:
        print(f"self-test: {line}")
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    for warning in warnings:
        console.print(f"WARNING: {warning}", style="bold red")
    return kind, max(found.trials, key=lambda t: t.likelihood.mean).layers


def main() -> None:
    """Entry point of the script. A bad input gives one line on stderr, no output file, and exit code 2."""
    app = typer.Typer(add_completion=False, **APP)
    app.command(context_settings=CONTEXT)(convert)
    app()


def one_line(message: str, longest: int = 600) -> str:
    """Replaces unprintable characters, because names from a file may contain control codes."""
    clean = "".join(c if c.isprintable() else "?" for c in " ".join(message.split()))
    return clean if len(clean) <= longest else f"{clean[:longest]}..."


def _layers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise EagleError(
            ErrorKind.BAD_ARGUMENT, f"--extract-layers is {text!r:.60}, expected numbers such as 2,15,27"
        ) from None


@contextlib.contextmanager
def _bar(what: str, unit: str, done_of_total: ProgressColumn) -> Iterator[Callable[[int, int], None]]:
    """Yields a callback, progress(done, total)."""
    columns = TextColumn("{task.description}", markup=False), BarColumn(), done_of_total
    # begins=False, so that an immediate failure prints only its error line
    with progress(Console(stderr=True), *columns, transient=True, begins=False) as bar:
        task = bar.add_task(what, total=None, unit=unit)
        yield lambda done, total: bar.update(task, completed=done, total=total)
