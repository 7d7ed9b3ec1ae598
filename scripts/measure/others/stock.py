"""Stock llama-cpp-python: its own loop and prompt lookup, on the unpatched libllama of the same version.

A process has one libllama, so it runs in a process of its own, which lives as long as the benchmark.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from eagle3_llama.bench.child import Child, Crash, unpatched
from eagle3_llama.bench.others import LENGTHS
from eagle3_llama.bench.turns import Run, rounds_from
from eagle3_llama.errors import EagleError, ErrorKind


def libraries() -> Path:
    """The folder of the unpatched libraries. The first call builds them if necessary: about 3 minutes."""
    return unpatched("--stock")


def environment(folder: Path) -> dict[str, str]:
    """The environment of a process whose llama_cpp opens the libraries in `folder`."""
    ours = ("EAGLE3_LLAMA_LIB", "MTMD_CPP")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "LLAMA_CPP_LIB_PATH": str(folder)}


class StockProcess:
    """A llama_cpp.Llama in another process.

    lookup: load it for prompt lookup. n_draft: its num_pred_tokens where run() is not given one.
    """

    def __init__(
        self, path: str, n_threads: int, n_ctx: int, flash_attn: bool | None = None, lookup: bool = False
    ) -> None:
        self.n_draft = LENGTHS[0] if lookup else None
        self._lookup, self._seed, folder = lookup, 1, libraries()
        sizes = {"path": path, "n_threads": n_threads, "n_ctx": n_ctx, "flash_attn": flash_attn}
        script = Path(__file__).with_name("stock_child.py")
        settings = json.dumps({**sizes, "lookup": lookup})
        self._child = Child([sys.executable, script, settings], environment(folder))
        library = Path(self._answer(self._child.read())["library"])
        if library.parent.resolve() != folder.resolve():
            self.close()
            raise EagleError(
                ErrorKind.LIBRARY, f"stock llama-cpp-python opened {library} instead of the one in {folder}"
            )

    @property
    def pid(self) -> int:
        return self._child.pid

    def _answer(self, line: str) -> dict[str, Any]:
        if not line:
            raise Crash(f"ended: {self._child.last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            self.close()
            raise Crash(f"failed: {answer['error']}")
        return answer

    def run(
        self,
        prompt: list[int],
        n_predict: int,
        sampling: dict[str, Any],
        n_draft: int | None = None,
        again: bool = False,
    ) -> Run:
        """One answer. again: the prompt is that of the run before, and need not be decoded again.

        Raises Crash if the process has ended or Llama raised.
        """
        request = {"prompt": prompt, "n_predict": n_predict, "sampling": sampling, "seed": self._seed}
        lengths = {"num_pred_tokens": n_draft or self.n_draft, "again": again}
        answer = self._answer(self._child.ask(json.dumps({**request, **lengths})))
        tokens = answer["tokens"]
        return Run(tokens, answer["seconds"], rounds_from(answer["starts"], len(tokens)), {})

    def settle(self, prompts: list[list[int]], n_predict: int = 32) -> None:
        """Tries the values of num_pred_tokens on every second prompt, and keeps the fastest."""
        tokens, seconds = dict.fromkeys(LENGTHS, 0), dict.fromkeys(LENGTHS, 0.0)
        for prompt in prompts[::2]:
            for i, n in enumerate(LENGTHS):
                run = self.run(prompt, n_predict, {"temp": 0.0}, n, again=i > 0)
                tokens[n] += len(run.tokens)
                seconds[n] += run.seconds
        self.n_draft = max(LENGTHS, key=lambda n: tokens[n] / seconds[n] if seconds[n] else 0.0)

    def set_seed(self, seed: int) -> None:
        self._seed = seed

    def close(self) -> None:
        self._child.close()
