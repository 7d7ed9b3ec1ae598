#!/usr/bin/env python3
"""Compares drafts on a hybrid or on experts of 200 MB whose text is foreseen with a chosen chance.

    scripts/measure/compare_hybrids.py [--model hybrid] [--kind Q8_0] [--chance 0.7] [--rounds 5] [--loads 3]
        [--n-rs-seq default,0,4,8] [--chains 2,3,4] [--upstream draft-eagle3,ngram-simple,...] [--json FILE]

The models are made in the cache (tests/kit/hybrid_models.py). In every round each mode generates one answer,
taking turns with plain decoding of the same prompt, or right behind it where it runs in a process of its own.
A speed is relative to that: the median of the rounds, and the slowest of them. The planner forecasts the
speed over our own rounds without a draft; the table divides that by the speed over the mode "no drafts".
Where a load finds its memory makes it up to a tenth faster or slower than another one of the same file: so
all modes of ours are loaded anew --loads times, and the table has each load's median too. llama.cpp's own
drafters run at the fastest setting of their search. Their text may differ: an unpatched library sums in
another order.

With --chance 1 the target's text has no surprise, and --p says how often the head is right. With --chance 0
nothing can be foreseen. --topic 0.7: what follows in a text chooses the same experts. A text of experts is
sampled unless the chance is 1, and llama.cpp's drafters, which are greedy here, are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kit")]

import hybrid_models  # noqa: E402 - in the folder that sys.path has now
from others import upstream  # noqa: E402

from eagle3_llama.bench.mode import Loading  # noqa: E402
from eagle3_llama.bench.turns import Run, take_turns  # noqa: E402
from eagle3_llama.common.files import cache_dir  # noqa: E402
from eagle3_llama.llama.eagle_llama import EagleLlama  # noqa: E402
from eagle3_llama.llama.flash import FlashLlama  # noqa: E402
from eagle3_llama.runtime.params import EagleParams  # noqa: E402

SPECS = "draft-eagle3,draft-mtp,ngram-simple,ngram-map-k,ngram-mod,draft-eagle3+ngram-mod"
NO_DRAFTS = "no drafts"
SEARCHED = 1  # prompts that upstream's settings are tried on: each takes a minute a drafter


class Mode(NamedTuple):
    """llm: an EagleLlama, which takes turns, or a Drafter of upstream's."""

    name: str
    llm: Any
    params: EagleParams | None = None


def main() -> None:
    given = arguments()
    model = hybrid_models.MODELS[given.model]
    of = hybrid_models.cycles(model.shape)
    folder = given.models or cache_dir() / "hybrids"
    target, head = hybrid_models.made(folder, given.model, given.kind, given.chance, given.topic, given.p)
    prompts = [of.prompt(model.n_live, turn) for turn in range(given.rounds + SEARCHED)]
    n_ctx = max(map(len, prompts)) + given.n + 64
    loading = Loading(str(target), given.t, n_ctx, flash_attn=None)
    greedy = {"temp": 0.0}
    sampling = hybrid_models.sampling(model, given.chance, given.topic) if model.experts else greedy
    say(f"{target.name}: {target.stat().st_size / 1e6:.0f} MB; {sampling}")
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        others: list[Mode] = []
        if sampling == greedy:
            others = theirs(given, loading, str(head), prompts[given.rounds :], stack)
        for load in range(given.loads):
            for row in one_load(given, loading, str(head), others, prompts[: given.rounds], sampling):
                row["foreseen"] = of.foreseen([prompts[row["round"]][-1], *row.pop("tokens")])
                rows.append({"load": load, **row})
                say("{load} {round} {mode}: {speed:.3f}".format(**rows[-1]))
    print("\n".join(table(rows)))
    if given.json:
        given.json.write_text(json.dumps({"given": vars(given), "rows": rows}, indent=1, default=str))


def one_load(
    given: argparse.Namespace,
    loading: Loading,
    head: str,
    others: list[Mode],
    prompts: list[list[int]],
    sampling: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """Loads plain decoding and our modes, and has each answer each prompt. others: those that stay loaded."""
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(contextlib.closing(FlashLlama(loading.path, **loading.settings())))
        modes = [Mode("plain", plain), *ours(given, loading, head, stack), *others]
        for i, prompt in enumerate(prompts):
            for mode in modes:
                yield {"round": i, **answer(mode, plain, prompt, given.n, sampling, i)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="hybrid", choices=list(hybrid_models.MODELS))
    parser.add_argument("--kind", default="Q8_0", help="format of the target")
    parser.add_argument("--chance", type=float, default=0.7, help="that f gives the next token: 0, 0.7, 1")
    parser.add_argument("--p", type=float, default=1.0, help="how often the head is right about f")
    parser.add_argument("--topic", type=float, default=0.0, help="what a cycle's embeddings have in common")
    parser.add_argument("--rounds", type=int, default=5, help="answers of each mode; the median counts")
    parser.add_argument("--loads", type=int, default=3, help="so often everything is loaded anew")
    parser.add_argument("--n-rs-seq", default="default,0,4,8", help="of EagleLlama; none: no mode of ours")
    parser.add_argument("--chains", default="2,3,4", help="fixed chains of the head; none: no such mode")
    parser.add_argument("--upstream", default=SPECS, help="llama.cpp's drafters; none: no such mode")
    parser.add_argument("-n", type=int, default=128, metavar="TOKENS", help="of an answer")
    parser.add_argument("-t", type=int, default=2, metavar="THREADS")
    parser.add_argument("--models", type=Path, metavar="FOLDER", help="of the models; default: in the cache")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every answer's figures")
    return parser.parse_args()


def ours(given: argparse.Namespace, loading: Loading, head: str, stack: contextlib.ExitStack) -> list[Mode]:
    """For each n_rs_seq: no drafts, the planner with the head, without text, fixed chains; text alone."""
    modes = []
    for size in listed(given.n_rs_seq):
        of = {} if size == "default" else {"n_rs_seq": int(size)}
        opened = lambda eagle, of=of: stack.enter_context(
            contextlib.closing(EagleLlama(loading.path, eagle=eagle, **of, **loading.settings()))
        )
        with_head, alone = opened(head), opened(None)
        name = f"n_rs_seq={with_head.context_params.n_rs_seq}" + (" (default)" if size == "default" else "")
        modes.append(Mode(f"{NO_DRAFTS} {name}", with_head, EagleParams(n_max=0)))
        modes.append(Mode(f"eagle {name}", with_head, EagleParams()))
        modes.append(Mode(f"head {name}", with_head, EagleParams(text=False)))
        modes += [
            Mode(f"chain {n} {name}", with_head, EagleParams(n_max=int(n), text=False))
            for n in listed(given.chains)
        ]
        if alone.engine.planner.costs is None:  # not in the middle of an answer that is timed
            alone._measure()
        modes.append(Mode(f"text {name}", alone, EagleParams()))
    return modes


def theirs(
    given: argparse.Namespace,
    loading: Loading,
    head: str,
    prompts: list[list[int]],
    stack: contextlib.ExitStack,
) -> list[Mode]:
    """llama.cpp's drafters, and its plain decoding, each at its fastest setting."""
    modes = []
    for spec in ["plain", *listed(given.upstream)] if listed(given.upstream) else []:
        kinds = "ngram-simple" if spec == "plain" else spec.replace("+", ",")
        file = head if "draft-eagle3" in kinds else None
        drafter = upstream.Drafter(loading.path, file, kinds, loading.n_threads, loading.n_ctx, None)
        stack.callback(drafter.close)
        if spec == "plain":
            drafter.setting = upstream.Setting()
        else:
            drafter.settle(prompts)
        used = " ".join(f"{k}={v}" for k, v in drafter.setting.used().items())
        modes.append(Mode(f"upstream {spec} {used}".strip(), drafter))
        say(modes[-1].name)
    return modes


def answer(
    mode: Mode, plain: Any, prompt: list[int], n: int, sampling: dict[str, Any], seed: int
) -> dict[str, Any]:
    """One answer: its speed relative to plain decoding, its rounds, whether the text is plain's."""
    for llm in (plain, mode.llm):
        llm.set_seed(seed)
    forecast: list[float] = []
    if isinstance(mode.llm, upstream.Drafter):
        beside = take_turns(plain, plain, prompt, n, sampling)
        run = Run(*mode.llm.run(prompt, n), {}, beside)
    else:
        if mode.params is not None:
            mode.llm.eagle_params = mode.params
        before = foreseen(mode)
        run = take_turns(mode.llm, plain, prompt, n, sampling)
        forecast = [now - was for now, was in zip(foreseen(mode), before)]
        beside = run.plain or run
    rate = lambda r: (len(r.tokens) - 1) / r.seconds
    measured = rate(run) / rate(beside)
    steps = run.rounds or [(0, 1, 0)] * (len(run.tokens) - 1)
    return {
        "mode": mode.name,
        "speed": measured,
        "forecast": forecast[1] / forecast[0] if any(forecast) else None,
        "per_second": rate(run),
        "plain_per_second": rate(beside),
        "per_round": (len(run.tokens) - 1) / max(len(steps), 1),
        "drafted": sum(drafted for *_, drafted in steps),
        "tokens": run.tokens,
        "same": run.tokens == beside.tokens,
    }


def foreseen(mode: Mode) -> list[float]:
    """What the planner foresaw so far, in seconds: its rounds, and plain decoding of what they bring."""
    if mode.params is None or not mode.params.planned or mode.llm.engine.planner.costs is None:
        return []
    info = mode.llm.engine.planner.info()
    return [info["foreseen"], info["foreseen_plain"]]


def table(rows: list[dict[str, Any]]) -> list[str]:
    columns = "mode|median speed|of each load|slowest|forecast / speed|tokens a round|draft tokens|foreseen"
    columns += "|other texts"
    lines = [f"| {columns.replace('|', ' | ')} |", "|---|---|---|---|---|---|---|---|---|"]
    middle: dict[str, float] = {}
    place = lambda row: (row["mode"].partition("n_rs_seq")[2], row["load"], row["round"])
    plain = {place(row): row["speed"] for row in rows if row["mode"].startswith(NO_DRAFTS)}
    for name in dict.fromkeys(row["mode"] for row in rows):
        of = [row for row in rows if row["mode"] == name]
        middle[name] = statistics.median(row["speed"] for row in of)
        forecasts = [
            row["forecast"] / row["speed"] * plain[place(row)] for row in of if row["forecast"] is not None
        ]
        forecast = f"{statistics.median(forecasts):.3f}" if forecasts else "-"
        mean = lambda key, of=of: statistics.mean(row[key] for row in of)
        n_other = sum(not row["same"] for row in of)
        loads = [
            statistics.median(row["speed"] for row in of if row["load"] == load)
            for load in sorted({row["load"] for row in of})
        ]
        each = ", ".join(f"{speed:.2f}" for speed in loads)
        lines.append(
            f"| {name} | {middle[name]:.3f} | {each} | {min(row['speed'] for row in of):.3f} | {forecast}"
            f" | {mean('per_round'):.2f} | {mean('drafted'):.0f} | {mean('foreseen'):.2f} | {n_other} |"
        )
    theirs = {k: v for k, v in middle.items() if k.startswith("upstream")}
    mine = {k: v for k, v in middle.items() if k not in theirs and k != "plain"}
    for title, some in (("fastest of ours", mine), ("fastest of llama.cpp's", theirs)):
        if some:
            best = max(some, key=lambda name: some[name])
            lines.append(f"\n{title}: {best}, {some[best]:.3f}")
    if mine and theirs:
        lines.append(f"\nratio: {max(mine.values()) / max(theirs.values()):.3f}")
    return lines


def listed(names: str) -> list[str]:
    return [] if names in ("", "none") else names.split(",")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
