#!/usr/bin/env python3
"""Compares drafts from the text with plain decoding on a target with sliding windows, whole and pruned.

    scripts/measure/compare_windows.py MODEL [--kinds editing,extraction,quoting,prose] [--prompts 6] [-n 128]

Each prompt of scripts/data is completed as a text, without a chat template, by plain decoding and EagleLlama,
taking turns, once with windows of full size and once with pruned ones (swa_full=False). A speed is relative
to plain decoding of the same prompt with the same windows: the mean of a kind's prompts, each weighted by its
seconds, and the slowest of them. Only prompts of the split `report` are used.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from eagle3_llama.bench.turns import take_turns  # noqa: E402 - in the folder that sys.path has now
from eagle3_llama.llama.eagle_llama import EagleLlama  # noqa: E402
from eagle3_llama.llama.flash import FlashLlama  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="GGUF with sliding windows, such as Gemma 3")
    parser.add_argument(
        "--kinds", default="editing,extraction,quoting,prose", help="of scripts/data/prompts_*"
    )
    parser.add_argument("--prompts", type=int, default=6, help="of each kind")
    parser.add_argument("-n", type=int, default=128, metavar="TOKENS", help="of an answer")
    parser.add_argument("-t", type=int, default=2, metavar="THREADS")
    parser.add_argument("--n-ctx", type=int, default=4096)
    given = parser.parse_args()
    print("| windows | prompts | speed | slowest | tokens a round | cache, MB | other texts |")
    print("|---|---|---|---|---|---|---|")
    for whole in (True, False):
        threads = {"n_threads": given.t, "n_threads_batch": given.t}
        of = {"n_ctx": given.n_ctx, "flash_attn": True, "swa_full": whole, "verbose": False, **threads}
        with contextlib.ExitStack() as stack:
            plain = stack.enter_context(contextlib.closing(FlashLlama(given.model, **of)))
            llm = stack.enter_context(contextlib.closing(EagleLlama(given.model, **of)))
            llm._measure()  # not in the middle of an answer that is timed
            for kind in given.kinds.split(","):
                figures = row(plain, llm, texts(kind)[: given.prompts], given.n)
                print(f"| {'whole' if whole else 'pruned'} | {kind} | {figures}", flush=True)


def row(plain: Any, llm: Any, prompts: list[str], n: int) -> str:
    """The figures of one kind of prompts, as the end of a table's line."""
    ours = theirs = rounds = tokens = other = 0.0
    slowest = float("inf")
    for i, prompt in enumerate(prompts):
        for each in (plain, llm):
            each.set_seed(i)
        ids = llm.tokenize(prompt.encode())
        run = take_turns(llm, plain, ids, n, {"temp": 0.0})
        assert run.plain is not None
        other += run.tokens != run.plain.tokens
        ours, theirs = ours + run.seconds, theirs + run.plain.seconds
        slowest = min(slowest, run.plain.seconds / max(run.seconds, 1e-9))
        rounds, tokens = rounds + len(run.rounds), tokens + len(run.tokens) - 1
    cache = llm.memory().target_cache / 1e6
    speed = theirs / max(ours, 1e-9)
    return f"{speed:.3f} | {slowest:.3f} | {tokens / max(rounds, 1):.2f} | {cache:.0f} | {other:.0f} |"


def texts(kind: str) -> list[str]:
    lines = (ROOT / "scripts" / "data" / f"prompts_{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [r["prompt"] + "\n\n" for r in rows if r.get("split", "report") == "report"]


if __name__ == "__main__":
    main()
