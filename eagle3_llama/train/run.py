"""A whole run: data, training, export, conversion; each part goes on where an earlier run was stopped."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ..common.progress import Lines, progress
from ..errors import EagleError, ErrorKind
from ..heads.convert import convert
from .settings import TrainSettings
from .shards import Shards
from .target import Target

OUTTYPE = "q8_0"


@dataclasses.dataclass(frozen=True)
class TrainReport:
    """Where the head is, and what it was found to do on held-out text."""

    head_dir: Path
    gguf: Path
    tokens: int
    coverage: float
    mean_accepted_length: float
    accept_per_position: list[float]


def train(settings: TrainSettings) -> TrainReport:
    """Makes data and a head in settings.out: data/, log.csv, config.json, model.safetensors, head.gguf, acceptance.png.

    May be stopped at any moment; the same call goes on. Raises EagleError.
    """
    try:
        import torch  # noqa: F401
    except ImportError as e:
        raise EagleError(
            ErrorKind.LIBRARY, "training needs PyTorch: pip install 'eagle3-llama[train]'"
        ) from e
    from .data import Corpus
    from .export import write
    from .loop import Trainer

    out = Path(settings.out)
    console = Console(stderr=True)
    out.mkdir(parents=True, exist_ok=True)
    paths = _data(settings, out, console)
    corpus = Corpus(paths, settings.layers)
    if len(corpus.items) < 2:
        raise EagleError(
            ErrorKind.BAD_VALUE,
            "one conversation is too little to train on and to measure with: raise --max-tokens",
        )
    trainer = Trainer(settings, corpus, out)
    n_tokens = sum(map(len, corpus.items))
    console.print(
        f"{len(corpus.items)} conversations, {n_tokens:,} tokens, {len(trainer.heldout)} held out; the draft vocabulary of "
        f"{len(trainer.head.d2t):,} covers {trainer.coverage:.2%} of the answers",
        highlight=False,
    )
    if trainer.resume():
        console.print(f"going on at step {trainer.state['step']}", highlight=False)
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

    def open_target(path: str) -> Target:
        return Target(
            path,
            settings.capture_layers or settings.layers,
            settings.slots,
            n_ctx,
            settings.threads or os.cpu_count() or 1,
            settings.device if settings.capture == "torch" else None,
        )

    with _bar(console, "{task.fields[note]}") as bar:
        task = bar.add_task("data", total=settings.max_tokens, note="")
        start: list[float] = []

        def progress(tokens: int, made: int, dropped: int) -> None:
            start.append(time.monotonic()) if not start else None
            rate = made / max(time.monotonic() - start[0], 1e-3)
            bar.update(
                task,
                completed=min(tokens, settings.max_tokens),
                note=f"{rate:.0f} tokens/s, {dropped} answers dropped",
            )

        return shards.fill(open_target, progress)


def _train(trainer, console: Console) -> None:
    with _bar(console, "{task.fields[note]}") as bar:
        task = bar.add_task("training", total=None, note="")

        def progress(p) -> None:
            bar.update(
                task,
                total=p.steps,
                completed=p.step,
                note=f"{p.rate:.0f} tokens/s, loss {p.loss:.3f}, accepted length {p.accepted:.2f}",
            )

        trainer.train(
            progress, lambda done, of: bar.update(task, total=of, completed=done, note="least-squares start")
        )


def _bar(console: Console, note: str) -> Progress | Lines:
    return progress(
        console,
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn(note),
    )


def _plot(rows: list[dict], out: Path, console: Console) -> None:
    """acceptance.png; without matplotlib the CSV has to do."""
    try:
        import matplotlib
    except ImportError:
        console.print("no acceptance.png: pip install 'eagle3-llama[plots]'", style="dim")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for i in range(len(rows[-1]["accept_per_position"])):
        axes.plot(
            [r["tokens_seen"] for r in rows],
            [r["accept_per_position"][i] for r in rows],
            label=f"position {i + 1}",
        )
    axes.set(
        xlabel="tokens seen", ylabel="accepted (share of rounds)", ylim=(0, 1), title="held-out greedy chains"
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(out / "acceptance.png", dpi=120)
    plt.close(figure)
