"""Options that `generate` and `chat` share: the options of the model, of its drafts and of sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..common.options import (
    N_CTX,
    Eagle,
    FlashAttn,
    FromText,
    GpuLayers,
    Model,
    NCtx,
    NMax,
    NMin,
    PMin,
    Seed,
    Temp,
    Threads,
    TopK,
    TopP,
    TreeShape,
)
from ..runtime.machine import cores


@dataclass(frozen=True)
class AnswerOptions:
    """The options, by their names."""

    model: Model
    eagle: Eagle = None
    temp: Temp = 0.8
    top_p: TopP = 0.95
    top_k: TopK = 40
    seed: Seed = 1
    n_max: NMax = None
    n_min: NMin = 0
    p_min: PMin = 0.0
    tree: TreeShape = None
    text: FromText = True
    n_ctx: NCtx = N_CTX
    threads: Threads = None
    n_gpu_layers: GpuLayers = 0
    flash_attn: FlashAttn = None

    @property
    def sampling(self) -> dict[str, Any]:
        return {"temp": self.temp, "top_p": self.top_p, "top_k": self.top_k}

    def load(self) -> Any:
        """An EagleLlama with these settings. Says so if llama.cpp makes the context larger."""
        from ..llama.eagle_llama import EagleLlama
        from .conversation import say

        n_threads = self.threads or cores()
        llm = EagleLlama(
            self.model,
            eagle=self.eagle,
            n_max=self.n_max,
            n_min=self.n_min,
            p_min=self.p_min,
            tree=self.tree,
            text=self.text,
            n_ctx=self.n_ctx,
            n_threads=n_threads,
            n_threads_batch=n_threads,
            n_gpu_layers=self.n_gpu_layers,
            flash_attn=self.flash_attn,
            verbose=False,
        )
        if llm.n_ctx() != self.n_ctx:
            say(f"[the context has {llm.n_ctx()} tokens, because llama.cpp rounds {self.n_ctx} up]")
        llm.set_seed(self.seed)
        return llm
