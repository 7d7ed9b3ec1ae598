"""Initialises a head by least squares, before any training.

The target's final state at p + 1 is largely a linear function of the captured features at p and of the
embedding of token p + 1. `fc` computes the part of the features. In an EAGLE-3 layer, the embedding can only
enter through the values of the attention. So most attention heads are set to attend to their own position
only: their queries and keys are constant except for the rotary angles. The other heads are pointer heads
(pointers.py). They attend to earlier occurrences of the text and pass on the tokens that followed there.
Finally, o_proj is the regression of the target's states on the outputs of the heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .data import Corpus, Item
from .model import Chain, Head
from .pointers import Glances, learn_pointers

ROWS = 60_000  # rows for the regression of fc and the values
OUTPUT_ROWS = 40_000  # rows for the regression of o_proj
BLOCK = 4_000  # rows per matrix product
WIDEST = 24_000  # most inputs of a regression, because its memory grows with their square
RIDGES = (1e-3, 1e-2, 1e-1, 1.0)  # penalties to try on unseen rows
FLOOR = 1e-5  # share of all inputs' mean size, a penalty for each: few words leave some inputs almost empty
KEPT = 0.1  # factor for the output of the feed-forward block that was copied from the target
SPREAD = 8_000  # rows for constants and covariances


@dataclasses.dataclass
class Rows:
    """features: [n, layers * n_embd], at position p. states: [n, n_embd], normalised, at p + 1.

    tokens, following: [n, n_embd], normalised embeddings of the tokens at p + 1 and p + 2.
    """

    features: Tensor
    tokens: Tensor
    following: Tensor
    states: Tensor


class Regression:
    """Ridge regression of y on x from sums of products. Rows that are not fitted choose the penalty."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.inputs = inputs
        self.fitted, self.unseen = (
            torch.zeros(inputs, inputs + outputs, dtype=torch.float64) for _ in range(2)
        )

    def add(self, x: Tensor, y: Tensor, unseen: bool) -> None:
        """Adds rows. x: [n, inputs]. y: [n, outputs]."""
        (self.unseen if unseen else self.fitted).add_(x.T @ torch.cat([x, y], 1))

    def solve(self) -> Tensor:
        """The solution, float32 [outputs, inputs].

        The penalty of an input is a share of its own size, the share that fits the unseen rows best, and at
        least FLOOR of the mean.
        """
        a, b = self.fitted[:, : self.inputs], self.fitted[:, self.inputs :]
        c, d = self.unseen[:, : self.inputs], self.unseen[:, self.inputs :]
        best, least = torch.zeros(0), float("inf")
        size = a.diagonal()
        for ridge in RIDGES:
            penalty = size * ridge + size.mean() * FLOOR + 1e-9
            w = torch.linalg.solve(a + torch.diag(penalty), b)
            error = float((w * (c @ w - 2 * d)).sum())  # squared error minus that of predicting 0
            if error < least:
                best, least = w, error
        return best.T.float().contiguous()


@torch.no_grad()
def least_squares_start(
    head: Head,
    corpus: Corpus,
    items: Sequence[Item],
    seed: int,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> bool:
    """Sets fc and the whole attention. progress(done, total) counts the steps of the pointer heads.

    Returns False if the model is too wide or there are no rows; the head is then unchanged.
    """
    width, h = head.fc.in_features + head.shape.n_embd, head.shape.n_embd
    if width > WIDEST:
        return False
    order = [items[k] for k in np.random.default_rng([seed, 17]).permutation(len(items))]
    cut = max(1, len(order) // 10)
    n, scale, sample = 0, 0.0, list[Rows]()
    now, later = Regression(width, h), Regression(h, h)
    for unseen, items in ((True, order[:cut]), (False, order[cut:] or order)):
        for r in _blocks(_rows(head, corpus, i) for i in items):
            now.add(torch.cat([r.features, r.tokens], 1), r.states, unseen)
            later.add(r.following, r.states, unseen)
            if unseen:
                continue
            scale += float(r.features[:, -h:].pow(2).mean(1).sqrt().sum())
            if n < SPREAD:
                sample.append(r)
            n += len(r.tokens)
            if n > ROWS:
                break
    if n == 0:
        return False
    scale /= n  # the mean size of the last feature, which the layer's weights expect
    glances = _install(head, now.solve() * scale, later.solve(), _cat(sample))
    learn_pointers(head, corpus, order, glances, seed, progress)
    _fit_outputs(head, corpus, order, scale)
    return True


def _rows(head: Head, corpus: Corpus, item: Item) -> Rows:
    """The positions whose next token belongs to the answer or opens it, except the text's first position."""
    batch = corpus.batch([item], 0)
    first, h = max(item.n_prompt - 2, 1), head.shape.n_embd
    rms = lambda x: F.rms_norm(x, (h,), eps=head.shape.rms_eps)
    e = rms(head.embedding.cpu()[batch.tokens[0, first + 1 : len(item)]])
    return Rows(batch.features[0, first:-2], e[:-1], e[1:], rms(batch.final[0, first + 1 : -1]))


def _blocks(rows: Iterable[Rows]) -> Iterator[Rows]:
    """The same rows in blocks that are large enough for efficient matrix products."""
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


def _install(head: Head, solution: Tensor, predicted: Tensor, rows: Rows) -> Glances:
    """Sets fc, the values, and queries and keys that attend to their own row.

    solution: regression of the states on features and tokens. predicted: regression of the states on the next
    token.
    """
    s, layer, a = head.shape, head.midlayer, head.midlayer.self_attn
    to = lambda x: x.to(head.fc.weight.device)
    head.fc.weight.copy_(to(solution[:, : head.fc.in_features]))
    layer.mlp.down_proj.weight.mul_(KEPT)
    # both kinds of heads share the values: a token's effect on its own row, and as the predicted next token
    own = solution[:, head.fc.in_features :]
    both = torch.cat([own, predicted * (own.norm() / predicted.norm().clamp_min(1e-12))])
    values = _low_rank(both, rows.tokens, a.v_proj.out_features)
    a.v_proj.weight.zero_()
    a.v_proj.weight[: len(values), : s.n_embd] = to(values) / layer.input_layernorm.weight
    glances = Glances.of(head, _constant(head, rows.features, rows.tokens))
    a.q_proj.weight.copy_(glances.own_row(s.n_head))
    a.k_proj.weight.copy_(glances.own_row(s.n_head_kv))
    return glances


def _low_rank(c: Tensor, x: Tensor, rank: int) -> Tensor:
    """The projection, [rank, n], that keeps most of a product with c, [m, n], for inputs distributed as x."""
    # Inputs have much in common, and may be fewer than their size. Rounded to single precision, such a
    # covariance may have negative eigenvalues larger than what is added here; it depends on the processor.
    x, c = x.double(), c.double()
    cov = x.T @ x / len(x)
    root = torch.linalg.cholesky(cov + 1e-5 * cov.diagonal().mean() * torch.eye(len(cov), dtype=x.dtype))
    _, s, v = torch.linalg.svd(c @ root, full_matrices=False)
    kept = torch.linalg.solve_triangular(root.T, v[:rank].T, upper=True).T * s[:rank].sqrt()[:, None]
    return kept.float()


def _constant(head: Head, features: Tensor, tokens: Tensor) -> Tensor:
    """A direction, [2 * n_embd], in which every row of the attention's input is about 1."""
    layer = head.midlayer
    g = layer.hidden_norm(features.to(head.fc.weight.device) @ head.fc.weight.T).cpu()
    u = torch.cat([tokens * layer.input_layernorm.weight.cpu(), g], 1)
    a = u.T @ u / len(u)
    return torch.linalg.solve(a + 1e-3 * a.diagonal().mean() * torch.eye(len(a)), u.mean(0))


def _fit_outputs(head: Head, corpus: Corpus, order: Sequence[Item], scale: float) -> None:
    """Sets o_proj: the regression of what fc leaves of the states on the outputs of the attention heads."""
    o = head.midlayer.self_attn.o_proj
    left, n = Regression(o.in_features, o.out_features), 0
    for k, item in enumerate(order):
        batch = corpus.batch([item], 0, str(head.fc.weight.device))
        chain = Chain(head, batch.features[:, :-1])
        brought = chain.attend(head.embedding[batch.tokens[:, 1:]])[0]
        first = max(item.n_prompt - 2, 1)
        states = F.rms_norm(batch.final[0, 1:], (head.shape.n_embd,), eps=head.shape.rms_eps) * scale
        x, y = brought[first:].cpu(), (states - chain.x[0])[first:].cpu()
        if k % 10 == 0:
            left.add(x, y, unseen=True)
        if k % 10 or len(order) == 1:
            left.add(x, y, unseen=False)
            n += len(x)
        if n > OUTPUT_ROWS:
            break
    o.weight.copy_(left.solve())
