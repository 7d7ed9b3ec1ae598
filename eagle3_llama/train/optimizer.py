"""AdamW, as in EAGLE's training, or Muon for the matrices inside the head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .model import Head

BETAS = (0.9, 0.95)
MOMENTUM = 0.95


class Muon(torch.optim.Optimizer):
    """Momentum with an orthogonalised step (Jordan et al. 2024), scaled as AdamW's step (arXiv 2502.16982).

    torch.optim.Muon computes in bfloat16, which is many times slower on CPUs without bfloat16 instructions.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # nothing here passes a closure
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - MOMENTUM)
                update = orthogonal(p.grad.lerp(momentum, MOMENTUM))
                p.add_(update, alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)


def orthogonal(g: Tensor, steps: int = 5) -> Tensor:
    """The nearest matrix to g, [m, n], with singular values of about one, by Newton-Schulz iterations."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        s = x @ x.T
        x = torch.addmm(x, torch.addmm(s, s, s, beta=b, alpha=c), x, beta=a)
    return x.T if g.shape[0] > g.shape[1] else x


class Optimizers:
    """The optimizers of a head's parameters, used as one. kind: adamw or muon."""

    def __init__(self, head: Head, kind: str, lr: float) -> None:
        matrices = [p for n, p in head.named_parameters() if p.ndim == 2 and not n.startswith("lm_head")]
        inner = matrices if kind == "muon" else []
        taken = set(map(id, inner))
        rest = [p for p in head.parameters() if id(p) not in taken]
        self.all: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=lr, betas=BETAS, weight_decay=0.0, fused=True)
        ]
        if inner:
            self.all.append(Muon(inner, lr))

    def step(self, lr: float) -> None:
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [o.state_dict() for o in self.all]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for optimizer, state in zip(self.all, states, strict=True):
            optimizer.load_state_dict(state)
