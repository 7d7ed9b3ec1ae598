#!/usr/bin/env python3
"""Checks the figures of `eagle3-llama bench --json`.

It prints one line for each figure that is missing or below its limit, and then exits with 1.

    scripts/perf_gates.py FILE.json [FILE.json ...]

Together, the files must have these modes for every format below: plain, eagle with its default settings (the
planner), `--fixed` lengths, and a tree of 60 nodes. For BF16 and Q4_0 they must also have the mode upstream:

    eagle3-llama bench --model ... --eagle ... --prompts ... --modes plain,eagle,upstream \\
        --fixed 1,2,3,4,60x6x10 --json FILE.json

Each figure comes from a single file, because the prompts are the same there: the file with the most runs.
Trees and llama.cpp's own drafter take long, so their files may have fewer prompts.
"""

import json
import sys

FORMATS = ("F32", "BF16", "F16", "Q8_0", "Q4_0", "Q4_K_M", "Q4_1")
NEVER_BELOW = 0.98  # least speed relative to plain decoding, in every category
OF_BEST_FIXED = 0.93  # least speed of the planner relative to the best fixed setting
OVER_UPSTREAM, UPSTREAM_FORMATS = 1.25, ("BF16", "Q4_0")  # least speed relative to llama.cpp's own drafter
OF_LIMIT, LIMIT_FORMATS = 0.85, ("BF16",)  # least share of the limit
TREE_OVER_CHAIN = 1.20  # least ratio of tokens per round, largest tree to best chain


def misses(files):
    """Yields one line for each figure that is not reached. files: the results of each file."""
    for r in (r for rows in files for r in rows):
        if r["kind"] == "eagle" and not r["identical"]:
            yield f"{r['format']}, {r['mode']}, {r['category']}: the text differs from plain decoding's"
    for fmt in FORMATS:
        parts = [[r for r in rows if r["format"] == fmt] for rows in files]
        rows = most_runs(parts)
        eagle = planner_row(rows)
        if eagle is None:
            yield f"{fmt}: mode eagle was not run"
            continue
        for r in rows:
            if r["mode"] == "eagle" and r["ratio"] < NEVER_BELOW:
                yield f"{fmt}, {r['category']}: {r['ratio']:.3f} of plain decoding, expected {NEVER_BELOW}"
        fixed = [r for r in rows if r["category"] == "all" and r["mode"].startswith("eagle ")]
        yield from _fixed(fmt, eagle, fixed)
        yield from _trees(fmt, parts)
        if fmt in UPSTREAM_FORMATS:
            with_upstream = [rows for rows in parts if any(r["kind"] == "upstream" for r in rows)]
            yield from _upstream(fmt, most_runs(with_upstream))
        if fmt in LIMIT_FORMATS and (eagle.get("share_of_limit") or 0) < OF_LIMIT:
            yield f"{fmt}: {eagle.get('share_of_limit')} of the limit, expected {OF_LIMIT}"


def planner_row(rows):
    return next((r for r in rows if r["mode"] == "eagle" and r["category"] == "all"), None)


def most_runs(parts):
    """The rows of the file with the most runs of mode eagle. parts: a format's rows in each file."""
    found = (rows for rows in parts if planner_row(rows))
    return max(found, key=lambda rows: planner_row(rows).get("runs", 1), default=[])


def _fixed(fmt, eagle, fixed):
    if not any("n_max=" in r["mode"] for r in fixed):
        yield f"{fmt}: no fixed lengths were run"
        return
    best = max(fixed, key=lambda r: r["ratio"])
    if eagle["ratio"] < OF_BEST_FIXED * best["ratio"]:
        yield f"{fmt}: {eagle['ratio'] / best['ratio']:.3f} of {best['mode']}, expected {OF_BEST_FIXED}"


def _trees(fmt, parts):
    """Compares trees with the chains of the same file, because they had the same prompts."""
    ran = False
    for rows in parts:
        fixed = [r for r in rows if r["category"] == "all" and r["mode"].startswith("eagle ")]
        trees, chains = ([r for r in fixed if what in r["mode"]] for what in ("tree=", "n_max="))
        if not trees or not chains:
            continue
        ran = True
        tree, chain = (max(rs, key=lambda r: r["mean_accepted_length"]) for rs in (trees, chains))
        if tree["mean_accepted_length"] < TREE_OVER_CHAIN * chain["mean_accepted_length"]:
            lengths = [f"{r['mode']} {r['mean_accepted_length']:.2f}" for r in (tree, chain)]
            yield (
                f"{fmt}: {lengths[0]} tokens per round, {lengths[1]}, "
                f"expected {TREE_OVER_CHAIN} times as many"
            )
    if not ran:
        yield f"{fmt}: no trees were run"


def _upstream(fmt, rows):
    every = [r for r in rows if r["kind"] == "upstream" and r["category"] == "all"]
    upstream = [r["ratio"] for r in every if "failed" not in r]
    if not every:
        yield f"{fmt}: mode upstream was not run"
    elif not upstream:
        yield f"{fmt}: mode upstream {every[0]['failed']}"
    elif (share := planner_row(rows)["ratio"] / max(upstream)) < OVER_UPSTREAM:
        yield f"{fmt}: {share:.3f} of upstream's speed, expected {OVER_UPSTREAM}"


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    lines = list(misses([json.load(open(path, encoding="utf-8"))["results"] for path in sys.argv[1:]]))
    print("\n".join(lines) or "all figures are reached")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
