"""Checkpoints: everything that a stopped run needs to continue with the same result."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from ..common.files import replacing
from ..errors import EagleError, ErrorKind
from .settings import TrainSettings


def key(settings: TrainSettings) -> dict[str, Any]:
    """The settings that the result depends on. Time limits and folders may change between runs."""
    out = dataclasses.asdict(settings)
    for name in ("minutes", "out", "data", "threads", "device", "eval_every", "slots"):
        out.pop(name)
    return json.loads(json.dumps(out))


def save(path: Path, settings: TrainSettings, state: dict[str, Any]) -> None:
    """Writes a checkpoint, completely or not at all."""
    with replacing(path) as part:
        torch.save({"settings": json.dumps(key(settings)), **state}, part)


def load(path: Path, settings: TrainSettings) -> dict[str, Any] | None:
    """The checkpoint, or None if there is none. Raises EagleError if it is damaged or has other settings."""
    if not path.exists():
        return None
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
        made = json.loads(state["settings"])
    except Exception as e:  # torch does not document what it raises for a damaged file
        raise EagleError(
            ErrorKind.BAD_FILE, f"{path} is damaged ({type(e).__name__}): remove it and run again"
        ) from e
    if made != key(settings):
        changed = ", ".join(sorted(k for k in made if made[k] != key(settings).get(k)))
        raise EagleError(
            ErrorKind.BAD_ARGUMENT,
            f"{path} was made with other settings ({changed}): choose another --out, or remove it",
        )
    return state
