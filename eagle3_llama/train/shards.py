"""Training data on disk: one safetensors file per block of tasks. A file is either complete or not there."""

from __future__ import annotations

import hashlib
import itertools
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
# progress(tokens of the data, of them made now, dropped answers, tokens of texts that go on)
Told = Callable[[int, int, int, int], None]
RUN = 4  # shards that one target generates together before it is the next target's turn


class Shards:
    """A folder of shards, all with the same data settings.

    A shard has tokens int32 [n], features float16 [n, layers + 1, n_embd], best int32 [n], and for each
    conversation ends int64, n_prompt int32, greedy uint8. It depends only on the settings and its number, so
    a run that was killed can continue. The last one is cut where max_tokens is reached, and made again if
    that grows. Raises EagleError BAD_ARGUMENT for a folder with other settings.
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

    def _whole(self, n: int) -> dict[str, Any] | None:
        """shard_info() of shard n. None if it is missing, or was cut where these settings go on."""
        about = self._check(self.path(n)) if self.path(n).exists() else None
        cut_at = about["max_tokens"] if about is not None else None
        return None if cut_at is not None and cut_at < self.settings.max_tokens else about

    def fill(self, open_target: Callable[[str], TrainingTarget], progress: Told) -> list[Path]:
        """Generates missing shards until max_tokens or max_gb is reached. Returns the paths of all shards.

        progress is called after each task and each step. Raises EagleError BAD_VALUE if there are no tokens.
        """
        tasks, paths, s = Tasks(self.settings), list[Path](), self.settings
        tokens = earlier = made = dropped = n_bytes = n = 0
        mine: set[int] = set()  # the shards of this run; the others' tokens are `earlier`
        target: TrainingTarget | None = None
        making: Iterator[tuple[int, int, bool]] | None = None

        def tell(under_way: int = 0) -> None:
            progress(earlier + made, made, dropped, under_way)

        try:
            while tokens < s.max_tokens and n_bytes < s.max_gb * 1e9 and not tasks.exhausted(n * BLOCK):
                if (about := self._whole(n)) is not None:
                    paths.append(self.path(n))
                    tokens, n_bytes = tokens + about["tokens"], n_bytes + paths[-1].stat().st_size
                    earlier, n = earlier + (0 if n in mine else about["tokens"]), n + 1
                    tell()
                    if about["max_tokens"] is not None:
                        break
                    continue
                if making is None:
                    wanted = s.targets[self.target_of(n)]
                    if target is None or target.path != wanted:
                        if target is not None:
                            target.close()
                        target = open_target(wanted)
                    numbers = [k for k in range(n, n - n % RUN + RUN) if self._whole(k) is None]
                    mine.update(numbers)
                    making = self.make(tasks, target, numbers, tokens, tell)
                for count, bad, whole in making:
                    made, dropped = made + count, dropped + bad
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
        self,
        tasks: Tasks,
        target: TrainingTarget,
        numbers: Sequence[int],
        before: int,
        under_way: Callable[[int], None],
    ) -> Iterator[tuple[int, int, bool]]:
        """Generates shards of one target. Yields (tokens, dropped answers, written) after each task.

        before: the tokens of earlier shards. No task begins when max_tokens have ended, and the data ends
        with the last task that max_tokens has room for.
        """
        wanted = {
            n: [i for i in range(n * BLOCK, n * BLOCK + BLOCK) if not tasks.exhausted(i)] for n in numbers
        }
        missing = {n: len(indices) for n, indices in wanted.items()}
        kept: dict[int, list[Conversation]] = {n: [] for n in numbers}
        length: dict[int, int] = {}  # by task that has ended
        for n in set(range(numbers[0], numbers[-1])) - set(numbers):
            length[n * BLOCK] = shard_info(self.path(n))["tokens"]  # a shard that is there, as one task
        order = sorted([*length, *itertools.chain(*wanted.values())])
        room = lambda _: before + sum(length.values()) < self.settings.max_tokens
        drawn = map(tasks.task, itertools.takewhile(room, itertools.chain(*wanted.values())))
        for index, c in converse(target, drawn, self.settings.n_predict, self.settings.seed, under_way):
            n = index // BLOCK
            missing[n] -= 1
            good = c if c is not None and not c.flaw(self.settings.drop_truncated) else None
            if good is not None:
                kept[n].append(good)
            length[index] = len(good.tokens) if good is not None else 0
            if not missing[n]:
                self._write(n, kept.pop(n), target)
            end = self._end(order, length, before)
            if end is not None and end // BLOCK in kept:
                fit = [c for c in kept[end // BLOCK] if c.index < end]
                self._write(end // BLOCK, fit, target, self.settings.max_tokens)
            yield length[index], int(good is None), not missing[n] or end is not None
            if end is not None:
                return

    def _end(self, order: Sequence[int], length: dict[int, int], before: int) -> int | None:
        """The first task, in order, that max_tokens has no room for. None while that is not known."""
        for index in order:
            if before >= self.settings.max_tokens:
                return index
            if index not in length:
                return None
            before += length[index]
            if before > self.settings.max_tokens:
                return index
        return None

    def _write(
        self, n: int, made: list[Conversation], target: TrainingTarget, cut_at: int | None = None
    ) -> None:
        self._begin()
        of = {"of": self.digest, "number": n, "max_tokens": cut_at}
        write_shard(self.path(n), sorted(made, key=lambda c: c.index), target, of)


def write_shard(
    path: Path, conversations: list[Conversation], target: TrainingTarget, of: dict[str, Any]
) -> None:
    """Writes a shard, also an empty one, because an existing file means that the block is done.

    of: what it belongs to, the digest of the settings and its number; the max_tokens that cut it, or None.
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
    """tokens, layers, n_layer, target, of, number and max_tokens of a shard, the last None if it is whole.

    Raises EagleError BAD_FILE if it is damaged.
    """
    types: dict[str, Callable[[Any], Any]] = {"tokens": int, "layers": list, "n_layer": int, "target": str}
    types |= {"of": str, "number": int, "max_tokens": lambda most: most if most is None else int(most)}
    try:
        with safe_open(path, "numpy") as f:
            about = json.loads(f.metadata()["shard"])
            return {name: kind({"max_tokens": None, **about}[name]) for name, kind in types.items()}
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as e:
        raise EagleError(
            ErrorKind.BAD_FILE, f"{path} is damaged, or of an earlier version ({e}): remove it and run again"
        ) from e
