"""A complete run: data, training, export, conversion. Each part continues where an earlier run stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Iterator
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
from .settings import PACE_STEPS, TrainSettings
from .shards import BLOCK, Shards, shard_info
from .target import TrainingTarget

if TYPE_CHECKING:  # these modules need PyTorch
    from .loop import Progress as TrainProgress
    from .loop import Trainer

OUTTYPE = "q8_0"
MEASURED = 5.0  # seconds of generation after which the time that it takes is said


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
    acceptance.png. You can stop it at any time; the same call then continues. Raises EagleError, and at
    Ctrl-C KeyboardInterrupt, after saying what is kept.
    """
    try:
        import torch  # noqa: F401 - only to check that it is installed
    except ImportError as e:
        raise EagleError(ErrorKind.LIBRARY, f"training needs PyTorch: {extras.command('train')}") from e

    out, console = Path(settings.out), Console(stderr=True)
    try:
        return _train_in(out, settings, console)
    except KeyboardInterrupt:
        console.print(f"stopped. {kept(settings)}", markup=False, highlight=False, soft_wrap=True)
        raise


def kept(settings: TrainSettings) -> str:
    """A stopped run: what it has left, and how it goes on."""
    data, out = data_folder(settings), Path(settings.out)
    tokens = sum(shard_info(path)["tokens"] for path in data.glob("shard-*.safetensors"))
    has = [f"{tokens:,} tokens of training data in {data}"] if tokens else []
    if (out / "checkpoint.pt").exists():
        has.append(f"the head so far, in {out / 'checkpoint.pt'}")
    if not has:
        return f"Nothing is kept yet: answers are written in files of {BLOCK}. The same command begins anew"
    return f"Kept: {' and '.join(has)}. The same command goes on from there"


def data_folder(settings: TrainSettings) -> Path:
    return Path(settings.data) if settings.data else Path(settings.out) / "data"


def _train_in(out: Path, settings: TrainSettings, console: Console) -> TrainReport:
    from .data import Corpus
    from .export import write
    from .loop import Trainer

    paths = _data(settings, console)  # what fails before the first answers leaves nothing behind
    make_folder(out)
    remove_stale(out)
    corpus = Corpus(paths, settings.layers, settings.max_tokens)
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


def _data(settings: TrainSettings, console: Console) -> list[Path]:
    shards = Shards(data_folder(settings), settings)
    n_ctx, most = settings.n_predict + 512, settings.max_tokens
    start: list[float] = []  # when the first target was loaded
    said: list[float] = []
    note = "from an earlier run"

    def open_target(path: str) -> TrainingTarget:
        layers, threads = settings.capture_layers or settings.layers, settings.threads or cores()
        device = settings.device if settings.capture == "torch" else None
        target = TrainingTarget(path, layers, settings.slots, n_ctx, threads, device)
        start.append(time.monotonic())
        return target

    with _bar(console, "{task.fields[note]}") as bar:
        task = bar.add_task("data", total=most, unit="tokens", note="")

        def progress(tokens: int, made: int, dropped: int, under_way: int) -> None:
            nonlocal note
            done = min(tokens + under_way, most)
            if not start:
                bar.update(task, completed=done, note=note)
                return
            seconds = max(time.monotonic() - start[0], 1e-3)
            rate = (made + under_way) / seconds
            note = f"{rate:.0f} tokens/s, {dropped} answers dropped"
            bar.update(task, completed=done, note="finishing running answers, " * (done == most) + note)
            if seconds >= MEASURED and not said and rate:
                said.append(rate)
                _say_time(console, "making the data", (most - done) / rate)

        paths = shards.fill(open_target, progress)
        end = min(sum(shard_info(path)["tokens"] for path in paths), most)
        bar.update(task, total=end, completed=end, note=note)
        return paths


def _say_time(console: Console, what: str, seconds: float) -> None:
    """Says what goes on for so many seconds more, by what was measured so far."""
    units = ((1, "s"), (60, "minutes"), (3600, "hours"))
    size, unit = next((u for u in reversed(units) if seconds >= 1.5 * u[0]), units[0])
    time_left = f"{seconds / size:.{size // 3600}f} {unit}"
    console.print(f"{what} takes about {time_left} more on this machine", highlight=False, soft_wrap=True)


def _train(trainer: Trainer, console: Console) -> None:
    first = trainer.state["step"]
    with _bar(console, "{task.fields[note]}") as bar, _stops(trainer):
        tasks: dict[str, Any] = {}

        def count(name: str, unit: str, done: int, of: int, note: str = "") -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=of, unit=unit, note="")
            bar.update(tasks[name], total=of, completed=done, note=note)

        def step(p: TrainProgress) -> None:
            note = f"{p.rate:.0f} tokens/s, loss {p.loss:.3f}, accepted length {p.accepted:.2f}"
            count("training", "steps", p.step, p.steps, note)
            if p.step - first == PACE_STEPS:
                _say_time(console, "training", trainer.seconds_left())

        trainer.train(step, lambda n, of: count("least-squares start", "parts", n, of))


@contextlib.contextmanager
def _stops(trainer: Trainer) -> Iterator[None]:
    """Ctrl-C ends the training after its step, with a checkpoint; a second one ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        if trainer.stopping or not trainer.state["rows"]:  # nothing to write yet
            raise KeyboardInterrupt
        trainer.stopping = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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
