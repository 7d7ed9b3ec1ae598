"""The forward pass of a head in NumPy (float64, all variants). The native graph is compared with it.

Generation never uses it. It follows the equations of EAGLE-1 (arXiv 2401.15077), EAGLE-3 (arXiv 2503.01840)
and EAGLE-3.1 (arXiv 2605.09992), with Hugging Face's rotary layout. It shares no code with the converter or
the native library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class ReferenceRope:
    """Rotary embeddings of a head's first n_dims dimensions, of all if it is None.

    kind: None, linear, yarn or llama3; llama3 needs `divisors`, [n_dims / 2].
    """

    base: float = 10000.0
    kind: str | None = None
    factor: float = 1.0
    original_context: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # scales cosine and sine, only for yarn
    divisors: np.ndarray | None = None
    n_dims: int | None = None

    def frequencies(self, d: int) -> np.ndarray:
        """Radians per position, [d / 2]."""
        plain = self.base ** (-np.arange(0, d, 2) / d)
        if self.divisors is not None:
            return plain / self.divisors
        if self.kind == "linear":
            return plain / self.factor
        if self.kind != "yarn":
            return plain
        dim = lambda turns: (
            d * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(self.base))
        )
        low, high = max(math.floor(dim(self.beta_fast)), 0), min(math.ceil(dim(self.beta_slow)), d - 1)
        stretched = np.clip((np.arange(d // 2) - low) / max(high - low, 0.001), 0, 1)
        return plain * (1 - stretched) + plain / self.factor * stretched


@dataclass(frozen=True)
class ReferenceHead:
    """w: weights by GGUF name, matrices as [rows, columns], q and k in Hugging Face's half-split order.

    feature_norm: (weight, epsilon) of the target's final norm, if its last state is the feature. The fc of
    EAGLE-1 is called fc2.weight here, because it does the same as the second one of two projections.
    """

    w: dict[str, np.ndarray]
    n_head: int
    n_head_kv: int
    head_dim: int
    eps: float = 1e-6
    rope: ReferenceRope = field(default_factory=ReferenceRope)
    norm_before_residual: bool = False
    norm_output: bool = False
    feature_norm: tuple[np.ndarray, float] | None = None

    @property
    def n_layer(self) -> int:
        return 1 + max(int(name.split(".")[1]) for name in self.w if name.startswith("blk."))

    def fuse(self, features: np.ndarray) -> np.ndarray:
        """Fuses features, [n, layers * target_hidden], into g, [n, hidden]."""
        x = np.asarray(features, np.float64)
        if "fc_norm.weight" in self.w:
            scale = self.w["fc_norm.weight"]  # [layers, target_hidden]
            parts = zip(np.split(x, len(scale), axis=1), scale)
            x = np.concatenate([_rms(part, weight, self.eps) for part, weight in parts], axis=1)
        if "enc.output_norm.weight" in self.w:
            x = _rms(x, self.w["enc.output_norm.weight"], self.eps)
        if self.feature_norm is not None:
            x = _rms(x, *self.feature_norm)
        return self._linear("fc", x) if "fc.weight" in self.w else x

    def forward(self, tokens: np.ndarray, g: np.ndarray) -> dict[str, np.ndarray]:
        """Every stage by name, [n, width]. Row p has tokens[p], the token of position p + 1, and g[p].

        g[p] is fuse() of the target's features. After the first step of a draft it is `state` of the row
        before.
        """
        e, g = self.w["token_embd.weight"][tokens].astype(np.float64), np.asarray(g, np.float64)
        out = {"g": g}
        cur = self._linear("fc2", np.concatenate([e, g], axis=1)) if "fc2.weight" in self.w else g
        for i in range(self.n_layer):
            cur = self._layer(i, cur, e, out)
        final = self._norm("output_norm.weight", cur) if "output_norm.weight" in self.w else cur
        out["prenorm"] = cur
        out["state"] = final if self.norm_output else cur
        out["logits"] = final @ self.w["output.weight"].T.astype(np.float64)
        return out

    def draft_logits(self, tokens: np.ndarray, features: np.ndarray, chain: list[int]) -> np.ndarray:
        """Logits before each token of a draft chain, [len(chain), draft vocabulary].

        The chain follows `tokens`, of which the target has not decoded the last one yet.
        """
        g, context, out = self.fuse(features), list(tokens), []
        for token in chain:
            stages = self.forward(np.array(context), g)
            out.append(stages["logits"][-1])
            context.append(token)
            g = np.concatenate([g, stages["state"][-1:]])
        return np.array(out)

    def _layer(self, i: int, cur: np.ndarray, e: np.ndarray, out: dict[str, np.ndarray]) -> np.ndarray:
        at, residual = f"blk.{i}.", cur
        u = cur
        if at + "attn_norm_2.weight" in self.w:
            normed = self._norm(at + "attn_norm_2.weight", cur)
            residual = normed if self.norm_before_residual else cur
            u = np.concatenate([self._norm(at + "attn_norm.weight", e), normed], axis=1)
        elif at + "attn_norm.weight" in self.w:
            u = self._norm(at + "attn_norm.weight", cur)
        out[f"attn_in-{i}"] = u
        out[f"attn_out-{i}"] = attended = self._attention(at, u)
        cur = residual + attended
        x = self._norm(at + "ffn_norm.weight", cur)
        gate = self._linear(at + "ffn_gate", x)
        out[f"ffn_out-{i}"] = added = self._linear(
            at + "ffn_down", gate / (1 + np.exp(-gate)) * self._linear(at + "ffn_up", x)
        )
        return cur + added

    def _attention(self, at: str, u: np.ndarray) -> np.ndarray:
        n, d = len(u), self.head_dim
        q, k, v = (self._linear(at + f"attn_{x}", u).reshape(n, -1, d) for x in "qkv")  # [n, heads, d]
        if at + "attn_q_norm.weight" in self.w:
            q, k = self._norm(at + "attn_q_norm.weight", q), self._norm(at + "attn_k_norm.weight", k)
        q, k = self._rotate(q), self._rotate(k)
        k, v = (np.repeat(x, self.n_head // self.n_head_kv, axis=1) for x in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(d)
        scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return self._linear(at + "attn_output", np.einsum("hqk,khd->qhd", weights, v).reshape(n, -1))

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        n_dims = self.rope.n_dims or self.head_dim
        angle = np.arange(len(x))[:, None, None] * self.rope.frequencies(n_dims)
        scale = self.rope.attention_factor if self.rope.kind == "yarn" else 1.0
        cos, sin = np.cos(angle) * scale, np.sin(angle) * scale
        a, b = np.split(x[..., :n_dims], 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., n_dims:]], axis=-1)

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return _rms(x, self.w[name], self.eps)

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.w[f"{name}.weight"].T.astype(np.float64) + self.w.get(f"{name}.bias", 0.0)


def _rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
