"""Does a head know its target? Acceptance on three prompts, and whether other layers would serve it better.

A head that reads the wrong layers still runs, at a fraction of its acceptance: only a trial tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from .convert.target import read_target

N_MAX, N_PREDICT = 4, 64
BETTER = 1.05  # times the tokens a round: less is chance
PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List five things to pack for a weekend in the mountains, and say why.",
)


@dataclass(frozen=True)
class Trial:
    """layers: ids of target layer inputs; accepted: share of drafts accepted at position 1, 2, ...; length: tokens a round."""

    layers: list[int]
    accepted: list[float]
    length: float


def self_test(head: str | Path, target: str | Path, n_threads: int | None = None, on_trial: Callable[[Trial], None] | None = None) -> list[Trial]:
    """The head as its file has it, then with all its layers one lower and one higher, where the target has those.

    Greedy, chains of 4, three built-in prompts in the target's chat template. Raises EagleError as loading does.
    """
    trials = [_try(head, target, None, n_threads, on_trial)]
    own, n_layer = trials[0].layers, read_target(Path(target)).n_layer
    for shift in (-1, 1):
        layers = [i + shift for i in own]
        if layers[0] >= 0 and layers[-1] <= n_layer:
            trials.append(_try(head, target, layers, n_threads, on_trial))
    return trials


def verdict(trials: list[Trial]) -> tuple[bool, str]:
    """(whether the layers are right, one line that says so)."""
    own, best = trials[0], max(trials, key=lambda t: t.length)
    if best.length > BETTER * own.length:
        ids = ",".join(map(str, best.layers))
        return False, (f"layers {best.layers} bring {best.length:.2f} tokens a round, {own.layers} only {own.length:.2f}: "
                       f"convert again with --extract-layers {ids}")  # fmt: skip
    return True, f"layers {own.layers} bring {own.length:.2f} tokens a round; none of the neighbouring layers brings more"


def _try(head: str | Path, target: str | Path, layers: list[int] | None, n_threads: int | None, on_trial: Callable[[Trial], None] | None) -> Trial:
    from .chat import chat_tokens, generate
    from .llama import EagleLlama

    llm = EagleLlama(str(target), eagle_path=str(head), n_max=N_MAX, extract_layers=layers, n_ctx=512, n_threads=n_threads,
                     n_threads_batch=n_threads, verbose=False)  # fmt: skip
    try:
        for prompt in PROMPTS:
            llm.reset()
            list(generate(llm, chat_tokens(llm, prompt), N_PREDICT, temp=0.0))
        trial = Trial(llm._engine.head_info()["layers"], llm.stats.accept_per_position, llm.stats.mean_accepted_length)
    finally:
        llm.close()
    if on_trial is not None:
        on_trial(trial)
    return trial
