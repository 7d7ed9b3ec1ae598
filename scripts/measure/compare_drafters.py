#!/usr/bin/env python3
"""Compares all drafters on prompts of several categories and formats of SmolLM2, in slices of time.

    scripts/measure/compare_drafters.py FILE.jsonl --minutes 9 [--formats BF16,Q8_0,Q4_0] [--limit N]
        [--modes ...]
    scripts/measure/compare_drafters.py FILE.jsonl --table

Run the first command until it exits with 0; it exits with 75 while something is left. Each run goes on where
the last one stopped, and prints the tables of what FILE.jsonl has. For every prompt all modes alternate in
one process. The modes of others run at their fastest setting for that category and format.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "scripts" / "data"
UPSTREAM = (
    "draft-eagle3",
    "ngram-simple",
    "ngram-map-k",
    "ngram-map-k4v",
    "ngram-mod",
    "ngram-cache",
    "draft-eagle3+ngram-mod",
)
MODES = ",".join(["plain", "head", "eagle", "text", "prompt_lookup", *(f"upstream:{s}" for s in UPSTREAM)])
LEFT = 75  # exit status: something is left to do


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="the answers, a line of JSON each; made, or gone on with")
    parser.add_argument("--table", action="store_true", help="measure nothing, print what the file says")
    parser.add_argument("--minutes", type=float, default=9.0, help="time of this slice")
    parser.add_argument("--formats", default="BF16,Q8_0,Q4_0")
    parser.add_argument("--modes", default=MODES, help=f"default: {MODES}".replace("%", "%%"))
    parser.add_argument(
        "--prompts", type=Path, nargs="+", metavar="FILE", help="default: scripts/data/prompts_*.jsonl"
    )
    parser.add_argument("--split", default="report", help="the half of the prompts; all: both")
    parser.add_argument("--limit", type=int, help="prompts of each category, evenly spaced")
    parser.add_argument("--searched", type=int, default=2, help="prompts that a best setting is found on")
    parser.add_argument("-n", type=int, default=96, metavar="TOKENS", help="most tokens of an answer")
    parser.add_argument("-t", type=int, default=2, metavar="THREADS")
    given = parser.parse_args()
    from others.bars import tables

    from eagle3_llama.errors import EagleError

    try:
        done = given.table or measure(given)
        lines = given.file.read_text(encoding="utf-8").splitlines()
        print("\n".join(tables([json.loads(line) for line in lines])))
    except (EagleError, OSError, ValueError) as e:
        parser.error(str(e))
    return 0 if done else LEFT


def measure(given: argparse.Namespace) -> bool:
    """One slice. Returns whether everything is done."""
    from others.comparison import Comparison, run_slice

    from eagle3_llama.bench.modes import parse_modes
    from eagle3_llama.models import shipped_head, smollm2
    from eagle3_llama.runtime.params import EagleParams

    modes = parse_modes(given.modes.split(","), [str(shipped_head())], None, EagleParams(), [])
    comparison = Comparison(
        targets=tuple(str(smollm2(fmt)) for fmt in given.formats.split(",")),
        modes=tuple(modes),
        prompts=tuple(map(str, given.prompts or sorted(DATA.glob("prompts_*.jsonl")))),
        split=None if given.split == "all" else given.split,
        limit=given.limit,
        searched=given.searched,
        n_predict=given.n,
        n_threads=given.t,
    )
    return run_slice(
        comparison, given.file, 60 * given.minutes, lambda line: print(line, file=sys.stderr, flush=True)
    )


if __name__ == "__main__":
    sys.exit(main())
