"""Tiny models whose rows cost little, and what they generate: for tests of drafts from texts."""

from __future__ import annotations

import itertools

from eagle3_llama import EagleLlama
from eagle3_llama.runtime.costs import Costs

N = 90
PROMPT = [40, 41, 42, 43, 44, 45, 46, 47] * 3
LAYERS = [0.0, *(0.010 * (0.95 + 0.05 * n) for n in range(1, 65))]
CHEAP = Costs(LAYERS, [t / 4 for t in LAYERS], [t / 20 for t in LAYERS], [0.0] * 65, 0.0, 8.0)
SAMPLINGS = {
    "greedy": {"temp": 0.0},
    "sampled": {"temp": 0.15, "top_p": 0.95},
    "penalties": {"temp": 0.15, "repeat_penalty": 1.02},
}


def load(files, head=False, **settings):
    common = {"n_ctx": 512, "n_threads": 1, "flash_attn": True, "verbose": False}
    return EagleLlama(files[0], eagle=files[1] if head else None, **common | settings)


def tokens_of(llm, n=N, **arguments):
    llm.set_seed(5)
    return list(itertools.islice(llm.generate(PROMPT, **arguments), n))
