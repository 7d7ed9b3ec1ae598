"""`eagle3-llama train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from ..common.settings import option, with_options
from .settings import TrainSettings


@with_options(TrainSettings)
def train(
    model: Annotated[
        list[Path],
        option(
            "target model, GGUF or hf: name; repeat it with other formats to train one head for all",
            "--model",
            "-m",
            show_default=False,
        ),
    ],
    **given: Any,
) -> None:
    """Train an EAGLE-3 head from the model's GGUF. You can stop it at any time and run it again."""
    from .run import train as run

    report = run(TrainSettings(targets=tuple(map(str, model)), **given))
    rates = " ".join(f"{x:.3f}" for x in report.accept_per_position)
    length = f"{report.mean_accepted_length:.2f} tokens per round"
    print(f"held-out greedy chains: {length}, accepted by position {rates}")
    print(f"wrote {report.head_dir} (config.json, model.safetensors) and {report.gguf}")
