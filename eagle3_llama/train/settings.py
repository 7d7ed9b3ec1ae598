"""The settings of a training run: a frozen dataclass, validated when it is created."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from ..common import model_names
from ..common.keywords import strict
from ..common.model_files import check_file, check_models
from ..common.model_reader import fingerprint, read_model
from ..errors import EagleError, ErrorKind
from ..heads.hub import checkpoint_folder

PACE_STEPS = 5  # after this many steps of training the speed is known


@strict
@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """Everything that the result depends on. On one machine, equal settings and files give the same head.

    targets: GGUFs of one model in one or several formats; the first is the one to serve.
    data: folder of the shards, None for out/data. Runs with the same data settings can share it.
    weights: shares of the sources: prompts that the model writes itself, `prompts`, `conversations`.
    max_tokens, max_gb: limits of the data, over all targets. max_gb is checked between files.
    drop_truncated: drop answers that reach n_predict tokens.
    layers: target layers whose inputs the head reads, None for EAGLE's 2, n/2, n - 3.
    capture_layers: the layers in the data, if more than `layers`, to try several heads on the same data.
    draft_vocab: size of the draft vocabulary, the most frequent tokens.
    steps, stride: steps of training-time test; after the first one, only every stride-th position takes part.
    decay: the weight of step j in the loss is decay^j.
    hard: share of the loss on the target's most likely token instead of its distribution.
    temperature: of the target's distribution.
    batch_tokens: positions per optimiser step. minutes: limit of the training without data, 0 for none.
    patience: stop after this many measurements without improvement, 0 for never.
    capture: `llama` computes features with llama.cpp, `torch` on `device` from the dequantised weights.

    Raises EagleError BAD_ARGUMENT or BAD_FILE.
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
        self._check(bool(self.targets), "give at least one GGUF with --model")
        object.__setattr__(self, "targets", tuple(map(model_names.model, self.targets)))
        for target in self.targets:
            check_models(target)
        for path in (*self.prompts, *self.conversations):
            check_file(path)
        for name in ("capture", "optimizer"):
            object.__setattr__(self, name, str(getattr(self, name)).lower())
        self._check_layers()
        self._check_places()
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
                isinstance(value, int) and value >= least, f"{name} is {value!r}, expected at least {least}"
            )
        for name, low, high in (
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
                math.isfinite(value) and low <= value <= high, f"{name} is {value!r}, expected {low}..{high}"
            )
        for name, known in (("capture", ("llama", "torch")), ("optimizer", ("adamw", "muon"))):
            value = getattr(self, name)
            self._check(value in known, f"{name} is {value!r}, expected {' or '.join(known)}")
        self._check(self.steps <= 16, f"steps is {self.steps}, expected at most 16")
        self._check(
            len(self.weights) == 3 and min(self.weights) >= 0 and sum(self.weights) > 0,
            f"weights are {self.weights}, expected three numbers, not all 0",
        )

    def _check_layers(self) -> None:
        """The head's checkpoint lists outputs of layers, so it has no number for the input of layer 0."""
        n_layer = min(layers_of(Path(target)) for target in self.targets)
        for name, least in (("layers", 1), ("capture_layers", 0)):
            for layer in getattr(self, name) or ():
                self._check(
                    type(layer) is int and least <= layer <= n_layer,
                    f"{name} has {layer!r:.40}, expected numbers {least}..{n_layer}: the target has {n_layer}"
                    " layers",
                )
        missing = set(self.layers or ()) - set(self.capture_layers or self.layers or ())
        self._check(not missing, f"capture_layers lacks {sorted(missing)}, which layers has: add them")

    def _check_places(self) -> None:
        for name in ("out", "data"):
            place = getattr(self, name)
            fine = place is None or not Path(place).exists() or Path(place).is_dir()
            self._check(fine, f"{name} is {place}, a file: name a folder")
        if self.init_from is not None:
            object.__setattr__(self, "init_from", str(checkpoint_folder(self.init_from)))
            fine = (Path(self.init_from) / "config.json").is_file()
            message = f"init_from is {self.init_from}, expected the folder with a head's config.json"
            self._check(fine, message, ErrorKind.BAD_FILE)

    @staticmethod
    def _check(ok: bool, message: str, kind: ErrorKind = ErrorKind.BAD_ARGUMENT) -> None:
        if not ok:
            raise EagleError(kind, message)

    def source_weights(self) -> tuple[float, float, float]:
        """The weights, with 0 for sources without files. Raises EagleError BAD_ARGUMENT if all are 0."""
        own, prompts, conversations = self.weights
        w = own, prompts if self.prompts else 0.0, conversations if self.conversations else 0.0
        if sum(w) == 0:
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                "there is no source of data: set --prompts, --conversations, or the first of --weights",
            )
        return w

    def data_key(self) -> dict[str, Any]:
        """The settings that the shards depend on, files by their content.

        A folder with shards of other settings is refused. A higher max_tokens only adds shards.
        """
        names = ("weights", "n_predict", "drop_truncated", "seed", "capture")
        layers = self.capture_layers or self.layers
        return {**{name: getattr(self, name) for name in names}, **self.files(), "layers": layers}

    def files(self) -> dict[str, list[str]]:
        """The fingerprints of the files that the data depends on, by the names of the settings."""
        names = ("targets", "prompts", "conversations")
        return {name: [fingerprint(path) for path in getattr(self, name)] for name in names}

    def first_head(self) -> list[str]:
        """The fingerprints of the files of init_from, none without it."""
        kinds = (".json", ".safetensors", ".bin")
        folder = sorted(Path(self.init_from).iterdir()) if self.init_from else []
        return [fingerprint(path) for path in folder if path.suffix in kinds]


def layers_of(target: Path) -> int:
    """The number of layers of a model, without those for multi-token prediction. Raises EagleError."""
    file = read_model(target)
    arch = file.string("general.architecture")
    return file.size_of(f"{arch}.block_count") - file.size_of(f"{arch}.nextn_predict_layers", 0)
