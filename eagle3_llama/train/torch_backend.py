"""The target in PyTorch, from the GGUF's dequantised weights, for GPUs that llama.cpp was not built for.

It supports the llama family: RMSNorm, rotary attention with shared heads, SwiGLU. It refuses other
architectures.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import EagleError, ErrorKind
from .model import rotary_frequencies, rotate
from .weights import TargetWeights, half_split

ATTENTION = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output")
LAYER = (*ATTENTION, "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


class TorchBackend:
    """The KV cache has n_slots sequences: [layer, slot, n_ctx, heads, head_dim].

    Raises EagleError UNSUPPORTED for a model that is not a plain llama.
    """

    def __init__(self, path: str, layers: Sequence[int], n_slots: int, n_ctx: int, device: str) -> None:
        w = TargetWeights(path)
        self.s, self.layers, self.device = w.shape, [*layers, w.shape.n_layer], device
        known = {
            "token_embd.weight",
            "output.weight",
            "output_norm.weight",
            "rope_freqs.weight",
            *(f"blk.{i}.{name}.weight" for i in range(self.s.n_layer) for name in LAYER),
        }
        other = sorted(set(w.tensors) - known)
        if w.arch != "llama" or other or "rope_freqs.weight" in w.tensors:
            raise EagleError(
                ErrorKind.UNSUPPORTED,
                f"capture with PyTorch supports only plain llama models, but {path} is {w.arch} "
                f"with {', '.join(other[:3]) or 'scaled rotary embeddings'}: use --capture llama",
            )
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        to = lambda a: torch.from_numpy(a).to(device, self.dtype)
        self.embedding, self.norm = to(w.rows("token_embd.weight")), to(w.get("output_norm.weight"))
        self.output = to(w.rows("output.weight")) if "output.weight" in w.tensors else self.embedding
        self.blocks = [
            {name: to(self._half_split(name, w.rows(f"blk.{i}.{name}.weight"))) for name in LAYER}
            for i in range(self.s.n_layer)
        ]
        size = (self.s.n_layer, n_slots, n_ctx, self.s.n_head_kv, self.s.head_dim)
        self.keys, self.values = (torch.zeros(size, device=device, dtype=self.dtype) for _ in range(2))
        self.frequencies = rotary_frequencies(self.s).to(device)

    def _half_split(self, name: str, w: np.ndarray) -> np.ndarray:
        heads = {"attn_q": self.s.n_head, "attn_k": self.s.n_head_kv}.get(name)
        return half_split(w, heads) if heads else w

    @torch.inference_mode()
    def forward(
        self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        to = lambda x: torch.tensor(list(x), device=self.device)
        ids, position, slot = to(tokens), to(positions), to(slots)
        angles = position[:, None] * self.frequencies
        rotary = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        # rows of one slot are computed together; of rows in many slots, each attends to its own slot
        together = len(set(slots)) == 1
        n_past = int(position.max()) + 1
        mask = torch.arange(n_past, device=self.device) <= position[:, None]
        x, kept = self.embedding[ids], []
        for i, block in enumerate(self.blocks):
            if i in self.layers:
                kept.append(x)
            u = self._rms(x, block["attn_norm"])
            x = x + self._attention(i, block, u, rotary, position, slot, mask, together)
            u = self._rms(x, block["ffn_norm"])
            x = x + (F.silu(u @ block["ffn_gate"].T) * (u @ block["ffn_up"].T)) @ block["ffn_down"].T
        kept.append(x)
        logits = self._rms(x, self.norm) @ self.output.T
        return logits.float().cpu().numpy(), torch.stack(kept, 1).float().cpu().numpy()

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.s.rms_eps)

    def _attention(
        self,
        i: int,
        block: dict[str, Tensor],
        u: Tensor,
        rotary: tuple[Tensor, Tensor],
        position: Tensor,
        slot: Tensor,
        mask: Tensor,
        together: bool,
    ) -> Tensor:
        n, d, s = len(u), self.s.head_dim, self.s
        heads = lambda name, h: (u @ block[name].T).view(1, n, h, d).transpose(1, 2)
        q, k = rotate(heads("attn_q", s.n_head), *rotary), rotate(heads("attn_k", s.n_head_kv), *rotary)
        self.keys[i, slot, position] = k[0].transpose(0, 1)
        self.values[i, slot, position] = heads("attn_v", s.n_head_kv)[0].transpose(0, 1)
        own = slot[:1] if together else slot
        past_k, past_v = (
            c[i, own, : mask.shape[1]].transpose(1, 2).repeat_interleave(s.n_head // s.n_head_kv, 1)
            for c in (self.keys, self.values)
        )
        if together:
            out = F.scaled_dot_product_attention(q, past_k, past_v, attn_mask=mask)[0].transpose(0, 1)
        else:
            each, own_mask = q[0].transpose(0, 1)[:, :, None], mask[:, None, None]
            out = F.scaled_dot_product_attention(each, past_k, past_v, attn_mask=own_mask)[:, :, 0]
        return out.reshape(n, -1) @ block["attn_output"].T

    def clear(self, slot: int) -> None:
        """Does nothing: a row attends only to positions up to its own, which are written before."""

    def close(self) -> None:
        self.blocks = []
