"""A complete run: data, training, export, conversion. Each part continues where an earlier run stopped."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ..common import extras
from ..common.files import make_folder, remove_stale, replacing
from ..common.progress import Lines, progress
from ..errors import EagleError, ErrorKind
from ..heads.convert import convert
from ..runtime.machine import cores
from .settings import TrainSettings
from .shards import Shards
from .target import TrainingTarget

if TYPE_CHECKING:  # these modules need PyTorch
    from .loop import Progress as TrainProgress
    from .loop import Trainer

OUTTYPE = "q8_0"


@dataclasses.dataclass(frozen=True)
class TrainReport:
    """The files of the head, and its acceptance on held-out text. coverage: of the draft vocabulary."""

    head_dir: Path
    gguf: Path
    tokens: int
    coverage: float
    mean_accepted_length: float
    accept_per_position: list[float]


def train(settings: TrainSettings) -> TrainReport:
    """Creates training data and a head in the folder settings.out.

    It writes data/, checkpoint.pt, best.pt, log.csv, config.json, model.safetensors, head.gguf and
    acceptance.png. You can stop it at any time; the same call then continues. Raises EagleError.
    """
    try:
        import torch  # noqa: F401 - only to check that it is installed
    except ImportError as e:
        raise EagleError(ErrorKind.LIBRARY, f"training needs PyTorch: {extras.command('train')}") from e
    from .data import Corpus
    from .export import write
    from .loop import Trainer

    out = Path(settings.out)
    console = Console(stderr=True)
    paths = _data(settings, out, console)  # what fails before the first answers leaves nothing behind
    make_folder(out)
    remove_stale(out)
    corpus = Corpus(paths, settings.layers)
    if len(corpus.items) < 2:
        raise EagleError(
            ErrorKind.BAD_VALUE, "training and measuring need at least two conversations: raise --max-tokens"
        )
    trainer = Trainer(settings, corpus, out)
    n_tokens = sum(map(len, corpus.items))
    covered = f"{len(trainer.head.d2t):,} covers {trainer.coverage:.2%} of the answer tokens"
    console.print(
        f"{len(corpus.items)} conversations, {n_tokens:,} tokens, {len(trainer.heldout)} held out; "
        f"the draft vocabulary of {covered}",
        highlight=False,
    )
    if trainer.resume():
        console.print(f"continuing at step {trainer.state['step']}", highlight=False)
    _train(trainer, console)
    best = max(trainer.state["rows"], key=lambda r: r["mean_accepted_length"])
    write(trainer.best_head(), corpus.layers, out)
    gguf = out / "head.gguf"
    convert(out, settings.targets[0], gguf, OUTTYPE, corpus.layers)
    _plot(trainer.state["rows"], out, console)
    return TrainReport(
        out, gguf, n_tokens, trainer.coverage, best["mean_accepted_length"], best["accept_per_position"]
    )


def _data(settings: TrainSettings, out: Path, console: Console) -> list[Path]:
    shards = Shards(Path(settings.data) if settings.data else out / "data", settings)
    n_ctx = settings.n_predict + 512

    def open_target(path: str) -> TrainingTarget:
        layers, threads = settings.capture_layers or settings.layers, settings.threads or cores()
        device = settings.device if settings.capture == "torch" else None
        return TrainingTarget(path, layers, settings.slots, n_ctx, threads, device)

    with _bar(console, "{task.fields[note]}") as bar:
        task = bar.add_task("data", total=settings.max_tokens, note="")
        start: list[float] = []

        def progress(tokens: int, made: int, dropped: int) -> None:
            if not start:
                start.append(time.monotonic())
            rate = made / max(time.monotonic() - start[0], 1e-3)
            note = f"{rate:.0f} tokens/s, {dropped} answers dropped"
            if tokens >= settings.max_tokens:
                note = f"{tokens:,} tokens, finishing running answers, {note}"
            bar.update(task, completed=min(tokens, settings.max_tokens), note=note)

        return shards.fill(open_target, progress)


def _train(trainer: Trainer, console: Console) -> None:
    with _bar(console, "{task.fields[note]}") as bar:
        task = bar.add_task("training", total=None, note="")

        def step(p: TrainProgress) -> None:
            note = f"{p.rate:.0f} tokens/s, loss {p.loss:.3f}, accepted length {p.accepted:.2f}"
            bar.update(task, total=p.steps, completed=p.step, note=note)

        trainer.train(step, lambda n, of: bar.update(task, total=of, completed=n, note="least-squares start"))


def _bar(console: Console, note: str) -> Progress | Lines:
    columns = BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn(note)
    return progress(console, TextColumn("{task.description}"), *columns)


def _plot(rows: list[dict[str, Any]], out: Path, console: Console) -> None:
    """Writes acceptance.png. Without matplotlib there is only log.csv."""
    try:
        import matplotlib
    except ImportError:
        console.print(
            f"no acceptance.png without matplotlib: {extras.command('plots')}", style="dim", markup=False
        )
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for i in range(len(rows[-1]["accept_per_position"])):
        accepted = [r["accept_per_position"][i] for r in rows]
        axes.plot([r["tokens_seen"] for r in rows], accepted, label=f"position {i + 1}")
    axes.set(xlabel="tokens seen", ylabel="accepted (share of rounds)", ylim=(0, 1))
    axes.set_title("held-out greedy chains")
    axes.legend()
    figure.tight_layout()
    with replacing(out / "acceptance.png") as part:
        figure.savefig(part, dpi=120, format="png")
    plt.close(figure)
