"""The pinned llama.cpp's own drafters, as a program that a benchmark talks to (native/bench/upstream.cpp)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from .errors import EagleError, ErrorKind

N_MAX = 8  # longest chain tried
_TYPES = {"upstream": "draft-eagle3", "draft_model": "draft-simple"}


class Drafter:
    """One target with one head or draft model. n_max is what run() drafts; settle() finds the best."""

    def __init__(self, target: str, head: str, kind: str, n_threads: int, n_ctx: int, flash_attn: bool) -> None:
        self.n_max, self._rounds = 3, 0  # upstream's default
        args = [_program(), target, head, _TYPES[kind], n_threads, n_ctx, N_MAX, int(flash_attn)]
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # a pipe that nobody reads fills up
        self._process = subprocess.Popen([str(a) for a in args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True)
        if self._process.stdout.readline().strip() != "ready":
            self.close()
            lines = self._said()
            raise EagleError(ErrorKind.NATIVE, f"llama.cpp's own drafter does not take {head}: {lines[-1] if lines else 'it said nothing'}")

    def run(self, prompt: list[int], n_predict: int) -> tuple[list[int], float, list[tuple[int, int, int]]]:
        """Tokens (the end of generation not among them), seconds, and rounds as bench_modes.Run has them. Greedy."""
        self._process.stdin.write(" ".join(map(str, [self.n_max, n_predict, *prompt])) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline().split()
        if not line:
            raise EagleError(ErrorKind.NATIVE, f"llama.cpp's own drafter has ended: {(self._said() or ['it said nothing'])[-1]}")
        seconds, n_rounds = float(line[0]), int(line[1])
        lengths = [tuple(map(int, r.split("/"))) for r in line[2 : 2 + n_rounds]]
        tokens = list(map(int, line[2 + n_rounds :]))
        rounds, at = [], 1
        for sampled, drafted in lengths:
            rounds.append((at, min(sampled, len(tokens) - at), drafted))
            at += sampled
        return tokens, seconds, [r for r in rounds if r[1] > 0]

    def settle(self, prompts: list[list[int]], n_predict: int = 48) -> int:
        """Tries every length on the prompts, alternating, and keeps the fastest."""
        rate = {}
        for n in range(1, N_MAX + 1):
            self.n_max = n
            runs = [self.run(p, n_predict) for p in prompts]
            rate[n] = sum(len(r[0]) for r in runs) / sum(r[1] for r in runs)
        self.n_max = max(rate, key=lambda n: rate[n])
        return self.n_max

    def set_seed(self, seed: int) -> None:
        """Greedy: nothing to seed."""

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def _said(self) -> list[str]:
        self._log.seek(0)
        return self._log.read().strip().splitlines()


def _program() -> Path:
    """Builds the program from the checkout's own sources, if need be."""
    build = Path(__file__).resolve().parent.parent / "native" / "build.py"
    if not build.is_file():
        raise EagleError(ErrorKind.UNSUPPORTED, "llama.cpp's own drafter is built from a checkout of this project, not from the wheel")
    done = subprocess.run([sys.executable, build, "--bench", "--print-dir"], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise EagleError(ErrorKind.NATIVE, "llama.cpp's own drafter could not be built")
    return Path(done.stdout.strip()) / "upstream"
