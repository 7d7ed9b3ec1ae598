"""llama.cpp's own drafters, of the pinned version: a program for benchmarks (native/bench/upstream.cpp)."""

from __future__ import annotations

from pathlib import Path

from ..errors import EagleError, ErrorKind
from .child import Child, unpatched

N_MAX = 8  # the longest chain to try


class Drafter:
    """A target with a head or draft model. run() uses n_max and backend_sampling; settle() finds the best."""

    def __init__(
        self, target: str, head: str, speculation: str, n_threads: int, n_ctx: int, flash_attn: bool | None
    ) -> None:
        self.n_max, self.backend_sampling = 3, True  # upstream's defaults
        flash = -1 if flash_attn is None else int(flash_attn)
        self._args = [target, head, speculation, n_threads, n_ctx, N_MAX, flash]
        self._programs: dict[bool, _Program] = {}
        self._program()

    def _program(self) -> _Program:
        if self.backend_sampling not in self._programs:
            self._programs[self.backend_sampling] = _Program([*self._args, int(self.backend_sampling)])
        return self._programs[self.backend_sampling]

    def run(self, prompt: list[int], n_predict: int) -> tuple[list[int], float, list[tuple[int, int, int]]]:
        """Greedy decoding: tokens without the end of generation, seconds, and rounds as in modes.Run."""
        line = self._program().ask([self.n_max, n_predict, *prompt])
        seconds, n_rounds = float(line[0]), int(line[1])
        lengths = [tuple(map(int, r.split("/"))) for r in line[2 : 2 + n_rounds]]
        tokens = list(map(int, line[2 + n_rounds :]))
        rounds, at = [], 1
        for sampled, drafted in lengths:
            rounds.append((at, min(sampled, len(tokens) - at), drafted))
            at += sampled
        return tokens, seconds, [r for r in rounds if r[1] > 0]

    def settle(self, prompts: list[list[int]], n_predict: int = 48) -> None:
        """Tries every draft length, with and without backend sampling, on the prompts. Keeps the fastest."""
        rate = {}
        for self.n_max in range(1, N_MAX + 1):
            for self.backend_sampling in (True, False):
                runs = [self.run(p, n_predict) for p in prompts]
                tokens, seconds = sum(len(r[0]) for r in runs), sum(r[1] for r in runs)
                rate[self.n_max, self.backend_sampling] = tokens / seconds
        self.n_max, self.backend_sampling = max(rate, key=lambda k: rate[k])
        self._programs.pop(not self.backend_sampling).close()

    def set_seed(self, seed: int) -> None:
        """Does nothing, because decoding is greedy."""

    def close(self) -> None:
        for program in self._programs.values():
            program.close()


class _Program:
    """The running program native/bench/upstream.cpp: a line of numbers in, a line of words out."""

    def __init__(self, args: list[object]) -> None:
        self._child = Child([build(), *args])
        if self._child.read() != "ready":
            words = self._child.last_words()
            raise EagleError(ErrorKind.NATIVE, f"llama.cpp's own drafter cannot use {args[1]}: {words}")

    def ask(self, numbers: list[int]) -> list[str]:
        line = self._child.ask(" ".join(map(str, numbers))).split()
        if not line:
            words = self._child.last_words()
            raise EagleError(ErrorKind.NATIVE, f"llama.cpp's own drafter has ended: {words}")
        return line

    def close(self) -> None:
        self._child.close()


def build() -> Path:
    """The path of the program. It is built from the checkout's sources if necessary."""
    return unpatched("--bench") / "upstream"
