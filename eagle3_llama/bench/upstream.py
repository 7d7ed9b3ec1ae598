"""llama.cpp's own drafters, of the pinned version: a program for benchmarks (native/bench/upstream.cpp)."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

from ..errors import EagleError, ErrorKind

N_MAX = 8  # the longest chain to try
_TYPES = {"upstream": "draft-eagle3", "draft_model": "draft-simple"}


class Drafter:
    """A target with a head or draft model. run() uses n_max and backend_sampling; settle() finds the best."""

    def __init__(
        self, target: str, head: str, kind: str, n_threads: int, n_ctx: int, flash_attn: bool | None
    ) -> None:
        self.n_max, self.backend_sampling = 3, True  # upstream's defaults
        flash = -1 if flash_attn is None else int(flash_attn)
        self._args = [target, head, _TYPES[kind], n_threads, n_ctx, N_MAX, flash]
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
        # the log goes to a file, because a pipe that nobody reads would fill up
        self._log = tempfile.TemporaryFile("w+", errors="replace")
        command, pipe = [str(a) for a in (_build(), *args)], subprocess.PIPE
        self._process = subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=self._log)
        assert self._process.stdin is not None and self._process.stdout is not None  # they are pipes
        self._in, self._out = self._process.stdin, self._process.stdout
        if self._out.readline().strip() != "ready":
            raise EagleError(
                ErrorKind.NATIVE, f"llama.cpp's own drafter cannot use {args[1]}: {self._last_words()}"
            )

    def ask(self, numbers: list[int]) -> list[str]:
        try:
            self._in.write(" ".join(map(str, numbers)) + "\n")
            self._in.flush()
        except OSError:  # the program has ended; its log tells why
            pass
        line = self._out.readline().split()
        if not line:
            raise EagleError(ErrorKind.NATIVE, f"llama.cpp's own drafter has ended: {self._last_words()}")
        return line

    def _last_words(self) -> str:
        self.close()
        self._log.seek(0)
        return (self._log.read().strip().splitlines() or ["it printed nothing"])[-1]

    def close(self) -> None:
        try:
            self._in.close()
        except OSError:
            pass
        self._process.wait()


@functools.cache
def _build() -> Path:
    """The path of the program. It is built from the checkout's sources if necessary."""
    build = Path(__file__).resolve().parents[2] / "native" / "build.py"
    if not build.is_file():
        raise EagleError(
            ErrorKind.UNSUPPORTED,
            "the installed package does not contain llama.cpp's own drafters: use a checkout of the project",
        )
    done = subprocess.run(
        [sys.executable, build, "--bench", "--print-dir"], stdout=subprocess.PIPE, text=True
    )
    if done.returncode != 0:
        raise EagleError(ErrorKind.NATIVE, "llama.cpp's own drafter could not be built")
    return Path(done.stdout.strip()) / "upstream"
