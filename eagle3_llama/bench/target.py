"""A model file, loaded once per kind of mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .child import Crash
from .mode import Loading, Mode
from .modes import Eagle, Plain
from .turns import Run


class BenchTarget:
    """The loads of a model, which share the weights through mmap if possible.

    failed: why modes cannot go on, by their names. Their processes ended; the others are run to the end.
    """

    def __init__(
        self, path: str, modes: Sequence[Mode], n_threads: int, n_ctx: int, flash_attn: bool | None = None
    ) -> None:
        self.path, self.modes = str(path), list(modes)
        if not any(isinstance(m, Plain) for m in modes):
            self.modes.insert(0, Plain("plain"))
        loading = Loading(self.path, n_threads, n_ctx, flash_attn)
        self.failed: dict[str, str] = {}
        self.plain = Plain("plain").load(loading)
        self._llms: dict[tuple[str, str | None], Any] = {Plain("plain").key: self.plain}
        for mode in self.modes:
            try:
                if mode.key not in self._llms:
                    self._llms[mode.key] = mode.load(loading)
            except Crash as e:
                self.failed[mode.name] = str(e)
        self.format = file_format(self.plain)

    def llm(self, mode: Mode) -> Any:
        """The result of the mode's load()."""
        return self._llms[mode.key]

    def working(self) -> list[Mode]:
        return [m for m in self.modes if m.name not in self.failed]

    def drafting(self) -> list[Eagle]:
        """The modes of EagleLlama."""
        return [m for m in self.modes if isinstance(m, Eagle)]

    def settle(self, prompts: list[list[int]]) -> None:
        """Sets the modes that have a setting to find to their best one."""
        for mode in self.working():
            try:
                mode.settle(self.llm(mode), prompts)
            except Crash as e:
                self.failed[mode.name] = str(e)

    def seed(self, seed: int) -> None:
        for llm in self._llms.values():
            llm.set_seed(seed)

    def run(self, mode: Mode, prompt: list[int], n_predict: int, sampling: dict[str, Any]) -> Run | None:
        """Generates one answer. None, and the mode is among the failed ones, if its process ends."""
        try:
            return mode.run(self.llm(mode), self.plain, prompt, n_predict, sampling)
        except Crash as e:
            self.failed[mode.name] = str(e)
            return None

    def gap(self, prompt: list[int], tokens: list[int], other: list[int]) -> float:
        """The difference between the two highest logits where two answers first differ."""
        at = next((i for i, (a, b) in enumerate(zip(tokens, other)) if a != b), min(len(tokens), len(other)))
        llm = self.plain
        llm.reset()
        llm.eval(prompt)
        for token in tokens[:at]:
            llm.eval([token])
        row = np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),))
        top = np.partition(row, -2)[-2:]
        return float(top[1] - top[0])

    def close(self) -> None:
        for llm in self._llms.values():
            llm.close()


def file_format(llm: Any) -> str:
    """The format of the weights as llama.cpp names it, such as BF16 or Q4_K_M."""
    import llama_cpp

    ftype = int(llm.metadata.get("general.file_type", -1))
    for name in dir(llama_cpp):
        if name.startswith("LLAMA_FTYPE_") and getattr(llama_cpp, name) == ftype:
            return name.removeprefix("LLAMA_FTYPE_").removeprefix("MOSTLY_").removeprefix("ALL_")
    return "?"
