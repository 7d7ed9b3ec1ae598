"""The EAGLE-3 head in PyTorch: one decoder layer over (embedding, g), with its own state fed back.

It follows EAGLE-3 (arXiv 2503.01840) and SafeAILab's cnets.py. Parameters have the names of SpecForge's
layout.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .weights import TargetSizes, TargetWeights


class RMSNorm(nn.Module):
    def __init__(self, n: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(n)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, s: TargetSizes) -> None:
        super().__init__()
        self.n_head, self.n_kv, self.d = s.n_head, s.n_head_kv, s.head_dim
        self.q_proj = nn.Linear(2 * s.n_embd, s.n_head * s.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * s.n_embd, s.n_head_kv * s.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * s.n_embd, s.n_head_kv * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.n_head * s.head_dim, s.n_embd, bias=False)

    def project(self, u: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each [B, H, T, d], with shared key/value heads repeated. q and k are rotated."""
        b, t, _ = u.shape
        split = lambda x, n: x.view(b, t, n, self.d).transpose(1, 2)
        q = rotate(split(self.q_proj(u), self.n_head), cos, sin)
        k = rotate(split(self.k_proj(u), self.n_kv), cos, sin)
        repeat = lambda x: x.repeat_interleave(self.n_head // self.n_kv, 1)
        return q, repeat(k), repeat(split(self.v_proj(u), self.n_kv))


class MLP(nn.Module):
    def __init__(self, s: TargetSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.n_embd, s.n_ff, bias=False)
        self.up_proj = nn.Linear(s.n_embd, s.n_ff, bias=False)
        self.down_proj = nn.Linear(s.n_ff, s.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, s: TargetSizes) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(s), MLP(s)
        self.input_layernorm = RMSNorm(s.n_embd, s.rms_eps)
        self.hidden_norm = RMSNorm(s.n_embd, s.rms_eps)
        self.post_attention_layernorm = RMSNorm(s.n_embd, s.rms_eps)

    def pair(self, e: Tensor, x: Tensor) -> Tensor:
        """The attention's input, [..., 2 * n_embd]: normalised token embeddings e and states x."""
        return torch.cat([self.input_layernorm(e), self.hidden_norm(x)], -1)


class Head(nn.Module):
    """Drafts from features, [B, T, layers * n_embd], and tokens. d2t: target id by draft id."""

    embedding: Tensor
    d2t: Tensor
    frequencies: Tensor

    def __init__(self, s: TargetSizes, n_features: int, embedding: Tensor, d2t: Tensor) -> None:
        super().__init__()
        self.shape, self.n_features = s, n_features
        self.fc = nn.Linear(n_features * s.n_embd, s.n_embd, bias=False)
        self.midlayer = Layer(s)
        self.norm = RMSNorm(s.n_embd, s.rms_eps)
        self.lm_head = nn.Linear(s.n_embd, len(d2t), bias=False)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("d2t", d2t, persistent=False)
        self.register_buffer("frequencies", rotary_frequencies(s), persistent=False)

    def unroll(
        self, features: Tensor, tokens: Tensor, steps: int, stride: int = 1, offset: int = 0
    ) -> Iterator[Tensor]:
        """Training-time test: yields the states of steps 0..steps-1, [B, T, n_embd], normalised for lm_head.

        tokens: long [B, T + steps]. Step j at position t reads tokens[t + 1 + j] of the text and predicts
        tokens[t + 2 + j]. It attends to the real rows up to t and to the earlier steps of its own chain. From
        step 1 on, only every stride-th position from `offset` takes part: [B, len(range(offset, T, stride)),
        n_embd].
        """
        t = features.shape[1]
        chain = Chain(self, features)
        for j in range(steps):
            if j == 1:
                chain.thin(slice(offset, None, stride))
            yield self.norm(chain.step(self.embedding[tokens[:, 1 + j : 1 + j + t][:, chain.kept]]))

    def draft(self, features: Tensor, tokens: Tensor, steps: int) -> Tensor:
        """Greedy chains from every position at once, as target ids, [B, T, steps]. tokens: [B, T + 1]."""
        chain, out = Chain(self, features), []
        following = tokens[:, 1 : 1 + features.shape[1]]
        for _ in range(steps):
            h = chain.step(self.embedding[following])
            following = self.d2t[self.lm_head(self.norm(h)).argmax(-1)]
            out.append(following)
        return torch.stack(out, -1)


class Chain:
    """The state of one unroll. The next step reads x in place of g."""

    def __init__(self, head: Head, features: Tensor) -> None:
        self.head, self.x = head, head.fc(features).float()  # the residual stays float32 under autocast
        t = features.shape[1]
        self.positions = torch.arange(t, device=features.device)
        self.kept = slice(None)
        self.causal = torch.ones(t, t, dtype=torch.bool, device=features.device).tril()
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def thin(self, kept: slice) -> None:
        """After the first step, keeps only the chains of these positions. They still see all real rows."""
        self.kept = kept
        self.x, self.positions, self.causal = self.x[:, kept], self.positions[kept], self.causal[kept]

    def step(self, e: Tensor) -> Tensor:
        """One pass over the kept positions. e: [B, T, n_embd]. Returns the state before the final norm."""
        layer = self.head.midlayer
        h = self.x + layer.self_attn.o_proj(self.attend(e))
        self.x = h + layer.mlp(layer.post_attention_layernorm(h))
        return self.x

    def attend(self, e: Tensor) -> Tensor:
        """The output of the attention heads, [B, T, n_head * head_dim]. Keeps the step's keys and values."""
        layer = self.head.midlayer
        u = layer.pair(e, self.x)
        angles = (self.positions + len(self.keys))[:, None] * self.head.frequencies
        q, k, v = layer.self_attn.project(u, angles.cos(), angles.sin())
        self.keys.append(k)
        self.values.append(v)
        return self._mix(q).transpose(1, 2).flatten(2)

    def _mix(self, q: Tensor) -> Tensor:
        if len(self.keys) == 1:
            return F.scaled_dot_product_attention(q, self.keys[0], self.values[0], is_causal=True)
        scale = q.shape[-1] ** -0.5
        real = (q @ self.keys[0].transpose(-1, -2) * scale).masked_fill(~self.causal, float("-inf"))
        own = [(q * k).sum(-1, keepdim=True) * scale for k in self.keys[1:]]
        p = torch.cat([real, *own], -1).softmax(-1)
        t = real.shape[-1]
        out = p[..., :t] @ self.values[0]
        for i, v in enumerate(self.values[1:]):
            out = out + p[..., t + i : t + i + 1] * v
        return out


def rotary_frequencies(s: TargetSizes) -> Tensor:
    """Radians per position, float32 [head_dim / 2]."""
    half = torch.arange(0, s.head_dim, 2, dtype=torch.float64) / s.head_dim
    return (s.rope_theta**-half).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary embedding of x, [B, H, T, d], by angles [T, d / 2]."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def build(weights: TargetWeights, n_features: int, d2t: np.ndarray, seed: int) -> Head:
    """A head with the target's last layer, final norm and output rows; g starts as the last feature."""
    torch.manual_seed(seed)
    s = weights.shape
    embedding = torch.from_numpy(weights.rows("token_embd.weight"))
    head = Head(s, n_features, embedding, torch.from_numpy(d2t.astype(np.int64)))
    last = weights.last_layer()
    with torch.no_grad():
        head.lm_head.weight.copy_(torch.from_numpy(weights.rows(weights.output_name, d2t)))
        _copy(head.norm.weight, weights.get("output_norm.weight"))
        head.fc.weight.normal_(0, 0.2 / (n_features * s.n_embd) ** 0.5)
        head.fc.weight[:, -s.n_embd :] += torch.eye(s.n_embd)
        layer, a = head.midlayer, head.midlayer.self_attn
        for linear, name in ((a.q_proj, "attn_q"), (a.k_proj, "attn_k"), (a.v_proj, "attn_v")):
            linear.weight.normal_(0, 0.2 / (2 * s.n_embd) ** 0.5)
            if name in last and last[name].shape == (linear.weight.shape[0], s.n_embd):
                linear.weight[:, s.n_embd :] += torch.from_numpy(last[name])
        for parameter, name in (
            (a.o_proj.weight, "attn_output"),
            (layer.mlp.gate_proj.weight, "ffn_gate"),
            (layer.mlp.up_proj.weight, "ffn_up"),
            (layer.mlp.down_proj.weight, "ffn_down"),
            (layer.hidden_norm.weight, "attn_norm"),
            (layer.post_attention_layernorm.weight, "ffn_norm"),
        ):
            _copy(parameter, last.get(name))
        # embeddings are much smaller than the residual stream, so the norm of the embeddings starts at one
        layer.input_layernorm.weight.fill_(1.0)
    return head


def _copy(parameter: Tensor, value: np.ndarray | None) -> None:
    """Copies a weight of the target. If its shape differs, as with experts, the random start stays."""
    if value is not None and tuple(value.shape) == tuple(parameter.shape):
        parameter.copy_(torch.from_numpy(value))
