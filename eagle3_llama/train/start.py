"""Where a head starts from: what least squares knows of the target's next state, before any training.

The state that the target ends with at p + 1 is, to a good part, a linear function of the captured features at p and
of the embedding of token p + 1. The first part is what `fc` computes. The second has one way into an EAGLE-3 layer, the
attention's values: so most of its heads are made to look at their own position only, by queries and keys that are the
same everywhere but for the rotary angles, and their values and outputs hold that part's leading singular directions.
On SmolLM2 this head's first drafts are accepted more often than after 120,000 tokens of training from the
target's last layer alone.
"""

from __future__ import annotations

import dataclasses
from typing import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from .data import Corpus, Item
from .model import Head

ROWS = 60_000  # that the estimate is made from
BLOCK = 4_000  # of them at a time
WIDEST = 24_000  # inputs of the estimate: memory goes with the square
RIDGES = (1e-3, 1e-2, 1e-1, 1.0)  # of which the one that fits unseen rows best is taken
SCORE = 28.0  # of a position with itself, before the softmax
SLOWEST = 0.08  # rotary frequencies above it tell neighbours apart
KEPT = 0.1  # of what the target's own attention and feed-forward say
SPREAD = 8_000  # rows that constants and covariances are taken from


@dataclasses.dataclass
class Rows:
    """features [n, layers * n_embd], tokens [n, n_embd]: normed embeddings; states [n, n_embd]: normed, one token later."""

    features: Tensor
    tokens: Tensor
    states: Tensor


@torch.no_grad()
def least_squares_start(head: Head, corpus: Corpus, items: Sequence[Item], seed: int) -> bool:
    """Sets fc, and queries, keys, values and outputs of all key-value groups but one. False if the model is too wide for it."""
    width = head.fc.in_features + head.shape.n_embd
    if width > WIDEST:
        return False
    order = [items[k] for k in np.random.default_rng([seed, 17]).permutation(len(items))]
    cut = max(1, len(order) // 10)
    unseen, fitted = [_rows(head, corpus, i) for i in order[:cut]], order[cut:] or order
    n, scale, sample = 0, 0.0, []
    gram = torch.zeros(width, width + head.shape.n_embd, dtype=torch.float64)
    for r in _blocks(_rows(head, corpus, i) for i in fitted):
        x = torch.cat([r.features, r.tokens], 1)
        gram += x.T @ torch.cat([x, r.states], 1)
        scale += float(r.features[:, -head.shape.n_embd :].pow(2).mean(1).sqrt().sum())
        if n < SPREAD:
            sample.append(r)
        n += len(x)
        if n > ROWS:
            break
    if n == 0:
        return False
    solution = _solve(gram, unseen) * (scale / n)  # as large as the last feature: as the layer's weights expect
    _install(head, solution, sample)
    return True


def _rows(head: Head, corpus: Corpus, item: Item) -> Rows:
    """Positions whose next token belongs to the answer, or opens it; the first of a text is unlike all others."""
    batch = corpus.batch([item], 0)
    first = max(item.n_prompt - 2, 1)
    rms = lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + head.shape.rms_eps)  # noqa: E731
    tokens = batch.tokens[0, first + 1 : len(item)]
    return Rows(batch.features[0, first:-1], rms(head.embedding.cpu()[tokens]), rms(batch.final[0, first + 1 :]))


def _blocks(rows: Iterable[Rows]) -> Iterator[Rows]:
    """The same rows in blocks that are worth a product."""
    held: list[Rows] = []
    for r in rows:
        held.append(r)
        if sum(len(h.tokens) for h in held) >= BLOCK:
            yield _cat(held)
            held = []
    if held:
        yield _cat(held)


def _cat(rows: Sequence[Rows]) -> Rows:
    return Rows(*(torch.cat([getattr(r, f.name) for r in rows]) for f in dataclasses.fields(Rows)))


def _solve(gram: Tensor, unseen: Sequence[Rows]) -> Tensor:
    """[n_embd, inputs], float32: ridge regression, each input's penalty a share of its own size."""
    width = gram.shape[0]
    a, b = gram[:, :width], gram[:, width:]
    r = _cat(unseen)
    x = torch.cat([r.features, r.tokens], 1)
    best, least = torch.zeros(0), float("inf")
    for ridge in RIDGES:
        w = torch.linalg.solve(a + torch.diag(a.diagonal() * ridge + 1e-9), b).float()
        error = float((x @ w - r.states).pow(2).sum())
        if error < least:
            best, least = w.T, error
    return best


def _install(head: Head, solution: Tensor, sample: Sequence[Rows]) -> None:
    s, layer, a = head.shape, head.midlayer, head.midlayer.self_attn
    d, h = s.head_dim, s.n_embd
    groups = max(1, s.n_head_kv - 1)
    share = s.n_head // s.n_head_kv
    to = lambda x: x.to(head.fc.weight.device)  # noqa: E731
    head.fc.weight.copy_(to(solution[:, : head.fc.in_features]))
    rows = _cat(sample)
    values, outputs = _low_rank(solution[:, head.fc.in_features :], rows.tokens, min(groups * d, h))
    a.o_proj.weight.mul_(KEPT)
    layer.mlp.down_proj.weight.mul_(KEPT)
    a.v_proj.weight[: groups * d].zero_()
    a.v_proj.weight[: len(values), :h] = to(values) / layer.input_layernorm.weight
    wide = torch.zeros(h, groups * d)
    wide[:, : outputs.shape[1]] = outputs / share
    for head_index in range(groups * share):
        group = head_index // share
        a.o_proj.weight[:, head_index * d : (head_index + 1) * d] = to(wide[:, group * d : (group + 1) * d])
    constant = _constant(head, rows.features, rows.tokens)
    fast = int((head.frequencies >= SLOWEST).sum())
    constant = to(constant * (SCORE * d**0.5 / fast) ** 0.5)
    for w, n in ((a.q_proj.weight, groups * share), (a.k_proj.weight, groups)):
        w[: n * d].zero_()
        w[: n * d].view(n, d, 2 * h)[:, :fast] = constant


def _low_rank(c: Tensor, x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """values [rank, n] and outputs [m, rank], their product the closest to c [m, n] on inputs spread as x is."""
    cov = x.T @ x / len(x)
    root = torch.linalg.cholesky(cov + 1e-5 * cov.diagonal().mean() * torch.eye(len(cov)))
    u, s, v = torch.linalg.svd(c @ root, full_matrices=False)
    half = s[:rank].sqrt()
    return torch.linalg.solve_triangular(root.T, v[:rank].T, upper=True).T * half[:, None], u[:, :rank] * half


def _constant(head: Head, features: Tensor, tokens: Tensor) -> Tensor:
    """[2 * n_embd]: a direction along which every row of the attention's input says about 1."""
    layer = head.midlayer
    g = layer.hidden_norm(features.to(head.fc.weight.device) @ head.fc.weight.T).cpu()
    u = torch.cat([tokens * layer.input_layernorm.weight.cpu(), g], 1)
    a = u.T @ u / len(u)
    return torch.linalg.solve(a + 1e-3 * a.diagonal().mean() * torch.eye(len(a)), u.mean(0))
