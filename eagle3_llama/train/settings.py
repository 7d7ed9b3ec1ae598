"""What a training run is told: one frozen dataclass, validated once."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from ..common.keywords import strict
from ..errors import EagleError, ErrorKind


@strict
@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """All that decides the result. Two runs with equal settings and files give the same head on one machine.

    targets: GGUFs of one model, the first of them the one to be served; more formats make one head for all.
    data: folder of the shards, None for out/data; runs may share one, if they agree about it.
    max_tokens: of data, over all targets. layers: captured inputs; None takes 2, n/2, n - 3 as EAGLE does.
    capture_layers: what the data holds, if more than layers: many heads can then be tried on the same data.
    draft_vocab: most frequent target tokens the head may draft. steps: of training-time test; from the second on
    every stride-th position takes part.
    batch_tokens: positions an optimiser step sees. minutes: of training, data not counted; 0 is no limit.
    weights: of the sources (self-synthesis, prompts, conversations) when tasks are drawn.
    capture: llama computes features with llama.cpp, torch on `device` with the dequantised weights.
    hard: share of the loss on the target's best token instead of its distribution. temperature: of the soft labels.
    """

    targets: tuple[str, ...]
    out: str
    data: str | None = None
    prompts: tuple[str, ...] = ()
    conversations: tuple[str, ...] = ()
    weights: tuple[float, float, float] = (1.0, 1.0, 1.0)
    max_tokens: int = 1_000_000
    max_gb: float = 20.0
    n_predict: int = 256
    drop_truncated: bool = False
    layers: tuple[int, ...] | None = None
    capture_layers: tuple[int, ...] | None = None
    draft_vocab: int = 8192
    steps: int = 5
    stride: int = 3
    decay: float = 0.8
    hard: float = 0.0
    temperature: float = 1.0
    optimizer: str = "adamw"
    lr: float = 1e-3
    warmup: float = 0.03
    batch_tokens: int = 2048
    epochs: int = 4
    minutes: float = 0.0
    eval_every: int = 100
    patience: int = 0
    heldout: int = 32
    init_from: str | None = None
    seed: int = 1
    threads: int = 0
    slots: int = 32
    device: str = "cpu"
    capture: str = "llama"

    def __post_init__(self) -> None:
        self._check(bool(self.targets), "targets", "name at least one GGUF with --model")
        for path in (*self.targets, *self.prompts, *self.conversations):
            self._check(Path(path).is_file(), "files", f"no such file: {path}", ErrorKind.BAD_FILE)
        for name, least in (
            ("max_tokens", 256),
            ("n_predict", 8),
            ("draft_vocab", 32),
            ("steps", 1),
            ("stride", 1),
            ("batch_tokens", 64),
            ("epochs", 1),
            ("eval_every", 1),
            ("heldout", 1),
            ("slots", 1),
            ("patience", 0),
            ("threads", 0),
        ):
            value = getattr(self, name)
            self._check(
                isinstance(value, int) and value >= least,
                name,
                f"{name} is {value!r}, expected at least {least}",
            )
        for name, least, most in (
            ("lr", 0, 1),
            ("decay", 0, 1),
            ("hard", 0, 1),
            ("warmup", 0, 1),
            ("minutes", 0, 1e6),
            ("temperature", 0.05, 20),
            ("max_gb", 0.001, 1e6),
        ):
            value = getattr(self, name)
            self._check(
                math.isfinite(value) and least <= value <= most,
                name,
                f"{name} is {value!r}, expected {least}..{most}",
            )
        self._check(
            self.capture in ("llama", "torch"),
            "capture",
            f"capture is {self.capture!r}, expected llama or torch",
        )
        self._check(
            self.optimizer in ("adamw", "muon"),
            "optimizer",
            f"optimizer is {self.optimizer!r}, expected adamw or muon",
        )
        self._check(self.steps <= 16, "steps", f"steps is {self.steps}, expected at most 16")
        self._check(
            len(self.weights) == 3 and min(self.weights) >= 0 and sum(self.weights) > 0,
            "weights",
            f"weights are {self.weights}, expected three numbers, not all 0",
        )

    @staticmethod
    def _check(ok: bool, name: str, message: str, kind: ErrorKind = ErrorKind.BAD_ARGUMENT) -> None:
        if not ok:
            raise EagleError(kind, message)

    def source_weights(self) -> tuple[float, float, float]:
        """weights, with 0 for sources that have no files."""
        w = (
            self.weights[0],
            self.weights[1] if self.prompts else 0.0,
            self.weights[2] if self.conversations else 0.0,
        )
        if sum(w) == 0:
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                "no data source is left: give --prompts, --conversations or a weight for self-synthesis",
            )
        return w

    def data_key(self) -> dict[str, object]:
        """The settings that decide each shard; a folder of shards made with others is refused, more tokens are added."""
        names = ("weights", "n_predict", "drop_truncated", "seed", "capture")
        files = {
            name: [[Path(f).name, Path(f).stat().st_size] for f in getattr(self, name)]
            for name in ("targets", "prompts", "conversations")
        }
        return (
            {name: getattr(self, name) for name in names}
            | files
            | {"layers": self.capture_layers or self.layers}
        )
