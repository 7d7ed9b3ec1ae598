"""Heads of the attention that point to where the text has been before.

Answers repeat: names, phrases, code, a small model's loops. A row (token p + 1, what is known up to p) should find rows
whose token was followed by what will follow here, and take that token along. Training finds such heads late; a
contrastive loss on queries and keys alone finds them in a minute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from .data import Corpus, Item
from .model import Head, rotate

OWN = 28.0  # score of a position with itself, before the softmax, in heads that look at their own row
SINK = 6.0  # the same at first in heads that point: where they look if nothing repeats
FAST = 0.08  # rotary frequencies above it, radians a position, tell neighbours apart
PERIOD = 3  # at least so many heads to one that points
STEPS, PASSES = 3000, 4  # texts to learn from at most, and how often each
RATE = 0.1  # of Adam, relative to the weights' size
SPREAD = 40_000  # positions that queries and keys are first matched on
FIRST_SCORE = 0.2  # of the first match: too sure of itself, it unlearns before it learns
PENALTY = 1e-2


@dataclasses.dataclass
class Glances:
    """Where heads look. constant [2 * n_embd]: a direction along which all rows say 1; a head's first `fast` dimensions turn
    fast and hold it, `free` are the others."""

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
        """[2 * n_embd]: as query and key in every fast dimension, a score of OWN for the row itself."""
        return self.constant * (OWN * self.head_dim**0.5 / self.fast) ** 0.5

    def own_row(self, n_head: int) -> Tensor:
        """Weight [n_head * head_dim, 2 * n_embd] of queries, or keys, that look at their own row."""
        w = torch.zeros(n_head, self.head_dim, len(self.constant), device=self.constant.device)
        w[:, : self.fast] = self.unit
        return w.flatten(0, 1)


def pointing(n_head: int, share: int) -> list[int]:
    """Which heads point: one of each `share` that have keys in common, and at most every third."""
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
    """Sets queries of the heads that point, and their keys in the free dimensions."""
    s, a = head.shape, head.midlayer.self_attn
    d, share = s.head_dim, s.n_head // s.n_head_kv
    heads = pointing(s.n_head, share)
    items = [i for i in items if len(i) - i.n_prompt > 2]
    if not heads or not items or not glances.fast or not len(glances.free):
        return
    q, k = (w.requires_grad_() for w in _matched(head, corpus, items, glances, len(heads)))
    sink = torch.full((len(heads), 1, 1), SINK / OWN, device=q.device).requires_grad_()
    rate = RATE * float(q.detach().abs().mean())
    optimizer = torch.optim.Adam(
        [{"params": [q, k], "lr": rate}, {"params": [sink], "lr": 0.01}], betas=(0.9, 0.99)
    )
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
    """u [T - 1, 2 * n_embd], the attention's input at each position that has a next token; tokens [T]."""
    batch = corpus.batch([item], 0, str(head.fc.weight.device))
    tokens = batch.tokens[0]
    return head.midlayer.pair(head.embedding[tokens[1:]], head.fc(batch.features[0, :-1])), tokens


def _matched(
    head: Head, corpus: Corpus, items: Sequence[Item], glances: Glances, n: int
) -> tuple[Tensor, Tensor]:
    """First queries and keys [n, free, 2 * n_embd]: canonical correlations of a token's embedding, which the query knows,
    with the features at that token, which the key holds."""
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
    x, y = _whiten(covariance[:h, :h]), _whiten(covariance[h:, h:])
    u, _, v = torch.linalg.svd(x @ covariance[:h, h:] @ y)
    size = (FIRST_SCORE * glances.head_dim**0.5) ** 0.5
    pick = (
        torch.arange(m, device=u.device) * n + torch.arange(n, device=u.device)[:, None]
    ) % h  # the best are shared out
    nothing = torch.zeros(n, m, h, device=u.device)
    queries, keys = ((w.T[pick] * size).float() for w in (x @ u, y @ v.T))
    level = lambda w, at: (w @ at.float())[..., None] * glances.constant  # about zero on the mean
    return torch.cat([queries, nothing], -1) - level(queries, mean[:h]), torch.cat(
        [nothing, keys], -1
    ) - level(keys, mean[h:])


def _whiten(c: Tensor) -> Tensor:
    w, v = torch.linalg.eigh(c)
    return v @ torch.diag((w + PENALTY * w.mean()).clamp_min(1e-12).rsqrt()) @ v.T


def _misses(
    head: Head, corpus: Corpus, item: Item, glances: Glances, q: Tensor, k: Tensor, sink: Tensor
) -> Tensor:
    """Mean of -log(attention on rows that the right token followed), over the answer; the own row is right where there is none."""
    with torch.no_grad():
        u, tokens = _inputs(head, corpus, item)
        t = torch.arange(len(u) - 1, device=u.device)[
            max(item.n_prompt - 1, 1) :
        ]  # rows whose second next token is known
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
