"""Training of an EAGLE-3 head from nothing but the target's GGUF.

    from eagle3_llama.train import TrainSettings, train
    train(TrainSettings(targets=("model.gguf",), out="my-head", max_tokens=1_000_000))

sources -> generate (llama.cpp's own forward pass, many sequences) -> shards -> data -> model, loss, loop -> export.
Needs the extra [train].
"""

from .settings import TrainSettings


def train(settings: TrainSettings):
    """Makes data and a head in settings.out; see run.train."""
    from .run import train as run

    return run(settings)


__all__ = ["TrainSettings", "train"]
