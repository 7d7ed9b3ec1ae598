"""The loss of training-time test: the head's predictions after 1..K of its own steps against the target's."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .data import Batch
from .model import Head
from .weights import TargetWeights


@dataclasses.dataclass
class Teacher:
    """The target's final norm, [n_embd], and the rows of its output matrix for the draft vocabulary."""

    norm: Tensor
    output: Tensor
    eps: float
    in_draft: Tensor  # bool [n_vocab]: whether the token is in the draft vocabulary
    t2d: Tensor  # long [n_vocab]: its draft id, or -1

    @classmethod
    def of(cls, weights: TargetWeights, head: Head, device: str) -> Teacher:
        d2t = head.d2t.cpu()
        t2d = torch.full((weights.shape.n_vocab,), -1, dtype=torch.long)
        t2d[d2t] = torch.arange(len(d2t))
        to = lambda a: torch.from_numpy(a).to(device)
        return cls(
            to(weights.get("output_norm.weight")),
            to(weights.rows(weights.output_name, d2t.numpy())),
            weights.shape.rms_eps,
            (t2d >= 0).to(device),
            t2d.to(device),
        )

    def probabilities(self, final: Tensor, temperature: float) -> Tensor:
        """The target's distribution, [n, draft_vocab], from the output of its last layer, [n, n_embd]."""
        logits = F.rms_norm(final, (final.shape[-1],), self.norm, self.eps) @ self.output.T
        return (logits.float() / temperature).softmax(-1)


@dataclasses.dataclass
class Loss:
    total: Tensor  # the loss to minimise
    losses: list[float]  # by step
    agree: list[float]  # share of positions where the head's most likely token is the target's, by step
    positions: int


class Distillation(torch.autograd.Function):
    """Mean cross-entropy of softmax(h @ weight.T) against soft[at], mixed with the one against best[at].

    The forward pass computes the gradients too, some rows at a time. So the full [n, draft_vocab] matrix is
    never in memory, and the part that is fits the CPU's cache. dtype: of the matrix products, the rest is
    float32. Returns (loss, share of rows whose most likely token is the target's).
    """

    ROWS = {"cpu": 256, "cuda": 8192}

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        soft: Tensor,
        best: Tensor,
        at: Tensor,
        hard: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        n, low = len(h), weight.to(dtype)
        dh, dw = torch.empty_like(h), torch.zeros_like(weight)
        loss, agree = h.new_zeros((), dtype=torch.float32), h.new_zeros((), dtype=torch.float32)
        for rows in torch.arange(n, device=h.device).split(Distillation.ROWS.get(h.device.type, 1024)):
            part, want = h[rows[0] : rows[-1] + 1].to(dtype), soft[at[rows]]
            log_q = (part @ low.T).float().log_softmax(-1)
            agree += (log_q.argmax(-1) == best[at[rows]]).sum()
            if hard:
                want = want * (1 - hard)
                more = torch.full_like(rows, hard, dtype=want.dtype)[:, None]
                want.scatter_add_(1, best[at[rows], None], more)
            loss -= torch.dot(want.flatten(), log_q.flatten())
            grad = log_q.exp_().sub_(want).div_(n).to(dtype)
            dh[rows[0] : rows[-1] + 1] = grad @ low
            dw += grad.T @ part
        ctx.save_for_backward(dh, dw)
        agree /= n
        ctx.mark_non_differentiable(agree)
        return loss / n, agree

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dh, dw = ctx.saved_tensors
        return dh * g, dw * g, None, None, None, None, None


def training_time_test(
    head: Head,
    teacher: Teacher,
    batch: Batch,
    steps: int,
    decay: float,
    hard: float = 0.0,
    temperature: float = 1.0,
    stride: int = 1,
    offset: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Loss:
    """Cross-entropy of step j at position t against the target's distribution at t + 1 + j, times decay^j.

    A position counts if the predicted token, t + 2 + j, belongs to the answer and the target's most likely
    token there is in the draft vocabulary, as in the EAGLE code. hard: the share of the loss on this most
    likely token. From step 1 on only every stride-th position counts, an unbiased sample, because neighbours
    are similar.
    """
    b, t = batch.best.shape
    position = torch.arange(t, device=batch.best.device)
    # where the target predicts a token of the answer: after token p it predicts token p + 1
    answer = (position + 1 >= batch.n_prompt[:, None]) & (position < batch.n_tokens[:, None])
    speaks = answer & teacher.in_draft[batch.best]
    place = torch.full((b, t), -1, device=speaks.device)
    place[speaks] = torch.arange(int(speaks.sum()), device=speaks.device)
    with torch.no_grad():
        soft = teacher.probabilities(batch.final[speaks], temperature)
        best = teacher.t2d[batch.best[speaks]]
    real = position + 1 < batch.n_tokens[:, None]  # token t + 1, which the row needs, exists
    total, losses, agree, n = batch.final.new_zeros(()), list[float](), list[float](), 0
    for j, h in enumerate(head.unroll(batch.features, batch.tokens, steps, stride, offset)):
        ahead = torch.where(real, F.pad(place[:, 1 + j :], (0, min(1 + j, t)), value=-1)[:, :t], -1)
        if j:
            ahead = ahead[:, offset::stride]
        rows = (ahead.flatten() >= 0).nonzero()[:, 0]
        if len(rows) == 0:
            losses.append(0.0)
            agree.append(0.0)
            continue
        states, at = h.flatten(0, 1)[rows], ahead.flatten()[rows]
        loss, same = Distillation.apply(states, head.lm_head.weight, soft, best, at, hard, dtype)
        total = total + decay**j * loss
        losses.append(float(loss.detach()))
        agree.append(float(same))
        n = n or len(rows)
    return Loss(total / sum(decay**j for j in range(steps)), losses, agree, n)
