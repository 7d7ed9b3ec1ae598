"""Training data on disk: one safetensors file for each block of tasks, written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..convert.files import replacing
from ..errors import EagleError, ErrorKind
from .generate import Conversation, converse
from .settings import TrainSettings
from .sources import Tasks
from .target import Target

BLOCK = 64  # tasks a shard


class Shards:
    """A folder of shards made with one set of settings.

    A shard holds tokens int32 [n], features float16 [n, layers + 1, n_embd], best int32 [n], and of each
    conversation ends int64, n_prompt int32, greedy uint8. Every shard follows from the settings and its number,
    so that a run killed at any moment goes on where it was.
    """

    def __init__(self, folder: Path, settings: TrainSettings) -> None:
        self.folder, self.settings = folder, settings
        folder.mkdir(parents=True, exist_ok=True)
        key = json.loads(json.dumps(settings.data_key()))
        about = folder / "settings.json"
        if about.exists() and json.loads(about.read_text(encoding="utf-8")) != key:
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"{folder} has data made with other settings: name another --out, or remove it")
        with replacing(about) as part:
            part.write_text(json.dumps(key, indent=1) + "\n", encoding="utf-8")

    def path(self, n: int) -> Path:
        return self.folder / f"shard-{n:05d}.safetensors"

    def target_of(self, n: int) -> int:
        """Targets take turns."""
        return n % len(self.settings.targets)

    def fill(self, open_target: Callable[[str], Target], progress: Callable[[int, int, int], None]) -> list[Path]:
        """Makes what is missing until max_tokens or max_gb is reached; progress(tokens, made now, dropped)."""
        tasks, target, paths = Tasks(self.settings), None, []
        tokens = made = dropped = n_bytes = 0
        n = 0
        try:
            while tokens < self.settings.max_tokens and n_bytes < self.settings.max_gb * 1e9:
                if tasks.exhausted(n // len(self.settings.targets) * BLOCK):
                    break
                path = self.path(n)
                if not path.exists():
                    wanted = self.settings.targets[self.target_of(n)]
                    if target is None or target.path != wanted:
                        if target is not None:
                            target.close()
                        target = open_target(wanted)
                    done, bad = self._make(tasks, target, n, lambda k, d: progress(tokens + k, made + k, dropped + d))
                    made, dropped = made + done, dropped + bad
                about = shard_info(path)
                tokens, n_bytes, n = tokens + about["tokens"], n_bytes + path.stat().st_size, n + 1
                paths.append(path)
                progress(tokens, made, dropped)
        finally:
            if target is not None:
                target.close()
        if not tokens:
            raise EagleError(ErrorKind.BAD_VALUE, "the sources gave nothing to train on: answers were empty or looping")
        return paths

    def _make(self, tasks: Tasks, target: Target, n: int, progress: Callable[[int, int], None]) -> tuple[int, int]:
        # with several targets each reads the same tasks, so that a head sees every text in every format
        first = n // len(self.settings.targets) * BLOCK
        block = [tasks.task(first + i) for i in range(BLOCK) if not tasks.exhausted(first + i)]
        kept: list[Conversation] = []
        count = bad = 0
        for c in converse(target, block, self.settings.n_predict, self.settings.seed):
            if c is None or c.flaw(self.settings.drop_truncated):
                bad += 1
            else:
                kept.append(c)
                count += len(c.tokens)
            progress(count, bad)
        kept.sort(key=lambda c: c.index)
        write_shard(self.path(n), kept, target)
        return count, bad


def write_shard(path: Path, conversations: list[Conversation], target: Target) -> None:
    """An empty block is written too: it was done."""
    shape = (0, len(target.layers) + 1, target.n_embd)
    cat = lambda arrays, dtype, empty=(0,): np.concatenate(arrays) if arrays else np.empty(empty, dtype)  # noqa: E731
    tensors = {
        "tokens": cat([c.tokens for c in conversations], np.int32),
        "features": cat([c.features for c in conversations], np.float16, shape),
        "best": cat([c.best for c in conversations], np.int32),
        "ends": np.cumsum([len(c.tokens) for c in conversations], dtype=np.int64) if conversations else np.empty(0, np.int64),
        "n_prompt": np.array([c.n_prompt for c in conversations], np.int32),
        "greedy": np.array([c.greedy for c in conversations], np.uint8),
    }
    about = {"tokens": len(tensors["tokens"]), "layers": target.layers, "target": Path(target.path).name}
    with replacing(path) as part:
        save_file(tensors, part, metadata={"shard": json.dumps(about)})  # one key: their order would not be the same twice


def shard_info(path: Path) -> dict[str, Any]:
    """tokens, layers and target of a shard; a damaged one is refused by name."""
    try:
        with safe_open(path, "numpy") as f:
            about = json.loads(f.metadata()["shard"])
            return {"tokens": int(about["tokens"]), "layers": list(about["layers"]), "target": str(about["target"])}
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as e:
        raise EagleError(ErrorKind.BAD_FILE, f"{path} is damaged ({e}): remove it and run again") from e
