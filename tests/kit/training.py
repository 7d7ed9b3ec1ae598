"""What the training tests share."""

import json
from pathlib import Path


def lines(path, items):
    """items as JSON lines; returns the path as a string."""
    path.write_text("".join(json.dumps(i) + "\n" for i in items))
    return str(path)


def make_shards(settings, out, report=lambda *_: None):
    from eagle3_llama.train.shards import Shards
    from eagle3_llama.train.target import TrainingTarget

    def open_target(path):
        return TrainingTarget(path, settings.capture_layers or settings.layers, settings.slots, 256, 1)

    return Shards(Path(out) / "data", settings).fill(open_target, report)
