"""Checkpoints: everything that a stopped run needs to continue with the same result.

Each says what it belongs to: the settings, the content of the files, the data and the draft vocabulary. A row
of the head's lm_head means the token that d2t has for it, so another d2t would make it another token's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..common.files import replacing
from ..errors import EagleError, ErrorKind
from .data import Corpus
from .settings import TrainSettings

# Time limits and places may change between runs; files count by their content.
FREE = ("minutes", "out", "data", "threads", "device", "eval_every", "slots")
FILES = ("targets", "prompts", "conversations", "init_from")
Identity = dict[str, dict[str, Any]]  # what a checkpoint depends on, by kind and name


def identity(settings: TrainSettings, corpus: Corpus, d2t: np.ndarray) -> Identity:
    """The settings that the result of a run depends on. d2t: target id by draft id, int64."""
    chosen = {k: v for k, v in dataclasses.asdict(settings).items() if k not in (*FREE, *FILES)}
    found = {
        "settings": chosen,
        "files": {**settings.files(), "init_from": settings.first_head()},
        "data": {
            "conversations": corpus.digest(),
            "draft vocabulary": hashlib.sha256(np.ascontiguousarray(d2t, "<i8").tobytes()).hexdigest(),
        },
    }
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]  # as it is read again


def save(path: Path, of: Identity, state: dict[str, Any]) -> None:
    """Writes a checkpoint, completely or not at all. of: identity(). Raises EagleError as replacing()."""
    with replacing(path) as part, part.open("wb") as f:  # PyTorch does not say why it cannot write to a path
        torch.save({"of": json.dumps(of), **state}, f)


def load(path: Path, of: Identity) -> dict[str, Any] | None:
    """The checkpoint, or None if there is none. of: identity().

    Raises EagleError if it is damaged or belongs to other settings, files or data.
    """
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        made: Identity = json.loads(state["of"])
        others = {kind: _differing(made.get(kind, {}), of[kind]) for kind in of}
    except Exception as e:  # torch does not document what it raises for a damaged file
        raise EagleError(
            ErrorKind.BAD_FILE,
            f"{path} is damaged, or of an earlier version ({type(e).__name__}): remove it and run again",
        ) from e
    for kind, names in others.items():
        if names:
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"{path} was made with other {kind} ({', '.join(names)}): choose another --out, or remove it",
            )
    return state


def _differing(made: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    return sorted(name for name in made.keys() | wanted.keys() if made.get(name) != wanted.get(name))
