"""llama.cpp's own drafters, of the pinned version: a program for benchmarks (native/bench/upstream.cpp)."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path

from eagle3_llama.bench.child import Child, unpatched
from eagle3_llama.errors import EagleError, ErrorKind

N_MAX = 8  # the longest chain of a head or a small model to try
N_GRAMS = (2, 3, 5, 8)  # tokens of a match of the ngram types to try
N_TEXTS = (2, 4, 8, 24)  # tokens of their drafts
DEFAULTS = {"ngram-mod": (24, 64)}  # of upstream's, tried too; of the other ngram types:
DEFAULT = (12, 48)
CACHE_TEXTS = (1, 2, 4, 8)  # ngram-cache: its own limit is 8, and it takes no length of a match
FROM_FILE = ("draft-eagle3", "draft-dflash", "draft-dspark")  # drafters that --eagle names
NGRAMS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
SPECS = (*FROM_FILE, "draft-mtp", *NGRAMS)  # draft-mtp drafts with layers of the target's own file


@dataclasses.dataclass(frozen=True)
class Setting:
    """n_max: draft tokens of a head or small model. n_gram, n_text: of the ngram types, match and draft.

    n_text alone: ngram-cache has no length of a match to set.
    """

    n_max: int = 0
    n_gram: int = 0
    n_text: int = 0
    backend_sampling: bool = True

    def used(self) -> dict[str, int]:
        return {k: v for k in ("n_max", "n_gram", "n_text") if (v := getattr(self, k))}


class Drafter:
    """A target with drafters of upstream's. run() uses `setting`; settle() finds the best.

    speculation: names of --spec-type, with commas between them. head: None for types that need none.
    """

    def __init__(
        self,
        target: str,
        head: str | None,
        speculation: str,
        n_threads: int,
        n_ctx: int,
        flash_attn: bool | None,
    ) -> None:
        kinds = speculation.split(",")
        self._heads = [k for k in kinds if k.startswith("draft-")]
        self._ngrams = [k for k in kinds if k.startswith("ngram-") and k != "ngram-cache"]
        self._cache = "ngram-cache" in kinds
        self.setting = self._first()
        flash = -1 if flash_attn is None else int(flash_attn)
        self._args = [target, head or "-", speculation, n_threads, n_ctx, N_MAX, flash]
        self._programs: dict[bool, _Program] = {}
        self._program()

    def _first(self) -> Setting:
        """Upstream's defaults."""
        n_gram, n_text = DEFAULTS.get(self._ngrams[0], DEFAULT) if self._ngrams else (0, 0)
        if self._cache and not self._ngrams:
            n_text = CACHE_TEXTS[-1]
        return Setting(3 if self._heads else 0, n_gram, n_text)

    def _program(self) -> _Program:
        sampling = self.setting.backend_sampling
        if sampling not in self._programs:
            self._programs[sampling] = _Program([*self._args, int(sampling)])
        return self._programs[sampling]

    def run(self, prompt: list[int], n_predict: int) -> tuple[list[int], float, list[tuple[int, int, int]]]:
        """Greedy decoding: tokens without the end of generation, seconds, and rounds as in modes.Run."""
        s = self.setting
        line = self._program().ask([s.n_max, s.n_gram, s.n_text, n_predict, *prompt])
        seconds, n_rounds = float(line[0]), int(line[1])
        lengths = [tuple(map(int, r.split("/"))) for r in line[2 : 2 + n_rounds]]
        tokens = list(map(int, line[2 + n_rounds :]))
        rounds, at = [], 1
        for sampled, drafted in lengths:
            rounds.append((at, min(sampled, len(tokens) - at), drafted))
            at += sampled
        return tokens, seconds, [r for r in rounds if r[1] > 0]

    def settle(self, prompts: list[list[int]], n_predict: int = 48) -> None:
        """Tries settings on the prompts and keeps the fastest: first the head's, then the n-grams'."""
        if self._heads:
            tried = [
                dataclasses.replace(self.setting, n_max=n, backend_sampling=sampling)
                for n in range(1, N_MAX + 1)
                for sampling in (True, False)
            ]
            self._best(tried, prompts, n_predict)
        if self._ngrams:
            sizes = [(g, t) for g in N_GRAMS for t in N_TEXTS]
            sizes.append((self.setting.n_gram, self.setting.n_text))
            tried = [dataclasses.replace(self.setting, n_gram=g, n_text=t) for g, t in sizes]
            self._best(tried, prompts, n_predict)
        elif self._cache:
            tried = [dataclasses.replace(self.setting, n_text=t) for t in CACHE_TEXTS]
            self._best(tried, prompts, n_predict)
        for sampling in [s for s in self._programs if s != self.setting.backend_sampling]:
            self._programs.pop(sampling).close()

    def _best(self, settings: list[Setting], prompts: list[list[int]], n_predict: int) -> None:
        """Keeps the fastest setting. Only the best third on the first prompt is tried on the others."""
        tokens, seconds = collections.Counter[Setting](), collections.Counter[Setting]()
        rate = lambda s: tokens[s] / seconds[s] if seconds[s] else 0.0
        left = list(settings)
        for i, prompt in enumerate(prompts):
            for self.setting in left:
                run = self.run(prompt, n_predict)
                tokens[self.setting] += len(run[0])
                seconds[self.setting] += run[1]  # type: ignore[assignment]  # a Counter of floats
            if i == 0:
                left = sorted(left, key=rate, reverse=True)[: max(len(left) // 3, 2)]
        self.setting = max(left, key=rate)

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
            raise EagleError(ErrorKind.NATIVE, f"llama.cpp's own drafter ({args[2]}) cannot start: {words}")

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
