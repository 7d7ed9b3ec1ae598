"""`eagle3-llama train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..common.options import Threads
from ..errors import EagleError, ErrorKind
from .settings import TrainSettings

LISTS = {"weights": float, "layers": int, "capture_layers": int}  # options with commas


def train(
    model: Annotated[
        list[Path],
        typer.Option(
            "--model",
            "-m",
            help="target, GGUF; several formats of it make one head for all",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="folder for data, log and head", show_default=False)],
    data: Annotated[
        Path | None, typer.Option(help="folder of the data, to share between runs; default: OUT/data")
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help=".jsonl to answer: strings, {prompt} or {messages}; your own traffic is best"),
    ] = None,
    conversations: Annotated[
        list[Path] | None, typer.Option(help=".jsonl of finished conversations: {messages} or {toks, prompt}")
    ] = None,
    weights: Annotated[str, typer.Option(help="shares of self-synthesis, prompts, conversations")] = "1,1,1",
    max_tokens: Annotated[int, typer.Option(help="of data")] = 1_000_000,
    max_gb: Annotated[float, typer.Option(help="of data on disk")] = 20.0,
    n_predict: Annotated[
        int, typer.Option("--n-predict", "-n", help="most tokens of an answer to write")
    ] = 256,
    drop_truncated: Annotated[bool, typer.Option(help="leave out answers that did not end by then")] = False,
    slots: Annotated[int, typer.Option(help="sequences at once")] = 32,
    capture: Annotated[
        str,
        typer.Option(help="llama: features from llama.cpp; torch: on --device, from the dequantised weights"),
    ] = "llama",
    layers: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="inputs of target layers to read")
    ] = None,
    capture_layers: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="those kept in the data, to try several --layers")
    ] = None,
    draft_vocab: Annotated[int, typer.Option(help="most frequent tokens, that may be drafted")] = 8192,
    init_from: Annotated[Path | None, typer.Option(help="a head's checkpoint folder to go on from")] = None,
    steps: Annotated[int, typer.Option(help="of training-time test")] = 5,
    stride: Annotated[
        int, typer.Option(help="every so-manieth position takes part in the steps after the first")
    ] = 3,
    hard: Annotated[
        float, typer.Option(help="share of the loss on the target's best token instead of its distribution")
    ] = 0.0,
    temperature: Annotated[float, typer.Option(help="of the target's distribution")] = 1.0,
    optimizer: Annotated[str, typer.Option(help="adamw, or muon for the matrices inside the head")] = "adamw",
    lr: Annotated[float, typer.Option(help="highest learning rate")] = 1e-3,
    batch_tokens: Annotated[int, typer.Option(help="positions in a step of the optimiser")] = 2048,
    epochs: Annotated[int, typer.Option(help="passes over the data")] = 4,
    minutes: Annotated[float, typer.Option(help="of training, data not counted; 0: no limit")] = 0.0,
    eval_every: Annotated[int, typer.Option(help="steps between measurements of held-out acceptance")] = 100,
    patience: Annotated[int, typer.Option(help="measurements without a better one; 0: no early stop")] = 0,
    heldout: Annotated[int, typer.Option(help="answers to measure with")] = 32,
    seed: Annotated[int, typer.Option(help="of all that is drawn")] = 1,
    threads: Threads = None,
    device: Annotated[str, typer.Option(help="cpu or cuda, of the training")] = "cpu",
) -> None:
    """Train an EAGLE-3 head from nothing but the model's GGUF; may be stopped and run again at any moment."""
    given = locals()  # but for `model`, options are called what the settings are
    from .run import train as run

    report = run(
        TrainSettings(
            targets=tuple(map(str, model)), **{k: _setting(k, v) for k, v in given.items() if k != "model"}
        )
    )
    accepted = " ".join(f"{x:.3f}" for x in report.accept_per_position)
    print(f"held-out greedy chains: {report.mean_accepted_length:.2f} tokens a round, accepted at {accepted}")
    print(f"wrote {report.head_dir} (config.json, model.safetensors) and {report.gguf}")


def _setting(name: str, value: Any) -> Any:
    if name in LISTS and value:
        return numbers(value, LISTS[name], "--" + name.replace("_", "-"))
    if name in ("prompts", "conversations"):
        return tuple(map(str, value or ()))
    if name == "threads":
        return value or 0
    return str(value) if isinstance(value, Path) else value


def numbers(text: str, kind: type, name: str) -> tuple:
    """A comma-separated list."""
    try:
        return tuple(kind(x) for x in text.split(","))
    except ValueError:
        raise EagleError(
            ErrorKind.BAD_ARGUMENT, f"{name} is {text!r:.60}, expected numbers with commas between"
        ) from None
