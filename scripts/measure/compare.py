#!/usr/bin/env python3
"""Compares ways of decoding on a target: each answers the same prompts, and they take turns.

    scripts/measure/compare.py TARGET... [--modes none,eagle,head,text,chain:3,upstream:ngram-mod,...]

TARGET: a GGUF file, a format of SmolLM2 such as Q8_0, or `hybrid` or `experts`, a model of 200 MB that is
made in the cache (tests/kit/hybrid_models.py) and whose text is foreseen with a chosen chance.

Modes are those of `eagle3-llama bench`, and none, our rounds without drafts, and chain:N, the head's chains
of N. A speed is relative to plain decoding of the same prompt, which takes turns with ours, or runs right
behind a mode that has a process of its own. Modes of others run at the fastest setting of their search; their
text may differ, since an unpatched library sums in another order. Where a load finds its memory makes it up
to a tenth faster or slower than another one of the same file: --loads loads all anew, and the table has each
load's median too. The planner forecasts the speed over our own rounds without a draft; with the mode none the
table divides its forecast by the speed over that.

Other comparisons, each by an option:

    compare.py hybrid --n-rs-seq default,0,4    # our modes with each number of snapshots of the state
    compare.py GEMMA.gguf --windows whole,pruned                    # and swa_full
    compare.py Q8_0 --lib FOLDER [--base FOLDER]                    # two builds of this package's library
    compare.py BF16 Q8_0 Q4_0 --beside nothing,spin,compile         # beside a program that keeps a core busy
    compare.py Q8_0 --clients 4,8               # clients of a batcher, and what the costs of rows allow
    compare.py BF16 Q8_0 Q4_0 --file FILE.jsonl --minutes 9         # all drafters, in slices of time
    compare.py HYBRID.gguf --modes checkpoint,snapshots,again       # ways to take drafts back, counted

--help says more of each option. Run it alone on the machine.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "kit")]


class Target(NamedTuple):
    """made: the name of a made model, "" for others. head: None if there is none."""

    path: str
    head: str | None
    made: str = ""


def main() -> int:
    parser = options()
    given = parser.parse_args()
    if given.serve:
        from comparing.processes import serve

        serve(json.loads(given.serve))
        return 0
    if not (given.targets or given.table):
        parser.error("name a target")
    from eagle3_llama.errors import EagleError

    try:
        return compare(given)
    except (EagleError, OSError, ValueError) as e:
        parser.error(str(e))


def compare(given: argparse.Namespace) -> int:
    from comparing import clients, processes, slices, turns, ways_back

    if given.file is not None:
        return slices.run(given)
    rows: list[dict[str, Any]] = []
    names = set((given.modes or "").split(","))
    for target in (target_of(name, given) for name in given.targets):
        if names <= ways_back.WAYS:
            ways_back.run(given, target.path)
        elif given.clients:
            clients.run(given, target)
        elif given.lib or given.beside:
            rows += processes.run(given, target)
        else:
            rows += turns.run(given, target)
    if given.json:
        report = {"command": shlex.join(sys.argv), "n_threads": given.t, "rows": rows}
        given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def target_of(name: str, given: argparse.Namespace) -> Target:
    import hybrid_models

    from eagle3_llama.common.files import cache_dir
    from eagle3_llama.models import shipped_head, smollm2

    head = str(given.eagle) if given.eagle else None
    if name in hybrid_models.MODELS:
        folder = given.models or cache_dir() / "hybrids"
        p = 1.0 if given.p is None else given.p
        path, own = hybrid_models.made(folder, name, given.kind, given.chance, given.topic, p)
        return Target(str(path), head or str(own), name)
    if Path(name).is_file():
        return Target(name, head)
    if name.endswith(".gguf"):
        raise ValueError(f"no such file: {name}")
    return Target(str(smollm2(name)), head or str(shipped_head()))


def options() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--modes", help="default: none, text, and with a head eagle and head")
    parser.add_argument(
        "--eagle", type=Path, metavar="HEAD.gguf", help="default: that of a made model or SmolLM2"
    )
    parser.add_argument("-n", type=int, default=96, metavar="TOKENS", help="of an answer")
    parser.add_argument("-t", type=int, default=2, metavar="THREADS")
    parser.add_argument("--n-ctx", type=int, default=4096)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write each figure")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--kinds", help="of scripts/data/prompts_*, such as editing,prose, or files")
    prompts.add_argument("--prompts", type=int, default=6, help="of each kind, of a made model, or of all")
    prompts.add_argument("--rounds", type=int, default=1, help="answers to each prompt")
    prompts.add_argument("--split", default="report", help="the half of the prompts of a kind; all: both")
    loads = parser.add_argument_group("loads")
    loads.add_argument("--loads", type=int, default=1, help="so often everything is loaded anew")
    loads.add_argument("--n-rs-seq", metavar="N,...", help="of EagleLlama: default, or a number")
    loads.add_argument("--windows", metavar="KIND,...", help="whole, pruned")
    made = parser.add_argument_group("made models")
    made.add_argument("--kind", default="Q8_0", help="format of the target")
    made.add_argument("--chance", type=float, default=0.7, help="that f gives the next token: 0, 0.7, 1")
    made.add_argument("--p", type=float, help="how often the head is right about f, 1; counted ways: 0.7")
    made.add_argument("--topic", type=float, default=0.0, help="0.7: what follows chooses the same experts")
    made.add_argument("--models", type=Path, metavar="FOLDER", help="of the models; default: in the cache")
    processes = parser.add_argument_group("processes that alternate by answer")
    processes.add_argument(
        "--lib", type=Path, metavar="FOLDER", help="of libeagle3, such as a wheel's eagle3_llama/lib"
    )
    processes.add_argument(
        "--base", type=Path, metavar="FOLDER", help="the other one; default: this checkout's"
    )
    processes.add_argument("--beside", metavar="NAME,...", help="nothing, spin, compile")
    processes.add_argument("--tokens", metavar="N,...", help="of an answer; default: -n")
    clients = parser.add_argument_group("clients of a batcher")
    clients.add_argument("--clients", metavar="N,...", help="numbers of clients")
    ways = parser.add_argument_group("counted ways")
    ways.add_argument("--most", type=int, default=4, help="longest chain, and n_rs_seq")
    ways.add_argument("--passes", type=float, default=0.0, metavar="MS", help="what else a round takes")
    slices = parser.add_argument_group("slices of time")
    slices.add_argument("--file", type=Path, help="the answers, a line of JSON each; made, or gone on with")
    slices.add_argument("--minutes", type=float, default=9.0, help="time of this slice")
    slices.add_argument("--table", action="store_true", help="measure nothing, print what the file says")
    slices.add_argument("--limit", type=int, help="prompts of each kind, evenly spaced")
    slices.add_argument("--searched", type=int, default=2, help="prompts that a best setting is found on")
    return parser


if __name__ == "__main__":
    sys.exit(main())
