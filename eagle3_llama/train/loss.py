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
    def of(cls, weights: TargetWeights, head: Head, device: str) -> "Teacher":
        d2t = head.d2t.cpu()
        t2d = torch.full((weights.shape.n_vocab,), -1, dtype=torch.long)
        t2d[d2t] = torch.arange(len(d2t))
        to = lambda a: torch.from_numpy(a).to(device)  # noqa: E731
        return cls(to(weights.get("output_norm.weight")), to(weights.rows(weights.output_name, d2t.numpy())), weights.shape.rms_eps,
                   (t2d >= 0).to(device), t2d.to(device))

    def probabilities(self, final: Tensor, temperature: float) -> Tensor:
        """The target's distribution over the draft vocabulary [n, draft_vocab], from its last layer's output [n, n_embd]."""
        logits = F.rms_norm(final, (final.shape[-1],), self.norm, self.eps) @ self.output.T
        return (logits / temperature).softmax(-1)


@dataclasses.dataclass
class Loss:
    total: Tensor  # what to minimise
    losses: list[float]  # by step
    agree: list[float]  # share of positions where the head's best is the target's, by step
    positions: int


def training_time_test(head: Head, teacher: Teacher, batch: Batch, steps: int, decay: float, hard: float = 0.0,
                       temperature: float = 1.0) -> Loss:
    """Cross-entropy of step j at position t against the target's distribution at t + 1 + j, weighted decay^j.

    Positions count where the predicted token t + 2 + j belongs to the answer and the target's best token there can be
    drafted (as the EAGLE code masks). hard: share of the loss taken on that best token instead.
    """
    b, t = batch.best.shape
    position = torch.arange(t, device=batch.best.device)
    # where the target speaks: after token p it predicts p + 1, an answer token
    speaks = (position + 1 >= batch.n_prompt[:, None]) & (position < batch.n_tokens[:, None]) & teacher.in_draft[batch.best]
    place = torch.full((b, t), -1, device=speaks.device)
    place[speaks] = torch.arange(int(speaks.sum()), device=speaks.device)
    with torch.no_grad():
        soft = teacher.probabilities(batch.final[speaks], temperature)
        best = teacher.t2d[batch.best[speaks]]
    # a row of the head is needed while any of its steps has a target: real positions only
    ahead = [F.pad(place[:, 1 + j :], (0, min(1 + j, t)), value=-1)[:, :t] for j in range(steps)]
    real = position + 1 < batch.n_tokens[:, None]  # its pair, token t + 1, exists
    total, losses, agree, n = batch.final.new_zeros(()), [], [], 0
    wanted = [torch.where(real, a, -1).flatten() for a in ahead]
    pick = (torch.stack(wanted) >= 0).any(0).nonzero()[:, 0]
    for j, logits in enumerate(head.unroll(batch.features, batch.tokens, steps, pick)):
        at = wanted[j][pick]
        rows = (at >= 0).nonzero()[:, 0]
        if len(rows) == 0:
            losses.append(0.0), agree.append(0.0)
            continue
        log_q, at = logits[rows].log_softmax(-1), at[rows]
        loss = -(soft[at] * log_q).sum(-1).mean()
        if hard:
            loss = (1 - hard) * loss + hard * F.nll_loss(log_q, best[at])
        total = total + decay**j * loss
        losses.append(float(loss.detach()))
        agree.append(float((log_q.detach().argmax(-1) == best[at]).float().mean()))
        n = n or len(rows)
    return Loss(total / sum(decay**j for j in range(steps)), losses, agree, n)
