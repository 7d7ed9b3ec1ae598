"""Training-time test: what the head says after 1..K of its own steps against what the target would say there."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from .data import Batch
from .model import Head
from .weights import TargetWeights


@dataclasses.dataclass
class Teacher:
    """The target's end: final norm weight [n_embd] and its output rows over the draft vocabulary."""

    norm: Tensor
    output: Tensor
    eps: float
    in_draft: Tensor  # bool [n_vocab]: may be drafted
    t2d: Tensor  # long [n_vocab]: draft id, or -1

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
        """The target's distribution over the draft vocabulary [n, draft_vocab], from its last layer's output [n, n_embd]."""
        logits = F.rms_norm(final, (final.shape[-1],), self.norm, self.eps) @ self.output.T
        return (logits.float() / temperature).softmax(-1)


@dataclasses.dataclass
class Loss:
    total: Tensor  # what to minimise
    losses: list[float]  # by step
    agree: list[float]  # share of positions where the head's best is the target's, by step
    positions: int


class Distillation(torch.autograd.Function):
    """Mean cross-entropy of softmax(h @ weight.T) against soft[at], mixed with that against best[at].

    Forward makes the gradients as well, some rows at a time: [n, draft_vocab] never lies in memory as a whole, and what
    does fits the cache. dtype: of the products; the rest is float32. Returns (loss, share of rows whose best agrees).
    """

    ROWS = {"cpu": 256, "cuda": 8192}

    @staticmethod
    def forward(
        ctx,
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
                want.scatter_add_(
                    1, best[at[rows], None], torch.full_like(rows, hard, dtype=want.dtype)[:, None]
                )
            loss -= torch.dot(want.flatten(), log_q.flatten())
            grad = log_q.exp_().sub_(want).div_(n).to(dtype)
            dh[rows[0] : rows[-1] + 1] = grad @ low
            dw += grad.T @ part
        ctx.save_for_backward(dh, dw)
        agree /= n
        ctx.mark_non_differentiable(agree)
        return loss / n, agree

    @staticmethod
    def backward(ctx, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
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
    """Cross-entropy of step j at position t against the target's distribution at t + 1 + j, weighted decay^j.

    Positions count where the predicted token t + 2 + j belongs to the answer and the target's best token there can be
    drafted (as the EAGLE code masks). hard: share of the loss taken on that best token instead. From step 1 on only
    every stride-th position counts: an unbiased sample, since neighbouring chains say much the same.
    """
    b, t = batch.best.shape
    position = torch.arange(t, device=batch.best.device)
    # where the target speaks: after token p it predicts p + 1, an answer token
    speaks = (
        (position + 1 >= batch.n_prompt[:, None])
        & (position < batch.n_tokens[:, None])
        & teacher.in_draft[batch.best]
    )
    place = torch.full((b, t), -1, device=speaks.device)
    place[speaks] = torch.arange(int(speaks.sum()), device=speaks.device)
    with torch.no_grad():
        soft = teacher.probabilities(batch.final[speaks], temperature)
        best = teacher.t2d[batch.best[speaks]]
    real = position + 1 < batch.n_tokens[:, None]  # its pair, token t + 1, exists
    total, losses, agree, n = batch.final.new_zeros(()), [], [], 0
    for j, h in enumerate(head.unroll(batch.features, batch.tokens, steps, stride, offset)):
        ahead = torch.where(real, F.pad(place[:, 1 + j :], (0, min(1 + j, t)), value=-1)[:, :t], -1)
        if j:
            ahead = ahead[:, offset::stride]
        rows = (ahead.flatten() >= 0).nonzero()[:, 0]
        if len(rows) == 0:
            losses.append(0.0), agree.append(0.0)
            continue
        loss, same = Distillation.apply(
            h.flatten(0, 1)[rows], head.lm_head.weight, soft, best, ahead.flatten()[rows], hard, dtype
        )
        total = total + decay**j * loss
        losses.append(float(loss.detach()))
        agree.append(float(same))
        n = n or len(rows)
    return Loss(total / sum(decay**j for j in range(steps)), losses, agree, n)
