"""`eagle3-llama train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from ..errors import EagleError, ErrorKind
from .settings import TrainSettings



def train(target: Annotated[list[Path], typer.Option(help="the model to be served, GGUF; several formats of it make one head for all")],
          out: Annotated[Path, typer.Option(help="folder for data, log and head")],
          data: Annotated[Optional[Path], typer.Option(help="folder of the data, to share between runs; default: OUT/data")] = None,
          prompts: Annotated[Optional[list[Path]], typer.Option(help=".jsonl to answer: strings, {prompt} or {messages}; your own traffic is best")] = None,
          conversations: Annotated[Optional[list[Path]], typer.Option(help=".jsonl of finished conversations: {messages} or {toks, prompt}")] = None,
          weights: Annotated[str, typer.Option(help="shares of self-synthesis, prompts, conversations")] = "1,1,1",
          max_tokens: Annotated[int, typer.Option(help="of data")] = 1_000_000,
          max_gb: Annotated[float, typer.Option(help="of data on disk")] = 20.0,
          minutes: Annotated[float, typer.Option(help="of training, data not counted; 0: no limit")] = 0.0,
          epochs: int = 4, layers: Annotated[Optional[str], typer.Option(metavar="A,B,C", help="inputs of target layers to read")] = None,
          capture_layers: Annotated[Optional[str], typer.Option(metavar="A,B,C", help="those kept in the data, to try several --layers")] = None,
          draft_vocab: int = 8192, steps: Annotated[int, typer.Option(help="of training-time test")] = 5,
          stride: Annotated[int, typer.Option(help="every so-manieth position takes part in the steps after the first")] = 3,
          optimizer: Annotated[str, typer.Option(help="adamw, or muon for the matrices inside the head")] = "adamw", lr: float = 1e-3, batch_tokens: int = 2048, n_predict: int = 256, hard: float = 0.0, temperature: float = 1.0,
          eval_every: int = 100, patience: Annotated[int, typer.Option(help="measurements without a better one; 0: no early stop")] = 0,
          heldout: int = 32, init_from: Annotated[Optional[Path], typer.Option(help="a head's checkpoint folder to go on from")] = None,
          drop_truncated: bool = False, seed: int = 1, threads: int = 0, slots: Annotated[int, typer.Option(help="sequences at once")] = 32,
          device: Annotated[str, typer.Option(help="cpu or cuda, of the training")] = "cpu",
          capture: Annotated[str, typer.Option(help="llama: features from llama.cpp; torch: on --device, from the dequantised weights")] = "llama") -> None:  # fmt: skip
    """Train an EAGLE-3 head from nothing but the model's GGUF; may be stopped and run again at any moment."""
    from .run import train as run

    settings = TrainSettings(
        targets=tuple(map(str, target)), out=str(out), prompts=tuple(map(str, prompts or ())), conversations=tuple(map(str, conversations or ())),
        weights=numbers(weights, float, "--weights"), max_tokens=max_tokens, max_gb=max_gb, minutes=minutes, epochs=epochs,
        layers=numbers(layers, int, "--layers") if layers else None, data=str(data) if data else None, stride=stride,
        capture_layers=numbers(capture_layers, int, "--capture-layers") if capture_layers else None, draft_vocab=draft_vocab, steps=steps, lr=lr, batch_tokens=batch_tokens,
        n_predict=n_predict, hard=hard, optimizer=optimizer, temperature=temperature, eval_every=eval_every, patience=patience, heldout=heldout,
        init_from=str(init_from) if init_from else None, drop_truncated=drop_truncated, seed=seed, threads=threads, slots=slots, device=device,
        capture=capture)
    report = run(settings)
    accepted = " ".join(f"{x:.3f}" for x in report.accept_per_position)
    print(f"held-out greedy chains: {report.mean_accepted_length:.2f} tokens a round, accepted at {accepted}")
    print(f"wrote {report.head_dir} (config.json, model.safetensors) and {report.gguf}")


def numbers(text: str, kind: type, name: str) -> tuple:
    """A comma-separated list."""
    try:
        return tuple(kind(x) for x in text.split(","))
    except ValueError:
        raise EagleError(ErrorKind.BAD_ARGUMENT, f"{name} is {text!r:.60}, expected numbers with commas between") from None
