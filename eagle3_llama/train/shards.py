"""Training data on disk: one safetensors file per block of tasks. A file is either complete or not there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..common.files import make_folder, remove_stale, replacing, write_json
from ..errors import EagleError, ErrorKind
from .generate import Conversation, converse
from .settings import TrainSettings
from .sources import Tasks
from .target import TrainingTarget

BLOCK = 64  # tasks per shard
RUN = 4  # shards that one target generates together before it is the next target's turn


class Shards:
    """A folder of shards, all with the same data settings.

    A shard has tokens int32 [n], features float16 [n, layers + 1, n_embd], best int32 [n], and for each
    conversation ends int64, n_prompt int32, greedy uint8. It depends only on the settings and its number, so
    a run that was killed can continue. Raises EagleError BAD_ARGUMENT for a folder with other settings.
    """

    def __init__(self, folder: Path, settings: TrainSettings) -> None:
        self.folder, self.settings = folder, settings
        self.key, self.about = json.loads(json.dumps(settings.data_key())), folder / "settings.json"
        self.digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()
        if self.path(0).exists():  # else a run of other settings may have failed, and left settings.json
            self._check(self.path(0))

    def _check(self, path: Path) -> dict[str, Any]:
        """shard_info() of a shard. Raises EagleError BAD_ARGUMENT unless it was made with these settings."""
        about = shard_info(path)
        if about["of"] != self.digest or path != self.path(about["number"]):
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"{path} has data made with other settings or files: choose another --out, or remove "
                f"{self.folder} and the checkpoint.pt that was trained with it",
            )
        return about

    def _begin(self) -> None:
        """Makes the folder. Called before the first shard is written, so that a failed run leaves nothing."""
        make_folder(self.folder)
        remove_stale(self.folder)
        write_json(self.about, self.key)

    def path(self, n: int) -> Path:
        return self.folder / f"shard-{n:05d}.safetensors"

    def target_of(self, n: int) -> int:
        """The target of shard n. Targets take turns, because new text is better than the same text again."""
        return n // RUN % len(self.settings.targets)

    def fill(
        self, open_target: Callable[[str], TrainingTarget], progress: Callable[[int, int, int], None]
    ) -> list[Path]:
        """Generates missing shards until max_tokens or max_gb is reached. Returns the paths of all shards.

        progress(tokens in total, tokens of this run, dropped answers) is called after each task. Raises
        EagleError BAD_VALUE if there are no tokens.
        """
        tasks, paths = Tasks(self.settings), []
        tokens = made = dropped = n_bytes = n = 0
        target: TrainingTarget | None = None
        making: Iterator[tuple[int, int, bool]] | None = None
        try:
            s = self.settings
            while tokens < s.max_tokens and n_bytes < s.max_gb * 1e9 and not tasks.exhausted(n * BLOCK):
                path = self.path(n)
                if path.exists():
                    about = self._check(path)
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
            raise EagleError(ErrorKind.BAD_VALUE, "there is nothing to train on: all answers were empty")
        return paths

    def make(
        self, tasks: Tasks, target: TrainingTarget, numbers: Sequence[int]
    ) -> Iterator[tuple[int, int, bool]]:
        """Generates shards of one target. Yields (tokens, dropped answers, written) after each task."""

        wanted = {
            n: [i for i in range(n * BLOCK, n * BLOCK + BLOCK) if not tasks.exhausted(i)] for n in numbers
        }
        missing = {n: len(indices) for n, indices in wanted.items()}
        kept: dict[int, list[Conversation]] = {n: [] for n in numbers}
        drawn = (tasks.task(i) for indices in wanted.values() for i in indices)
        for index, c in converse(target, drawn, self.settings.n_predict, self.settings.seed):
            n = index // BLOCK
            missing[n] -= 1
            good = c if c is not None and not c.flaw(self.settings.drop_truncated) else None
            if good is not None:
                kept[n].append(good)
            if not missing[n]:
                self._begin()
                made = sorted(kept.pop(n), key=lambda c: c.index)
                write_shard(self.path(n), made, target, {"of": self.digest, "number": n})
            yield len(good.tokens) if good is not None else 0, int(good is None), not missing[n]


def write_shard(
    path: Path, conversations: list[Conversation], target: TrainingTarget, of: dict[str, Any]
) -> None:
    """Writes a shard, also an empty one, because an existing file means that the block is done.

    of: what it belongs to, the digest of the settings and its number.
    """
    shape = (0, len(target.layers) + 1, target.n_embd)
    cat = lambda arrays, dtype, empty=(0,): np.concatenate(arrays) if arrays else np.empty(empty, dtype)
    tensors = {
        "tokens": cat([c.tokens for c in conversations], np.int32),
        "features": cat([c.features for c in conversations], np.float16, shape),
        "best": cat([c.best for c in conversations], np.int32),
        "ends": np.cumsum([len(c.tokens) for c in conversations], dtype=np.int64),
        "n_prompt": np.array([c.n_prompt for c in conversations], np.int32),
        "greedy": np.array([c.greedy for c in conversations], np.uint8),
    }
    name, n_layer = Path(target.path).name, target.n_layer
    about = {"tokens": len(tensors["tokens"]), "layers": target.layers, "n_layer": n_layer, "target": name}
    about |= of
    with replacing(path) as part:
        # a single key, because safetensors writes several keys in varying order
        save_file(tensors, part, metadata={"shard": json.dumps(about)})


def shard_info(path: Path) -> dict[str, Any]:
    """tokens, layers, n_layer, target, of and number of a shard. Raises EagleError BAD_FILE if damaged."""
    types: dict[str, Callable[[Any], Any]] = {"tokens": int, "layers": list, "n_layer": int, "target": str}
    types |= {"of": str, "number": int}
    try:
        with safe_open(path, "numpy") as f:
            about = json.loads(f.metadata()["shard"])
            return {name: kind(about[name]) for name, kind in types.items()}
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as e:
        raise EagleError(
            ErrorKind.BAD_FILE, f"{path} is damaged, or of an earlier version ({e}): remove it and run again"
        ) from e
