"""What `generate` and `chat` share: the options of the model, of its drafts and of sampling."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

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
    """The options, by their names. Those of a command that has with_answer_options() follow its own."""

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


def with_answer_options(command: Callable[..., None]) -> Callable[..., None]:
    """Makes a command of Typer whose options are the command's own and the fields of AnswerOptions.

    command: its first parameter is an AnswerOptions.
    """
    shared = _parameters(AnswerOptions)
    own = _parameters(command)[1:]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        options = AnswerOptions(**{p.name: given.pop(p.name) for p in shared})
        command(options, **given)

    parameters = [*shared[:2], *own, *shared[2:]]  # model and head come first in --help
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _parameters(of: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters by keyword, so that those without a default may follow others. Types are resolved."""
    hints = get_type_hints(of, include_extras=True)
    return [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[p.name])
        for p in inspect.signature(of).parameters.values()
    ]
