"""All drafters on prompts of several kinds and formats, in slices of time: compare.py --file."""

from __future__ import annotations

import argparse
import json
import sys

from others.bars import tables
from others.comparison import Comparison, run_slice

from .modes import modes_of
from .prompts import DATA, files

UPSTREAM = "draft-eagle3 ngram-simple ngram-map-k ngram-map-k4v ngram-mod ngram-cache draft-eagle3+ngram-mod"
MODES = ",".join(["plain,head,eagle,text,prompt_lookup", *(f"upstream:{s}" for s in UPSTREAM.split())])
LEFT = 75  # exit status: something is left to do


def run(given: argparse.Namespace) -> int:
    """One slice, and the tables of what the file has. LEFT if something is left to do."""
    done = given.table or measure(given)
    lines = given.file.read_text(encoding="utf-8").splitlines()
    print("\n".join(tables([json.loads(line) for line in lines])))
    return 0 if done else LEFT


def measure(given: argparse.Namespace) -> bool:
    """One slice. Returns whether everything is done."""
    from eagle3_llama.models import shipped_head, smollm2

    comparison = Comparison(
        targets=tuple(str(smollm2(name)) for name in given.targets),
        modes=tuple(modes_of((given.modes or MODES).split(","), str(given.eagle or shipped_head()))),
        prompts=tuple(map(str, files(given.kinds) if given.kinds else sorted(DATA.glob("prompts_*.jsonl")))),
        split=None if given.split == "all" else given.split,
        limit=given.limit,
        searched=given.searched,
        n_predict=given.n,
        n_threads=given.t,
    )
    say = lambda line: print(line, file=sys.stderr, flush=True)
    return run_slice(comparison, given.file, 60 * given.minutes, say)
