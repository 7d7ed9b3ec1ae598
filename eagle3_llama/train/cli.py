"""`eagle3-llama train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..common.options import Threads
from ..errors import EagleError, ErrorKind
from .settings import TrainSettings

LISTS = {"weights": float, "layers": int, "capture_layers": int}  # options with comma-separated values


def train(
    model: Annotated[
        list[Path],
        typer.Option(
            "--model",
            "-m",
            help="target model, GGUF or hf: name; repeat it with other formats to train one head for all",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="folder for data, log and head", show_default=False)],
    data: Annotated[
        Path | None, typer.Option(help="folder of the training data, which runs can share; default: OUT/data")
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help=".jsonl of prompts to answer: strings, {prompt} or {messages}; best is your traffic"
        ),
    ] = None,
    conversations: Annotated[
        list[Path] | None, typer.Option(help=".jsonl of finished conversations: {messages} or {toks, prompt}")
    ] = None,
    weights: Annotated[
        str, typer.Option(help="shares of self-written prompts, --prompts, --conversations in the data")
    ] = "1,1,1",
    max_tokens: Annotated[int, typer.Option(help="most tokens of training data")] = 1_000_000,
    max_gb: Annotated[float, typer.Option(help="most gigabytes of training data on disk")] = 20.0,
    n_predict: Annotated[
        int, typer.Option("--n-predict", "-n", help="most tokens to generate per answer")
    ] = 256,
    drop_truncated: Annotated[
        bool, typer.Option(metavar="", help="drop answers that reach --n-predict")
    ] = False,
    slots: Annotated[int, typer.Option(help="sequences that are generated in parallel")] = 32,
    capture: Annotated[
        str,
        typer.Option(help="llama: features from llama.cpp; torch: on --device, from the dequantised weights"),
    ] = "llama",
    layers: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="target layers whose inputs the head reads")
    ] = None,
    capture_layers: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="layers to keep in the data, to try several --layers")
    ] = None,
    draft_vocab: Annotated[
        int, typer.Option(help="size of the draft vocabulary, the most frequent tokens")
    ] = 8192,
    init_from: Annotated[
        Path | None,
        typer.Option(help="checkpoint folder of a head, or its hf: name, to continue training from"),
    ] = None,
    steps: Annotated[int, typer.Option(help="steps of training-time test")] = 5,
    stride: Annotated[int, typer.Option(help="after the first step, use only every n-th position")] = 3,
    hard: Annotated[
        float, typer.Option(help="share of the loss on the target's best token instead of its distribution")
    ] = 0.0,
    temperature: Annotated[
        float, typer.Option("--temp", "--temperature", help="temperature of the target's distribution")
    ] = 1.0,
    optimizer: Annotated[str, typer.Option(help="adamw, or muon for the matrices inside the head")] = "adamw",
    lr: Annotated[float, typer.Option(help="highest learning rate")] = 1e-3,
    batch_tokens: Annotated[int, typer.Option(help="positions per optimiser step")] = 2048,
    epochs: Annotated[int, typer.Option(help="passes over the data")] = 4,
    minutes: Annotated[
        float, typer.Option(help="most minutes of training, without data generation; 0: no limit")
    ] = 0.0,
    eval_every: Annotated[int, typer.Option(help="steps between measurements of held-out acceptance")] = 100,
    patience: Annotated[
        int, typer.Option(help="stop after this many measurements without improvement; 0: never")
    ] = 0,
    heldout: Annotated[int, typer.Option(help="held-out answers to measure acceptance with")] = 32,
    seed: Annotated[int, typer.Option(help="seed of every random choice")] = 1,
    threads: Threads = None,
    device: Annotated[str, typer.Option(help="device of the training, cpu or cuda")] = "cpu",
) -> None:
    """Train an EAGLE-3 head from the model's GGUF. You can stop it at any time and run it again."""
    given = locals()  # except for `model`, the options have the names of the settings
    from .run import train as run

    settings = {k: _setting(k, v) for k, v in given.items() if k != "model"}
    report = run(TrainSettings(targets=tuple(map(str, model)), **settings))
    rates = " ".join(f"{x:.3f}" for x in report.accept_per_position)
    length = f"{report.mean_accepted_length:.2f} tokens per round"
    print(f"held-out greedy chains: {length}, accepted by position {rates}")
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
    """Parses a comma-separated list of numbers. Raises EagleError BAD_ARGUMENT with the option's name."""
    try:
        return tuple(kind(x) for x in text.split(","))
    except ValueError:
        raise EagleError(
            ErrorKind.BAD_ARGUMENT, f"{name} is {text!r:.60}, expected comma-separated numbers"
        ) from None
