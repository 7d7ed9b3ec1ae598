"""Modes that take turns with plain decoding within an answer, loaded again and again."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import hybrid_models
from tables import number, table

from eagle3_llama.bench.mode import Loading, Mode
from eagle3_llama.bench.modes import Eagle, Plain
from eagle3_llama.bench.turns import take_turns

from .modes import modes_of
from .prompts import raw_texts

Row = dict[str, Any]
NO_DRAFTS = "none"
SEARCHED = 1  # prompts that the settings of others are tried on: each takes a minute a drafter
COLUMNS = "kind|mode|median speed|by time|of each load|slowest|forecast / speed|tokens a round|draft tokens"
COLUMNS += "|foreseen|cache, MB|other texts"


@dataclasses.dataclass(frozen=True)
class Sizes(Loading):
    """more: further arguments of Llama and EagleLlama."""

    more: dict[str, Any] = dataclasses.field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), **self.more}


class Variant(NamedTuple):
    """How all modes are loaded, and what only those of ours get."""

    both: dict[str, Any]
    ours: dict[str, Any]


class Prompts(NamedTuple):
    """(kind, tokens) of each prompt, those that settings are searched on, and how answers are sampled."""

    asked: list[tuple[str, list[int]]]
    searched: list[list[int]]
    sampling: dict[str, Any]


def run(given: argparse.Namespace, target: Any) -> list[Row]:
    """The figures of each answer. Prints their table."""
    named = given.modes or ("none,eagle,head,text" if target.head else "none,text")
    modes = modes_of(named.split(","), target.head)
    prompts = made_prompts(given, target) if target.made else read_prompts(given, target)
    greedy_only = [mode.name for mode in modes if mode.greedy_only]
    if greedy_only and prompts.sampling["temp"] != 0:
        raise ValueError(
            f"the text of {target.made} is sampled, these modes are greedy: {', '.join(greedy_only)}"
        )
    for mode in modes:
        mode.prepare()
    rows: list[Row] = []
    found: dict[str, Any] = {}
    for load in range(given.loads):
        for i, variant in enumerate(variants(given)):
            here = modes if i == 0 else [mode for mode in modes if isinstance(mode, Eagle)]
            for row in one_load(given, target, variant, here, prompts, found):
                if target.made:
                    row["foreseen"] = foreseen_share(target, row)
                rows.append({"load": load, **row})
                say("{load} {kind} {mode}: {speed:.3f}".format(**rows[-1]))
    print("\n".join(lines(rows)), flush=True)
    return rows


def made_prompts(given: argparse.Namespace, target: Any) -> Prompts:
    model = hybrid_models.MODELS[target.made]
    of, n = hybrid_models.cycles(model.shape), given.prompts * given.rounds
    prompts = [of.prompt(model.n_live, turn) for turn in range(n + SEARCHED)]
    sampling = {"temp": 0.0}
    if model.experts:
        sampling = hybrid_models.sampling(model, given.chance, given.topic)
    return Prompts([("", prompt) for prompt in prompts[:n]], prompts[n:], sampling)


def read_prompts(given: argparse.Namespace, target: Any) -> Prompts:
    """Texts that are completed, without a chat template, of each kind."""
    from eagle3_llama.llama.flash import FlashLlama

    asked: list[tuple[str, list[int]]] = []
    with contextlib.closing(FlashLlama(target.path, n_ctx=64, verbose=False)) as llm:
        for kind, texts in raw_texts(given):
            asked += [(kind, llm.tokenize(text.encode())) for text in texts * given.rounds]
    return Prompts(asked, [asked[-1][1]], {"temp": 0.0})


def foreseen_share(target: Any, row: Row) -> float:
    """The share of an answer that f gives from the token before."""
    of = hybrid_models.cycles(hybrid_models.MODELS[target.made].shape)
    return of.foreseen(row.pop("text"))


def variants(given: argparse.Namespace) -> list[Variant]:
    windows = [{"swa_full": w == "whole"} for w in listed(given.windows, ("whole", "pruned"))] or [{}]
    numbers = listed(given.n_rs_seq) or ["default"]
    sizes = [{} if n == "default" else {"n_rs_seq": int(n)} for n in numbers]
    return [Variant(both, {**both, **own}) for both, own in itertools.product(windows, sizes)]


def listed(names: str | None, known: tuple[str, ...] = ()) -> list[str]:
    found = names.split(",") if names else []
    if known and set(found) - set(known):
        raise ValueError(f"{names}: choose from {', '.join(known)}")
    return found


def one_load(
    given: argparse.Namespace,
    target: Any,
    variant: Variant,
    modes: list[Mode],
    prompts: Prompts,
    found: dict[str, Any],
) -> Iterator[Row]:
    """Loads plain decoding and the modes, and has each answer each prompt. found: settings of others."""
    longest = max(len(ids) for _, ids in prompts.asked)
    sizes = given.t, max(longest + given.n + 64, 0 if target.made else given.n_ctx)
    flash = None if target.made else True
    loading = {own: Sizes(target.path, *sizes, flash, variant[own]) for own in (False, True)}
    with contextlib.ExitStack() as stack:
        opened = lambda mode: stack.enter_context(
            contextlib.closing(mode.load(loading[isinstance(mode, Eagle)]))
        )
        plain = opened(Plain("plain"))
        llms: dict[Any, Any] = {}
        for mode in modes:
            llms[mode.key] = plain if isinstance(mode, Plain) else llms.get(mode.key) or opened(mode)
            if mode.name in found:
                mode.use(llms[mode.key], found[mode.name])
            elif not isinstance(mode, Eagle):
                mode.settle(llms[mode.key], prompts.searched)
                found[mode.name] = mode.found(llms[mode.key])
        for i, (kind, ids) in enumerate(prompts.asked):
            for mode in modes:
                row = answer(mode, llms[mode.key], plain, ids, given.n, prompts.sampling, i)
                yield {"kind": kind, "prompt": i, **row, **where(given, variant, mode, llms[mode.key])}


def where(given: argparse.Namespace, variant: Variant, mode: Mode, llm: Any) -> Row:
    """The mode's name with its variant or the setting that was found for it, and the memory of its cache."""
    used = [f"{k}={v}" for k, v in mode.used(llm).items()]
    if not isinstance(mode, Eagle):
        return {"mode": " ".join([mode.name, *used]), "variant": ""}
    told = []
    if given.n_rs_seq:
        default = "" if "n_rs_seq" in variant.ours else " (default)"
        told.append(f"n_rs_seq={llm.context_params.n_rs_seq}{default}")
    if given.windows:
        told.append("whole windows" if llm.context_params.swa_full else "pruned windows")
    cache = round(llm.memory().target_cache / 1e6, 1)
    return {"mode": " ".join([mode.name, *told]), "variant": " ".join(told), "cache": cache}


def answer(
    mode: Mode, llm: Any, plain: Any, prompt: list[int], n: int, sampling: dict[str, Any], seed: int
) -> Row:
    """One answer: its speed relative to plain decoding, its rounds, whether the text is plain's."""
    for each in (plain, llm):
        each.set_seed(seed)
    before = forecast(mode, llm)
    run = mode.run(llm, plain, prompt, n, sampling)
    foreseen = [now - was for now, was in zip(forecast(mode, llm), before)]
    beside = run.plain or (run if llm is plain else take_turns(plain, plain, prompt, n, sampling))
    rate = lambda r: (len(r.tokens) - 1) / max(r.seconds, 1e-9)
    steps = run.rounds or [(0, 1, 0)] * (len(run.tokens) - 1)
    return {
        "speed": rate(run) / rate(beside) if len(run.tokens) > 1 < len(beside.tokens) else 1.0,
        "forecast": foreseen[1] / foreseen[0] if any(foreseen) else None,
        "seconds": run.seconds,
        "plain_seconds": beside.seconds,
        "per_round": (len(run.tokens) - 1) / max(len(steps), 1),
        "drafted": sum(drafted for *_, drafted in steps),
        "text": [prompt[-1], *run.tokens],
        "same": run.tokens == beside.tokens,
    }


def forecast(mode: Mode, llm: Any) -> list[float]:
    """What the planner foresaw so far, in seconds: its rounds, and plain decoding of what they bring."""
    if not isinstance(mode, Eagle) or not mode.params.planned or llm.engine.planner.costs is None:
        return []
    info = llm.engine.planner.info()
    return [info["foreseen"], info["foreseen_plain"]]


def lines(rows: list[Row]) -> Iterator[str]:
    """The table, and the fastest of ours and of others."""
    plain = {place(row): row["speed"] for row in rows if row["mode"].startswith(NO_DRAFTS)}
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["kind"], row["mode"]), []).append(row)
    yield table(COLUMNS.split("|"), [[*key, *figures(of, plain)] for key, of in groups.items()])
    middle: dict[str, float] = {}
    for mode in dict.fromkeys(row["mode"] for row in rows):
        middle[mode] = statistics.median(row["speed"] for row in rows if row["mode"] == mode)
    ours = {row["mode"] for row in rows if "cache" in row}
    for title, own in (("fastest of ours", True), ("fastest of others", False)):
        some = {mode: speed for mode, speed in middle.items() if (mode in ours) is own and mode != "plain"}
        if some:
            best = max(some, key=lambda mode: some[mode])
            yield f"\n{title}: {best}, {some[best]:.3f}"


def place(row: Row) -> tuple[Any, ...]:
    return row["variant"], row["load"], row["prompt"]


def figures(of: list[Row], plain: dict[tuple[Any, ...], float]) -> list[str]:
    """The cells of a kind and mode behind their names."""
    middle = lambda some: statistics.median(row["speed"] for row in some)
    mean = lambda name: statistics.mean(row[name] for row in of)
    forecasts = [
        row["forecast"] / row["speed"] * plain[place(row)]
        for row in of
        if row["forecast"] is not None and place(row) in plain
    ]
    loads = [middle([row for row in of if row["load"] == load]) for load in sorted({r["load"] for r in of})]
    return [
        f"{middle(of):.3f}",
        f"{sum(r['plain_seconds'] for r in of) / sum(r['seconds'] for r in of):.3f}",
        ", ".join(f"{speed:.2f}" for speed in loads) if len(loads) > 1 else "",
        f"{min(row['speed'] for row in of):.3f}",
        number(statistics.median(forecasts), 3) if forecasts else "",
        f"{mean('per_round'):.2f}",
        f"{mean('drafted'):.0f}",
        f"{mean('foreseen'):.2f}" if "foreseen" in of[0] else "",
        f"{of[0]['cache']:.0f}" if "cache" in of[0] else "",
        str(sum(not row["same"] for row in of)),
    ]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
