"""Batches from shards. Their order depends only on the seed and the step."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import EagleError, ErrorKind
from .shards import shard_info


@dataclasses.dataclass(frozen=True)
class Item:
    """One conversation: rows first..last-1 of a shard's arrays."""

    shard: int
    first: int
    last: int
    n_prompt: int
    greedy: bool

    def __len__(self) -> int:
        return self.last - self.first


@dataclasses.dataclass
class Batch:
    """features: float32 [B, T, layers * n_embd]. final: float32 [B, T, n_embd], the output of the last layer.

    tokens: long [B, T + extra]. best: long [B, T], the target's most likely next token. n_prompt, n_tokens:
    long [B].
    """

    features: Tensor
    final: Tensor
    tokens: Tensor
    best: Tensor
    n_prompt: Tensor
    n_tokens: Tensor


class Corpus:
    """The memory-mapped conversations of all shards.

    layers: those to read, None for all captured layers. max_tokens: only the first conversations, with so
    many tokens in all. Raises EagleError BAD_ARGUMENT if the shards do not have these layers.
    """

    def __init__(
        self, paths: Sequence[Path], layers: Sequence[int] | None = None, max_tokens: int | None = None
    ) -> None:
        self.files, self.items = list[Any](), list[Item]()
        digest = hashlib.sha256()
        about = shard_info(paths[0])
        captured = [*about["layers"], about["n_layer"]]
        self.layers = list(layers) if layers is not None else about["layers"]
        missing = sorted(set(self.layers) - set(captured))
        if missing:
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"the data has the inputs of layers {captured}, not of {missing}: choose another --out",
            )
        self.columns = [captured.index(k) for k in self.layers]
        for n, path in enumerate(paths):
            f = safe_open(path, "numpy")
            self.files.append(f)
            ends, n_prompt, greedy = f.get_tensor("ends"), f.get_tensor("n_prompt"), f.get_tensor("greedy")
            for array in (f.get_tensor("tokens"), ends, n_prompt, greedy):
                digest.update(array.tobytes())
            self.items += [
                Item(n, int(a), int(b), int(p), bool(g))
                for a, b, p, g in zip([0, *ends[:-1]], ends, n_prompt, greedy)
            ]

        if max_tokens is not None:
            fit = np.cumsum([len(item) for item in self.items]) <= max_tokens
            self.items = self.items[: int(fit.sum())]
        self._digest = digest.hexdigest()

    def digest(self) -> str:
        """The identity of its conversations: the SHA-256 of their tokens and of how they are used."""
        return self._digest

    def tokens(self, item: Item) -> np.ndarray:
        return self.files[item.shard].get_slice("tokens")[item.first : item.last]

    def answers(self, items: Sequence[Item]) -> np.ndarray:
        """All answer tokens, from which the draft vocabulary is chosen."""
        return np.concatenate([self.tokens(i)[i.n_prompt :] for i in items])

    def batch(self, items: Sequence[Item], extra: int, device: str = "cpu") -> Batch:
        """A batch, padded with token 0 to the longest item. The loss does not use padding."""
        t = max(len(i) for i in items)
        rows = [self._read(i) for i in items]
        n_layers, n_embd = rows[0][1].shape[1:]
        features = np.zeros((len(items), t, n_layers, n_embd), np.float16)
        tokens, best = np.zeros((len(items), t + extra), np.int64), np.zeros((len(items), t), np.int64)
        for k, (tok, feat, top) in enumerate(rows):
            tokens[k, : len(tok)], features[k, : len(tok)], best[k, : len(tok)] = tok, feat, top
        x = torch.from_numpy(features).to(device).float()
        to = lambda a: torch.as_tensor(a).to(device)
        return Batch(
            x[:, :, self.columns].flatten(2),
            x[:, :, -1],
            to(tokens),
            to(best),
            to(np.array([i.n_prompt for i in items])),
            to(np.array([len(i) for i in items])),
        )

    def _read(self, item: Item) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        f = self.files[item.shard]
        return tuple(f.get_slice(name)[item.first : item.last] for name in ("tokens", "features", "best"))


def split(corpus: Corpus, n_heldout: int, seed: int) -> tuple[list[Item], list[Item]]:
    """(training, held-out) items. Held out are greedy answers if there are any, at most a tenth of all."""
    items = corpus.items
    pool = [k for k, i in enumerate(items) if i.greedy] or list(range(len(items)))
    order = np.random.default_rng([seed, 5]).permutation(pool)
    held = set(order[: max(1, min(n_heldout, len(items) // 10))].tolist())
    return [i for k, i in enumerate(items) if k not in held], [items[k] for k in sorted(held)]


def batches(items: Sequence[Item], tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Shuffled batches as lists of indices into items. A batch has items of similar length.

    It has at most `tokens` padded positions, unless a single item is longer.
    """
    rng = np.random.default_rng([seed, 9, epoch])
    length = np.array([len(i) for i in items]) + rng.random(len(items)) * 32  # so that batches vary by epoch
    out: list[list[int]] = [[]]
    longest = 0
    for k in np.argsort(length, kind="stable"):
        longest = max(longest, len(items[k]))
        if out[-1] and longest * (len(out[-1]) + 1) > tokens:
            out.append([])
            longest = len(items[k])
        out[-1].append(int(k))
    return [out[i] for i in rng.permutation(len(out))]


def draft_vocabulary(answers: np.ndarray, n_vocab: int, size: int) -> tuple[np.ndarray, float]:
    """The most frequent target ids, ascending int64, and the share of the answer tokens that they cover.

    If too few ids occur, the lowest of the other ids are added, because tokenizers give common tokens low
    ids.
    """
    counts = np.bincount(answers, minlength=n_vocab)
    size = min(size, n_vocab)
    ids = np.lexsort((np.arange(n_vocab), -counts))[:size]
    return np.sort(ids).astype(np.int64), float(counts[ids].sum() / max(counts.sum(), 1))
