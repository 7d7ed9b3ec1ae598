"""The pinned llama.cpp's own drafters, as a program that a benchmark talks to (native/bench/upstream.cpp)."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

from ..errors import EagleError, ErrorKind

N_MAX = 8  # longest chain tried
_TYPES = {"upstream": "draft-eagle3", "draft_model": "draft-simple"}


class Drafter:
    """One target with one head or draft model. n_max and backend_sampling are what run() drafts with; settle() finds the best."""

    def __init__(
        self, target: str, head: str, kind: str, n_threads: int, n_ctx: int, flash_attn: bool | None
    ) -> None:
        self.n_max, self.backend_sampling = 3, True  # upstream's defaults
        self._args = [
            target,
            head,
            _TYPES[kind],
            n_threads,
            n_ctx,
            N_MAX,
            -1 if flash_attn is None else int(flash_attn),
        ]
        self._programs: dict[bool, _Program] = {}
        self._program()

    def _program(self) -> _Program:
        if self.backend_sampling not in self._programs:
            self._programs[self.backend_sampling] = _Program([*self._args, int(self.backend_sampling)])
        return self._programs[self.backend_sampling]

    def run(self, prompt: list[int], n_predict: int) -> tuple[list[int], float, list[tuple[int, int, int]]]:
        """Tokens (the end of generation not among them), seconds, and rounds as bench_modes.Run has them. Greedy."""
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
        """Tries every length on the prompts, with and without backend sampling, and keeps the fastest."""
        rate = {}
        for self.n_max in range(1, N_MAX + 1):
            for self.backend_sampling in (True, False):
                runs = [self.run(p, n_predict) for p in prompts]
                rate[self.n_max, self.backend_sampling] = sum(len(r[0]) for r in runs) / sum(
                    r[1] for r in runs
                )
        self.n_max, self.backend_sampling = max(rate, key=lambda k: rate[k])
        self._programs.pop(not self.backend_sampling).close()

    def set_seed(self, seed: int) -> None:
        """Greedy: nothing to seed."""

    def close(self) -> None:
        for program in self._programs.values():
            program.close()


class _Program:
    """native/bench/upstream.cpp, running: a line of numbers in, a line of words out."""

    def __init__(self, args: list[object]) -> None:
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # a pipe that nobody reads fills up
        self._process = subprocess.Popen(
            [str(a) for a in (_build(), *args)],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        if self._process.stdout.readline().strip() != "ready":
            raise EagleError(
                ErrorKind.NATIVE, f"llama.cpp's own drafter does not take {args[1]}: {self._last_words()}"
            )

    def ask(self, numbers: list[int]) -> list[str]:
        try:
            self._process.stdin.write(" ".join(map(str, numbers)) + "\n")
            self._process.stdin.flush()
        except OSError:  # it is gone; its log says why
            pass
        line = self._process.stdout.readline().split()
        if not line:
            raise EagleError(ErrorKind.NATIVE, f"llama.cpp's own drafter has ended: {self._last_words()}")
        return line

    def _last_words(self) -> str:
        self.close()
        self._log.seek(0)
        return (self._log.read().strip().splitlines() or ["it said nothing"])[-1]

    def close(self) -> None:
        try:
            self._process.stdin.close()
        except OSError:
            pass
        self._process.wait()


@functools.cache
def _build() -> Path:
    """The program, built from the checkout's own sources if need be."""
    build = Path(__file__).resolve().parents[2] / "native" / "build.py"
    if not build.is_file():
        raise EagleError(
            ErrorKind.UNSUPPORTED,
            "llama.cpp's own drafter is built from a checkout of this project, not from the wheel",
        )
    done = subprocess.run(
        [sys.executable, build, "--bench", "--print-dir"], stdout=subprocess.PIPE, text=True
    )
    if done.returncode != 0:
        raise EagleError(ErrorKind.NATIVE, "llama.cpp's own drafter could not be built")
    return Path(done.stdout.strip()) / "upstream"
