"""The steps of run_on_card.py: each reports rows, and raises if what it found is wrong.

A text that is not the cycle is a fault of the code, never of rounding: see tests/kit/cycle_models.py.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cycle_models
import numpy as np
from card_tools import (
    ALL_LAYERS,
    CARD,
    GREEDY,
    PROMPT,
    REHEARSAL,
    SAMPLED,
    Context,
    NotThere,
    answer,
    check,
    counted,
    decodes,
    difference,
    logits,
    modes,
    upstream_drafter,
)

from eagle3_llama import EagleLlama
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.runtime import devices, library, machine
from eagle3_llama.runtime.params import EagleParams

# Of a random model's logits, in units of their standard deviation. Quantised products round activations to
# eight bits, each backend in its own way; a wrong mask or position shows as an error of about one.
ERRORS = {"F16": 1e-2, "Q8_0": 5e-2}


def run(name: str, folder: Path, rehearse: bool, tiny: bool, report: Callable[..., None]) -> None:
    with contextlib.ExitStack() as stack:
        if rehearse:
            import rpc_device

            stack.enter_context(rpc_device.registered())
        STEPS[name](Context(folder, REHEARSAL if rehearse or tiny else CARD, report))


def describe(c: Context) -> None:
    """The machine and its devices. Without one there is nothing to measure."""
    library.load()
    folder = library.find_lib_dir()
    found = [device for device in devices.devices(folder) if device.type != "CPU"] if folder else []
    c.report(what="processor", name=machine.model(), cores=machine.cores(), sets=sorted(machine.sets()))
    for device in found:
        c.report(what="device", **device._asdict())
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm", "--format=csv,noheader"]
    with contextlib.suppress(OSError):
        told = subprocess.run(query, capture_output=True, text=True)
        c.report(what="nvidia-smi", text=(told.stdout or told.stderr).strip())
    if not found:
        raise AssertionError("ggml finds no device beside the processor")


def rehearsal(c: Context) -> None:
    """Everything once, with a smaller model: what fails here fails in minutes to come."""
    shape = c.size.rehearsal
    text = cycle_models.cycle(cycle_models.SHAPES[shape]).text(PROMPT + c.size.few_tokens)
    target, head = c.target(shape, "Q4_0"), c.head(shape, 0.8)
    with c.load(target, head) as llm:
        wrong = list(texts_of(c, llm, text, ("plain", "chain 3", "tree 12x4x4", "planner"), format="Q4_0"))
    check(wrong)
    with upstream_drafter(c, target, head, True) as ask:
        c.report(mode="upstream", **ask(3, text[:PROMPT], text[PROMPT:]))


def texts(c: Context) -> None:
    """The cycle in every format and mode, with one slot and with four."""
    shape = cycle_models.SHAPES[c.size.texts]
    text = cycle_models.cycle(shape).text(PROMPT + c.size.few_tokens)
    wrong: list[str] = []
    for kind in c.size.formats:
        target, head = c.target(c.size.texts, kind), c.head(c.size.texts, 0.8)
        with c.load(target, head) as llm:
            wrong += texts_of(c, llm, text, tuple(modes(c.size)), format=kind)
        wrong += four_slots(c, target, head, kind)
    check(wrong)


def texts_of(c: Context, llm: EagleLlama, text: list[int], names: Sequence[str], **row: Any) -> Iterator[str]:
    """Reports each mode, and yields those whose text is another one."""
    for name in names:
        found = answer(llm, modes(c.size)[name], text[:PROMPT], c.size.few_tokens, GREEDY)
        at = difference(found.tokens, text[PROMPT:])
        row |= {"mode": name, "slots": 1, "same": at is None, "tokens_per_second": found.per_second()}
        c.report(**row, tokens_per_round=round(llm.stats.mean_accepted_length, 2))
        if at is not None:
            yield f"{row['format']} {name}, token {at}"


def four_slots(c: Context, target: str, head: str, kind: str) -> Iterator[str]:
    """Four requests at once, from other places of the cycle."""
    cycle, n = cycle_models.cycle(cycle_models.SHAPES[c.size.texts]), c.size.few_tokens
    given = {**c.settings(), "n_ctx": PROMPT + n + 64, "n_parallel": 4, "text": False}
    with Batcher(BatchSettings(target, head, **given)) as batcher:
        for name in ("plain", "chain 3", "tree 12x4x4", "planner"):
            expected = [cycle.text(PROMPT + n, 100 * i) for i in range(4)]
            with contextlib.ExitStack() as stack:
                asked = [batcher.request(params=modes(c.size)[name]) for _ in expected]
                for each in asked:
                    stack.callback(each.close)
                streams = [each.generate(text[:PROMPT], **GREEDY) for each, text in zip(asked, expected)]
                found = list(zip(*(itertools.islice(stream, n) for stream in streams)))
            at = [difference([row[i] for row in found], text[PROMPT:]) for i, text in enumerate(expected)]
            c.report(format=kind, mode=name, slots=4, same=at == [None] * 4)
            yield from (f"{kind} {name}, slot {i}, token {k}" for i, k in enumerate(at) if k is not None)


def random(c: Context) -> None:
    """A random model's logits beside the CPU's: attention, positions and masks, which no cycle tests."""
    tokens = [3 + 37 * i % 300 for i in range(160)]
    for kind, limit in ERRORS.items():
        path = c.folder / f"random-{kind}.gguf"
        cycle_models.random_target(path, cycle_models.SHAPES["tiny"], kind)
        on_device, on_processor = (logits(c, path, tokens, layers) for layers in (ALL_LAYERS, 0))
        error = float(np.sqrt(np.square(on_device - on_processor).mean()) / on_processor.std())
        c.report(format=kind, error=round(error, 6), limit=limit)
        if not error < limit:
            raise AssertionError(f"the logits of {kind} are {error:.4f} deviations from the processor's")


def ties(c: Context) -> None:
    """Drafts for a random model: a text may differ where two tokens are nearly equally likely, only there."""
    worst = 0.0
    for kind, limit in ERRORS.items():
        path = c.folder / f"random-{kind}.gguf"
        cycle_models.random_target(path, cycle_models.SHAPES["tiny"], kind)
        with c.load(str(path), c.head("tiny", 0.8)) as llm:
            for name in ("chain 1", "chain 3", "chain 7", "tree 12x4x4", "planner"):
                gaps = [gap for i in range(6) if (gap := first_gap(c, llm, name, 300 + 40 * i)) is not None]
                c.report(format=kind, mode=name, texts=6, differ=len(gaps), gaps=[round(g, 5) for g in gaps])
                worst = max([worst, *(gap / limit for gap in gaps)])
    if worst > 1:
        raise AssertionError(f"a text differs where no two tokens are near: {worst:.1f} times the limit")


def first_gap(c: Context, llm: EagleLlama, name: str, start: int) -> float | None:
    """Where a text with drafts first differs from plain decoding's: how far apart the two tokens' logits are.

    In units of the logits' standard deviation. None if the texts are equal.
    """
    prompt, n = [start + 7 * i for i in range(PROMPT)], c.size.few_tokens
    plain, drafted = (answer(llm, modes(c.size)[mode], prompt, n, GREEDY).tokens for mode in ("plain", name))
    at = difference(drafted, plain)
    if at is None:
        return None
    llm.reset()
    llm.eval([*prompt, *plain[:at]])
    row = np.array(llm._ctx.get_logits()[: llm.n_vocab()])
    return float(abs(row[plain[at]] - row[drafted[at]]) / row.std())


def widths(c: Context) -> None:
    """Which numbers of rows are summed alike, by the native program for it."""
    folder = library.find_lib_dir()
    program = folder / "widths_test" if folder else None
    if program is None or not program.is_file():
        raise NotThere("the libraries have no program widths_test: build_cuda.py compiles it")
    done = subprocess.run([str(program)], capture_output=True, text=True)
    for line in done.stderr.splitlines():  # a line for each product: CUDA0, q4_0: 1-4 5-8 9-64
        c.report(what="widths", text=line)
    if done.returncode != 0:
        raise AssertionError(f"{program.name} ended with {done.returncode}: {done.stderr[-300:]}")


def rows(c: Context) -> None:
    """Milliseconds of a decode of n rows, and of the parts of a round; its calls of NVIDIA's library."""
    target, head = c.target(c.size.large, "Q4_0"), c.head(c.size.large, 0.8)
    decodes(c, target, "Q4_0", c.size.rows)
    text = cycle_models.cycle(cycle_models.SHAPES[c.size.large]).text(PROMPT + c.size.few_tokens)
    with c.load(target, head) as llm:
        for name, params in modes(c.size).items():
            if name == "planner":
                continue
            answer(llm, params, text[:PROMPT], c.size.few_tokens, GREEDY)
            with counted() as counts:
                answer(llm, params, text[:PROMPT], c.size.few_tokens, GREEDY)
            parts, n = ("target", "draft", "verify", "other"), llm.stats.rounds
            each = {part: round(1e3 * getattr(llm.stats, part) / n, 3) for part in parts}
            calls = {what: round(number / n, 2) for what, number in counts.items()}
            c.report(what="a round", format="Q4_0", mode=name, milliseconds=each, calls=calls)


def speeds(c: Context) -> None:
    """Every mode at two acceptance rates. Modes alternate, so that all see the same state of the card."""
    wrong: list[str] = []
    for p in (0.8, 0.6):
        wrong += alternating(c, "Q4_0", p, modes(c.size), c.size.tokens)
    check(wrong)


def alternating(c: Context, kind: str, p: float, of: dict[str, EagleParams], n: int) -> Iterator[str]:
    text = cycle_models.cycle(cycle_models.SHAPES[c.size.large]).text(PROMPT + n)
    with c.load(c.target(c.size.large, kind), c.head(c.size.large, p)) as llm:
        found: dict[str, list[float]] = {name: [] for name in of}
        for _ in range(c.size.repeats):
            for name, params in of.items():
                one = answer(llm, params, text[:PROMPT], n, GREEDY)
                found[name].append(one.per_second())
                at = difference(one.tokens, text[PROMPT:])
                share = {part: round(value, 3) for part, value in llm.stats.time_share.items()}
                row = {"format": kind, "p": p, "mode": name, "same": at is None, "share": share}
                length = round(llm.stats.mean_accepted_length, 2)
                if len(found[name]) == c.size.repeats:
                    c.report(**row, tokens_per_second=found[name], tokens_per_round=length)
                if at is not None:
                    yield f"{kind} p={p} {name}, token {at}"


def upstream(c: Context) -> None:
    """The same files, at every length of its drafts. A rehearsal's runs on the processor."""
    text = cycle_models.cycle(cycle_models.SHAPES[c.size.large]).text(PROMPT + c.size.tokens)
    target = c.target(c.size.large, "Q4_0")
    for p, sampling in ((0.8, True), (0.8, False), (0.6, True)):
        with upstream_drafter(c, target, c.head(c.size.large, p), sampling) as ask:
            ask(3, text[:PROMPT], text[PROMPT : PROMPT + 24])  # the first one is slower
            for n in c.size.chains:
                c.report(format="Q4_0", p=p, **ask(n, text[:PROMPT], text[PROMPT:]))


def prompt(c: Context) -> None:
    """Seconds to the first token behind a long prompt, with a head and without."""
    target = c.target(c.size.large, "Q4_0")
    text = cycle_models.cycle(cycle_models.SHAPES[c.size.large]).text(c.size.prompt + 1)
    for head in (None, c.head(c.size.large, 0.8)):
        with c.load(target, head) as llm:
            params = EagleParams(n_max=3) if head else None
            found = [answer(llm, params, text[:-1], 1, GREEDY) for _ in range(4)][1:]
            seconds = [round(each.first, 4) for each in found]
            same = all(each.tokens == text[-1:] for each in found)
            c.report(format="Q4_0", head=head is not None, prompt=c.size.prompt, seconds=seconds, same=same)
            check([] if same else ["the token behind the prompt"])


def sampling(c: Context) -> None:
    """Samplers as llama-cpp-python makes them, top-k 40 first, beside greedy decoding."""
    n = c.size.few_tokens
    text = cycle_models.cycle(cycle_models.SHAPES[c.size.large]).text(PROMPT + n)
    of = {"plain": EagleParams(n_max=0), "chain 3": EagleParams(n_max=3)}
    wrong = []
    with c.load(c.target(c.size.large, "Q4_0"), c.head(c.size.large, 0.8)) as llm:
        for name, params in of.items():
            for how, settings in (("greedy", GREEDY), ("top-k 40", SAMPLED)):
                found = [answer(llm, params, text[:PROMPT], n, settings) for _ in range(3)][1:]
                same = all(difference(each.tokens, text[PROMPT:]) is None for each in found)
                speed = [each.per_second() for each in found]
                c.report(format="Q4_0", mode=name, sampling=how, tokens_per_second=speed, same=same)
                wrong += [] if same else [f"{name}, {how}"]
    check(wrong)


def format_of(kind: str) -> Callable[[Context], None]:
    """The large model in another format: rows, and the modes that matter."""

    def step(c: Context) -> None:
        sizes = [n for n in c.size.rows if n in (1, 2, 4, 5, 8, 9, 16)]
        decodes(c, c.target(c.size.large, kind), kind, sizes)
        wanted = ("plain", "chain 1", "chain 3", "chain 5", "planner")
        of = {name: params for name, params in modes(c.size).items() if name in wanted}
        check(list(alternating(c, kind, 0.8, of, c.size.few_tokens)))

    return step


STEPS: dict[str, Callable[[Context], None]] = {
    "machine": describe,
    "rehearsal": rehearsal,
    "texts": texts,
    "random": random,
    "ties": ties,
    "widths": widths,
    "rows": rows,
    "speeds": speeds,
    "upstream": upstream,
    "prompt": prompt,
    "sampling": sampling,
    "q4_k_m": format_of("Q4_K_M"),
    "f16": format_of("F16"),
}
