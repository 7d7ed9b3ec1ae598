"""What the steps of run_on_card.py share: their models, an answer that is timed, and decodes of n rows."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cycle_models
import numpy as np

from eagle3_llama import EagleLlama
from eagle3_llama.bench.child import Child
from eagle3_llama.llama.flash import FlashLlama
from eagle3_llama.runtime import machine
from eagle3_llama.runtime.params import EagleParams

ALL_LAYERS = 99
PROMPT = 16  # tokens
SEEN = 64  # tokens before the decodes of n rows
UPSTREAM_MOST = 8  # draft tokens
TREES = ("12x4x4", "60x6x10")
SAMPLED = {"temp": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
GREEDY = {"temp": 0.0}
Ask = Callable[..., dict[str, Any]]


class NotThere(Exception):
    """What a step needs is not on this machine: no fault."""


class Size(NamedTuple):
    """rehearsal, texts, large: of cycle_models.SHAPES. prompt: tokens. repeats: turns of each mode."""

    rehearsal: str
    texts: str
    large: str
    tokens: int
    few_tokens: int
    prompt: int
    chains: tuple[int, ...]
    rows: tuple[int, ...]
    formats: tuple[str, ...] = ("F16", "Q8_0", "Q4_0", "Q4_K")
    repeats: int = 2


_ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64)
CARD = Size("1B", "small", "8B", 256, 96, 2048, tuple(range(1, 8)), _ROWS)
REHEARSAL = Size("tiny", "tiny", "tiny", 32, 24, 96, (1, 3, 7), (1, 2, 5, 16))


class Context(NamedTuple):
    folder: Path
    size: Size
    report: Callable[..., None]

    def target(self, shape: str, kind: str) -> str:
        """The path of the model, made if it is not there yet."""
        of = cycle_models.SHAPES[shape]
        return self._made(f"{shape}-{kind}.gguf", lambda part: cycle_models.target(part, of, kind))

    def head(self, shape: str, p: float) -> str:
        of = cycle_models.SHAPES[shape]
        return self._made(f"{shape}-head-{p}.gguf", lambda part: cycle_models.head(part, of, p))

    def _made(self, name: str, make: Callable[[Path], object]) -> str:
        path, part = self.folder / name, self.folder / f"{name}.part"
        if not path.is_file():
            begin = time.perf_counter()
            make(part)
            part.rename(path)
            gigabytes, seconds = path.stat().st_size / 1e9, time.perf_counter() - begin
            self.report(what="a model", name=name, gigabytes=round(gigabytes, 3), seconds=round(seconds, 1))
        return str(path)

    def settings(self) -> dict[str, Any]:
        n_ctx = self.size.prompt + self.size.tokens + 256
        threads = min(machine.cores(), 8)
        return {"n_ctx": n_ctx, "n_gpu_layers": ALL_LAYERS, "n_threads": threads, "flash_attn": True}

    def load(self, target: str, head: str | None) -> EagleLlama:
        return EagleLlama(target, eagle=head, text=False, verbose=False, **self.settings())


class Answer(NamedTuple):
    tokens: list[int]
    seconds: float  # from the first token to the last
    first: float  # seconds to the first token

    def per_second(self) -> float:
        return round((len(self.tokens) - 1) / self.seconds, 1)


def modes(size: Size) -> dict[str, EagleParams]:
    chains = {f"chain {n}": EagleParams(n_max=n) for n in size.chains}
    trees = {f"tree {text}": EagleParams(tree=text) for text in TREES}
    return {"plain": EagleParams(n_max=0), **chains, **trees, "planner": EagleParams(text=False)}


def answer(llm: Any, params: EagleParams | None, prompt: Sequence[int], n: int, sampling: Any) -> Answer:
    """One answer from nothing: neither the prompt nor a text of before is known."""
    llm.reset()
    if params is not None:
        llm.eagle_params = params
        llm.stats.reset()
    llm.set_seed(1)
    begin = time.perf_counter()
    generator = llm.generate(list(prompt), **sampling)
    tokens = [next(generator)]
    first = time.perf_counter()
    tokens += itertools.islice(generator, n - 1)
    end = time.perf_counter()
    generator.close()
    return Answer(tokens, end - first, first - begin)


def difference(found: Sequence[int], expected: Sequence[int]) -> int | None:
    """The first token that differs, None if none does."""
    pairs = enumerate(itertools.zip_longest(found, expected))
    return next((i for i, pair in pairs if len(set(pair)) > 1), None)


def check(wrong: Sequence[str]) -> None:
    if wrong:
        raise AssertionError(f"the text is not the cycle: {'; '.join(wrong)}")


def logits(c: Context, path: Path, tokens: list[int], layers: int) -> Any:
    """(tokens, vocabulary): of a prompt, then of decodes of several widths."""
    given = {**c.settings(), "n_gpu_layers": layers, "logits_all": True, "text": False}
    with EagleLlama(str(path), verbose=False, **given) as llm:
        for at, end in itertools.pairwise((0, 128, 129, 132, 140, len(tokens))):
            llm.eval(tokens[at:end])
        return np.array(llm.scores[: len(tokens)])


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """The calls of NVIDIA's library in this block, prompts' too, if cuda_calls.c is loaded; else {}."""
    found: dict[str, int] = {}
    here = ctypes.CDLL(None)
    if not hasattr(here, "cuda_calls_read"):
        yield found
        return
    here.cuda_calls_names.restype = ctypes.c_char_p
    names = here.cuda_calls_names().decode().split()
    fields = [*names, *(f"{name}_us" for name in names), *(f"{name}_bytes" for name in names[:3])]
    out = (ctypes.c_uint64 * len(fields))()
    here.cuda_calls_reset()
    yield found
    here.cuda_calls_read(out)
    found |= dict(zip(fields, out))


def decodes(c: Context, target: str, kind: str, sizes: Sequence[int]) -> None:
    """The median of five. Three before them are not counted: CUDA records a graph in the second."""
    import llama_cpp

    llm = FlashLlama(target, verbose=False, logits_all=False, **c.settings())
    try:
        llm.eval([300 + i for i in range(SEEN)])
        for n in sizes:
            batch = llama_cpp.llama_batch_init(n, 0, 1)
            batch.n_tokens = n
            for i in range(n):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = 400 + i, SEEN + i, 1
                batch.seq_id[i][0], batch.logits[i] = 0, True
            times = [decode(llama_cpp, llm.ctx, batch) for _ in range(8)][3:]
            llama_cpp.llama_batch_free(batch)
            c.report(what="rows", format=kind, rows=n, milliseconds=round(1e3 * statistics.median(times), 3))
    finally:
        llm.close()


def decode(llama_cpp: Any, ctx: Any, batch: Any) -> float:
    begin = time.perf_counter()
    if llama_cpp.llama_decode(ctx, batch) != 0:
        raise AssertionError(f"a decode of {batch.n_tokens} rows failed")
    llama_cpp.llama_synchronize(ctx)
    seconds = time.perf_counter() - begin
    llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(ctx), 0, SEEN, -1)
    return seconds


@contextlib.contextmanager
def upstream_drafter(c: Context, target: str, head: str, sampling: bool) -> Iterator[Ask]:
    """llama.cpp's own draft-eagle3 (native/bench/upstream.cpp): ask(n_max, prompt, expected) is a row."""
    given = c.settings()
    settings = [given["n_threads"], given["n_ctx"], UPSTREAM_MOST, 1, int(sampling)]
    child = Child([os.environ["EAGLE3_UPSTREAM"], target, head, "draft-eagle3", *settings])
    if child.read() != "ready":
        raise AssertionError(f"upstream's drafter cannot start: {child.last_words()}")

    def ask(n_max: int, prompt: Sequence[int], expected: Sequence[int]) -> dict[str, Any]:
        words = child.ask(" ".join(map(str, [n_max, 0, 0, len(expected), *prompt]))).split()
        if not words:
            raise AssertionError(f"upstream's drafter has ended: {child.last_words()}")
        n_rounds = int(words[1])
        tokens = list(map(int, words[2 + n_rounds :]))
        speed = round((len(tokens) - 1) / float(words[0]), 1)
        return {"n_max": n_max, "backend_sampling": sampling, "tokens_per_second": speed,
                "tokens_per_round": round((len(tokens) - 1) / max(n_rounds, 1), 2),
                "same": difference(tokens, expected) is None}  # fmt: skip

    try:
        yield ask
    finally:
        child.close()
