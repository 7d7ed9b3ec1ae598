"""Trains an EAGLE-3 head. It needs only the target's GGUF.

    from eagle3_llama.train import TrainSettings, train
    train(TrainSettings(targets=("model.gguf",), out="my-head", max_tokens=1_000_000))

sources -> generate (llama.cpp's own forward pass, many sequences) -> shards -> data -> model, loss, loop ->
export. Needs the extra [train].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .settings import TrainSettings

if TYPE_CHECKING:
    from .run import TrainReport


def train(settings: TrainSettings) -> TrainReport:
    """Creates training data and a head in the folder settings.out. See run.train."""
    from .run import train as run

    return run(settings)


__all__ = ["TrainSettings", "train"]
