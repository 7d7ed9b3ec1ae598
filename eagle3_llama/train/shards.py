"""Training data on disk: one safetensors file for each block of tasks, written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..common.files import replacing
from ..errors import EagleError, ErrorKind
from .generate import Conversation, converse
from .settings import TrainSettings
from .sources import Task, Tasks
from .target import Target

BLOCK = 64  # tasks a shard
RUN = 4  # shards that one target makes before the next has its turn; their tasks share its slots


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
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"{folder} has data made with other settings: name another --out, or remove it",
            )
        with replacing(about) as part:
            part.write_text(json.dumps(key, indent=1) + "\n", encoding="utf-8")

    def path(self, n: int) -> Path:
        return self.folder / f"shard-{n:05d}.safetensors"

    def target_of(self, n: int) -> int:
        """Targets take turns: new text teaches a head more than the same text in another format."""
        return n // RUN % len(self.settings.targets)

    def fill(
        self, open_target: Callable[[str], Target], progress: Callable[[int, int, int], None]
    ) -> list[Path]:
        """Makes what is missing until max_tokens or max_gb is reached; progress(tokens, made now, dropped)."""
        tasks, paths = Tasks(self.settings), []
        tokens = made = dropped = n_bytes = n = 0
        target: Target | None = None
        making: Iterator[tuple[int, int, bool]] | None = None
        try:
            while (
                tokens < self.settings.max_tokens
                and n_bytes < self.settings.max_gb * 1e9
                and not tasks.exhausted(n * BLOCK)
            ):
                path = self.path(n)
                if path.exists():
                    about = shard_info(path)
                    tokens, n_bytes, n = tokens + about["tokens"], n_bytes + path.stat().st_size, n + 1
                    paths.append(path)
                    progress(tokens, made, dropped)
                    continue
                if making is None:
                    wanted = self.settings.targets[self.target_of(n)]
                    if target is None or target.path != wanted:
                        if target is not None:
                            target.close()
                        target = open_target(wanted)
                    making = self.make(
                        tasks, target, [k for k in range(n, n - n % RUN + RUN) if not self.path(k).exists()]
                    )
                under_way = 0
                for count, bad, whole in making:
                    made, dropped, under_way = made + count, dropped + bad, under_way + count
                    progress(tokens + under_way, made, dropped)
                    if whole:
                        break
                else:
                    making = None
        finally:
            if target is not None:
                target.close()
        if not tokens:
            raise EagleError(ErrorKind.BAD_VALUE, "the sources gave nothing to train on: answers were empty")
        return paths

    def make(self, tasks: Tasks, target: Target, numbers: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
        """Shards of one target; yields (tokens, answers dropped, whether a shard was written) after each task."""

        def wanted() -> Iterator[Task]:
            for n in numbers:
                yield from (
                    tasks.task(i) for i in range(n * BLOCK, n * BLOCK + BLOCK) if not tasks.exhausted(i)
                )

        missing = {
            n: sum(not tasks.exhausted(i) for i in range(n * BLOCK, n * BLOCK + BLOCK)) for n in numbers
        }
        kept: dict[int, list[Conversation]] = {n: [] for n in numbers}
        for index, c in converse(target, wanted(), self.settings.n_predict, self.settings.seed):
            n = index // BLOCK
            missing[n] -= 1
            good = c is not None and not c.flaw(self.settings.drop_truncated)
            if good:
                kept[n].append(c)
            if not missing[n]:
                write_shard(self.path(n), sorted(kept.pop(n), key=lambda c: c.index), target)
            yield len(c.tokens) if good else 0, int(not good), not missing[n]


def write_shard(path: Path, conversations: list[Conversation], target: Target) -> None:
    """An empty block is written too: it was done."""
    shape = (0, len(target.layers) + 1, target.n_embd)
    cat = lambda arrays, dtype, empty=(0,): np.concatenate(arrays) if arrays else np.empty(empty, dtype)
    tensors = {
        "tokens": cat([c.tokens for c in conversations], np.int32),
        "features": cat([c.features for c in conversations], np.float16, shape),
        "best": cat([c.best for c in conversations], np.int32),
        "ends": np.cumsum([len(c.tokens) for c in conversations], dtype=np.int64)
        if conversations
        else np.empty(0, np.int64),
        "n_prompt": np.array([c.n_prompt for c in conversations], np.int32),
        "greedy": np.array([c.greedy for c in conversations], np.uint8),
    }
    about = {
        "tokens": len(tensors["tokens"]),
        "layers": target.layers,
        "n_layer": target.n_layer,
        "target": Path(target.path).name,
    }
    with replacing(path) as part:
        save_file(
            tensors, part, metadata={"shard": json.dumps(about)}
        )  # one key: their order would not be the same twice


def shard_info(path: Path) -> dict[str, Any]:
    """tokens, layers and target of a shard; a damaged one is refused by name."""
    try:
        with safe_open(path, "numpy") as f:
            about = json.loads(f.metadata()["shard"])
            return {
                "tokens": int(about["tokens"]),
                "layers": list(about["layers"]),
                "n_layer": int(about["n_layer"]),
                "target": str(about["target"]),
            }
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as e:
        raise EagleError(ErrorKind.BAD_FILE, f"{path} is damaged ({e}): remove it and run again") from e
