"""What the converter has to know of a layout."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..config import Config


class Ids(enum.Enum):
    """What a config's list of layer ids counts."""

    OUTPUTS = "outputs"  # of layers: one less than llama.cpp's layer_inp
    INPUTS = "inputs"  # of layers, n_layer being after the last: llama.cpp's layer_inp


@dataclass(frozen=True)
class Layout:
    name: str
    matches: Callable[[Config, set[str]], bool]  # config, names of the tensors
    tensors: Mapping[str, str]  # name in the checkpoint -> name in the GGUF
    layer_ids: tuple[tuple[str, Ids], ...] = ()  # config keys that list the captured layers, the first present counts
    ignored: tuple[str, ...] = ()  # ends of the names of tensors that hold nothing of the head

    def source_name(self, name: str) -> str:
        """A GGUF name -> the checkpoint's, for messages."""
        return next((theirs for theirs, ours in self.tensors.items() if ours == name), name)
