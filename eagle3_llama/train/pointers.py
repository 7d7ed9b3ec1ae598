"""Pointer heads: attention heads that find earlier occurrences of the current text.

Answers repeat names, phrases and code, and small models loop. A pointer head should attend to earlier rows
whose next token is the one that comes next here, and pass that token on. Ordinary training learns such heads
late. A contrastive loss on queries and keys alone learns them in a minute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .data import Corpus, Item
from .model import Head, rotate

OWN = 28.0  # score of a position with itself, before the softmax, in heads that attend to their own row
SINK = 6.0  # the same in pointer heads at the start: they attend to their own row if nothing repeats
FAST = 0.08  # radians per position: rotary frequencies above it distinguish neighbours
PERIOD = 3  # at most one of so many heads is a pointer head
STEPS, PASSES = 3000, 4  # most steps of learning, one text per step, and most passes over the texts
RATE = 0.1  # learning rate of Adam relative to the size of the weights
SPREAD = 40_000  # positions for the first estimate of queries and keys
FIRST_SCORE = 0.2  # scale of the first scores: with high scores, learning first has to undo them
PENALTY = 1e-2
LEAST_SPREAD = 1e-5  # share of the mean square: texts of one word have no variance at all


@dataclasses.dataclass
class Glances:
    """The parts of queries and keys. constant: [2 * n_embd], the direction in which every row is about 1.

    The first `fast` dimensions of a head rotate fast and use this constant. `free` are the other dimensions.
    """

    constant: Tensor
    fast: int
    free: Tensor
    head_dim: int

    @classmethod
    def of(cls, head: Head, constant: Tensor) -> Glances:
        d, device = head.shape.head_dim, head.fc.weight.device
        fast = int((head.frequencies >= FAST).sum())
        slow = torch.arange(fast, d // 2, device=device)
        return cls(constant.to(device), fast, torch.cat([slow, slow + d // 2]), d)

    @property
    def unit(self) -> Tensor:
        """A weight row, [2 * n_embd]. In all fast dimensions of q and k, it gives the own row score OWN."""
        return self.constant * (OWN * self.head_dim**0.5 / self.fast) ** 0.5

    def own_row(self, n_head: int) -> Tensor:
        """The weight of queries, or keys, that attend to their own row: [n_head * head_dim, 2 * n_embd]."""
        w = torch.zeros(n_head, self.head_dim, len(self.constant), device=self.constant.device)
        w[:, : self.fast] = self.unit
        return w.flatten(0, 1)


def pointing(n_head: int, share: int) -> list[int]:
    """The pointer heads: one of each `share` heads with common keys, and at most one of PERIOD heads."""
    period = max(share, PERIOD)
    return list(range(period - 1, n_head, period))


def learn_pointers(
    head: Head,
    corpus: Corpus,
    items: Sequence[Item],
    glances: Glances,
    seed: int,
    progress: Callable[[int, int], None],
) -> None:
    """Learns the queries of the pointer heads, and their keys in the free dimensions."""
    s, a = head.shape, head.midlayer.self_attn
    d, share = s.head_dim, s.n_head // s.n_head_kv
    heads = pointing(s.n_head, share)
    items = [i for i in items if len(i) - i.n_prompt > 2]
    if not heads or not items or not glances.fast or not len(glances.free):
        return
    q, k = (w.requires_grad_() for w in _matched(head, corpus, items, glances, len(heads)))
    sink = torch.full((len(heads), 1, 1), SINK / OWN, device=q.device).requires_grad_()
    rate = RATE * float(q.detach().abs().mean())
    groups: list[dict[str, Any]] = [{"params": [q, k], "lr": rate}, {"params": [sink], "lr": 0.01}]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
    steps = min(STEPS, PASSES * len(items))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, 2 * (steps - n) / steps))
    order = np.random.default_rng([seed, 23]).permutation(len(items))
    for n in range(steps):
        with torch.enable_grad():
            loss = _misses(head, corpus, items[order[n % len(order)]], glances, q, k, sink)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        schedule.step()
        progress(n + 1, steps)
    with torch.no_grad():
        queries, keys = a.q_proj.weight.view(s.n_head, d, -1), a.k_proj.weight.view(s.n_head_kv, d, -1)
        for i, which in enumerate(heads):
            queries[which, : glances.fast] = sink[i] * glances.unit
            queries[which, glances.free] = q[i]
            keys[which // share, glances.free] = k[i]


def _inputs(head: Head, corpus: Corpus, item: Item) -> tuple[Tensor, Tensor]:
    """The attention's input at positions with a next token, [T - 1, 2 * n_embd], and the tokens, [T]."""
    batch = corpus.batch([item], 0, str(head.fc.weight.device))
    tokens = batch.tokens[0]
    return head.midlayer.pair(head.embedding[tokens[1:]], head.fc(batch.features[0, :-1])), tokens


def _matched(
    head: Head, corpus: Corpus, items: Sequence[Item], glances: Glances, n: int
) -> tuple[Tensor, Tensor]:
    """The first estimate of queries and keys, each [n, free, 2 * n_embd].

    It uses canonical correlations between a token's embedding, which the query has, and the features at that
    token, which the key has.
    """
    h, m = head.shape.n_embd, len(glances.free)
    seen, total = 0, torch.zeros(2 * h + 1, 2 * h + 1, dtype=torch.float64, device=head.fc.weight.device)
    for item in items:
        u, _ = _inputs(head, corpus, item)
        pairs = torch.cat([u[:-1, :h], u[1:, h:], torch.ones(len(u) - 1, 1, device=u.device)], 1)
        total += (pairs.T @ pairs).double()
        seen += len(pairs)
        if seen > SPREAD:
            break
    total /= max(seen, 1)
    mean = total[-1, :-1]
    covariance = total[:-1, :-1] - torch.outer(mean, mean)
    least = LEAST_SPREAD * total.diagonal()[:-1]
    x, y = _whiten(covariance[:h, :h], least[:h].mean()), _whiten(covariance[h:, h:], least[h:].mean())
    u, _, v = torch.linalg.svd(x @ covariance[:h, h:] @ y)
    size = (FIRST_SCORE * glances.head_dim**0.5) ** 0.5
    each, dimension = torch.arange(n, device=u.device)[:, None], torch.arange(m, device=u.device)
    pick = (dimension * n + each) % h  # the heads share the strongest correlations
    nothing = torch.zeros(n, m, h, device=u.device)
    queries, keys = ((w.T[pick] * size).float() for w in (x @ u, y @ v.T))
    level = lambda w, at: (w @ at.float())[..., None] * glances.constant  # makes the mean about zero
    q, k = torch.cat([queries, nothing], -1), torch.cat([nothing, keys], -1)
    return q - level(queries, mean[:h]), k - level(keys, mean[h:])


def _whiten(c: Tensor, least: Tensor) -> Tensor:
    """c^-1/2 of a covariance. least: the least variance that counts, for inputs that are all the same."""
    w, v = torch.linalg.eigh(c)
    return v @ torch.diag((w + PENALTY * w.mean()).clamp_min(max(float(least), 1e-12)).rsqrt()) @ v.T


def _misses(
    head: Head, corpus: Corpus, item: Item, glances: Glances, q: Tensor, k: Tensor, sink: Tensor
) -> Tensor:
    """The mean of -log(attention on the right rows) over the answer.

    The right rows are those whose next token is the one that comes next here. If there are none, the own row
    is.
    """
    with torch.no_grad():
        u, tokens = _inputs(head, corpus, item)
        # the rows of the answer for which the token after the next one is known
        t = torch.arange(len(u) - 1, device=u.device)[max(item.n_prompt - 1, 1) :]
        angles = torch.arange(len(u), device=u.device)[:, None] * head.frequencies
        cos, sin = angles.cos(), angles.sin()
        fast = torch.arange(glances.fast, device=u.device)
        own = (u @ glances.unit)[:, None].expand(len(q), len(u), glances.fast)
        seen = torch.arange(len(u), device=u.device) <= t[:, None]
        right = (tokens[1:] == tokens[t + 2, None]) & seen
        none = ~right.any(1)
        right[none, t[none]] = True
    empty = torch.zeros(len(q), len(u), glances.head_dim, device=u.device)
    queries = empty.index_copy(2, fast, own * sink).index_copy(2, glances.free, u @ q.transpose(1, 2))
    keys = empty.index_copy(2, fast, own.contiguous()).index_copy(2, glances.free, u @ k.transpose(1, 2))
    score = rotate(queries, cos, sin)[:, t] @ rotate(keys, cos, sin).transpose(1, 2) * glances.head_dim**-0.5
    log_p = score.masked_fill(~seen, float("-inf")).log_softmax(-1)
    return -log_p.masked_fill(~right, float("-inf")).logsumexp(-1).mean()
