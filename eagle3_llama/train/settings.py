"""The settings of a training run: a frozen dataclass, validated when it is created."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from ..common import model_names
from ..common.keywords import strict
from ..common.model_files import check_file, check_models
from ..common.model_reader import fingerprint, read_model
from ..common.options import Threads
from ..common.settings import OneOf, Option, Range, check, option, option_name, require
from ..errors import EagleError, ErrorKind
from ..heads.hub import checkpoint_folder

PACE_STEPS = 5  # after this many steps of training the speed is known


def _list(kind: type, help: str, metavar: str = "A,B,C") -> Option:
    """An option for comma-separated numbers."""

    def numbers(given: Any, name: str) -> Any:
        try:
            return tuple(map(kind, given.split(","))) if isinstance(given, str) and given else given
        except ValueError:
            message = f"{option_name(name)} is {given!r:.60}, expected comma-separated numbers"
            raise EagleError(ErrorKind.BAD_ARGUMENT, message) from None

    return option(help, parser=numbers, metavar=metavar)


@strict
@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """Everything that the result depends on. On one machine, equal settings and files give the same head.

    The fields are the options of `eagle3-llama train`, whose help says what they do. targets: GGUFs of one
    model in one or several formats; the first is the one to serve. max_gb is checked between files. layers:
    None for EAGLE's 2, n/2, n - 3. decay: the weight of step j in the loss is decay^j. warmup: share of the
    steps in which the learning rate rises.

    Raises EagleError BAD_ARGUMENT or BAD_FILE.
    """

    targets: tuple[str, ...]
    out: Annotated[str, option("folder for data, log and head", show_default=False), Path]
    data: Annotated[
        str | None, "folder of the training data, which runs can share; default: OUT/data", Path | None
    ] = None
    prompts: Annotated[
        tuple[str, ...],
        ".jsonl of prompts to answer: strings, {prompt} or {messages}; best is your traffic",
        list[Path] | None,
    ] = ()
    conversations: Annotated[
        tuple[str, ...], ".jsonl of finished conversations: {messages} or {toks, prompt}", list[Path] | None
    ] = ()
    weights: Annotated[
        tuple[float, float, float],
        _list(float, "shares of self-written prompts, --prompts, --conversations in the data", "<str>"),
        str,
    ] = (1.0, 1.0, 1.0)
    max_tokens: Annotated[int, "most tokens of training data", Range(256)] = 1_000_000
    max_gb: Annotated[float, "most gigabytes of training data on disk", Range(0.001, 1e6)] = 20.0
    n_predict: Annotated[int, option("most tokens to generate per answer", "--n-predict", "-n"), Range(8)] = (
        256
    )
    drop_truncated: Annotated[bool, option("drop answers that reach --n-predict", metavar="")] = False
    slots: Annotated[int, "sequences that are generated in parallel", Range(1)] = 32
    capture: Annotated[
        str,
        "llama: features from llama.cpp; torch: on --device, from the dequantised weights",
        OneOf("llama", "torch"),
    ] = "llama"
    layers: Annotated[
        tuple[int, ...] | None, _list(int, "target layers whose inputs the head reads"), str | None
    ] = None
    capture_layers: Annotated[
        tuple[int, ...] | None, _list(int, "layers to keep in the data, to try several --layers"), str | None
    ] = None
    draft_vocab: Annotated[int, "size of the draft vocabulary, the most frequent tokens", Range(32)] = 8192
    init_from: Annotated[
        str | None, "checkpoint folder of a head, or its hf: name, to continue training from", Path | None
    ] = None
    steps: Annotated[int, "steps of training-time test", Range(1)] = 5
    stride: Annotated[int, "after the first step, use only every n-th position", Range(1)] = 3
    decay: Annotated[float, Range(0, 1)] = 0.8
    hard: Annotated[
        float, "share of the loss on the target's best token instead of its distribution", Range(0, 1)
    ] = 0.0
    temperature: Annotated[
        float, option("temperature of the target's distribution", "--temp", "--temperature"), Range(0.05, 20)
    ] = 1.0
    optimizer: Annotated[str, "adamw, or muon for the matrices inside the head", OneOf("adamw", "muon")] = (
        "adamw"
    )
    lr: Annotated[float, "highest learning rate", Range(0, 1)] = 1e-3
    warmup: Annotated[float, Range(0, 1)] = 0.03
    batch_tokens: Annotated[int, "positions per optimiser step", Range(64)] = 2048
    epochs: Annotated[int, "passes over the data", Range(1)] = 4
    minutes: Annotated[
        float, "most minutes of training, without data generation; 0: no limit", Range(0, 1e6)
    ] = 0.0
    eval_every: Annotated[int, "steps between measurements of held-out acceptance", Range(1)] = 100
    patience: Annotated[int, "stop after this many measurements without improvement; 0: never", Range(0)] = 0
    heldout: Annotated[int, "held-out answers to measure acceptance with", Range(1)] = 32
    seed: Annotated[int, "seed of every random choice"] = 1
    threads: Annotated[int, Threads, Range(0)] = 0
    device: Annotated[str, "device of the training, cpu or cuda"] = "cpu"

    def __post_init__(self) -> None:
        require(bool(self.targets), "give at least one GGUF with --model")
        object.__setattr__(self, "targets", tuple(map(model_names.model, self.targets)))
        for target in self.targets:
            check_models(target)
        for path in (*self.prompts, *self.conversations):
            check_file(path)
        for name in ("capture", "optimizer"):
            object.__setattr__(self, name, str(getattr(self, name)).lower())
        check(self)
        self._check_layers()
        self._check_places()
        require(self.steps <= 16, f"steps is {self.steps}, expected at most 16")
        require(
            len(self.weights) == 3 and min(self.weights) >= 0 and sum(self.weights) > 0,
            f"weights are {self.weights}, expected three numbers, not all 0",
        )

    def _check_layers(self) -> None:
        """The head's checkpoint lists outputs of layers, so it has no number for the input of layer 0."""
        n_layer = min(layers_of(Path(target)) for target in self.targets)
        for name, least in (("layers", 1), ("capture_layers", 0)):
            for layer in getattr(self, name) or ():
                require(
                    type(layer) is int and least <= layer <= n_layer,
                    f"{name} has {layer!r:.40}, expected numbers {least}..{n_layer}: the target has {n_layer}"
                    " layers",
                )
        missing = set(self.layers or ()) - set(self.capture_layers or self.layers or ())
        require(not missing, f"capture_layers lacks {sorted(missing)}, which layers has: add them")

    def _check_places(self) -> None:
        for name in ("out", "data"):
            place = getattr(self, name)
            fine = place is None or not Path(place).exists() or Path(place).is_dir()
            require(fine, f"{name} is {place}, a file: name a folder")
        if self.init_from is not None:
            object.__setattr__(self, "init_from", str(checkpoint_folder(self.init_from)))
            fine = (Path(self.init_from) / "config.json").is_file()
            message = f"init_from is {self.init_from}, expected the folder with a head's config.json"
            require(fine, message, ErrorKind.BAD_FILE)

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
