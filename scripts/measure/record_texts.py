#!/usr/bin/env python3
"""Records greedy texts of SmolLM2, and what the head offers after each token, for native/tests/replay.cpp.

    scripts/measure/record_texts.py OUT.txt [--prompts FILE.jsonl ...] [--split tune] [--step N] [-n TOKENS]

A line for each text: its category, the number of prompt tokens, all tokens. After it a line for each answer
token: T, then token, parent and probability of each node of the tree that the head offers after it. A text
takes a minute or so. The file grows text by text, so what was recorded stays if the program is ended.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3_llama import EagleLlama, EagleParams
from eagle3_llama.bench.prompts import read_prompts
from eagle3_llama.llama.chat import chat_tokens
from eagle3_llama.models import shipped_head, smollm2
from eagle3_llama.runtime.binding import address

DATA = Path(__file__).resolve().parents[1] / "data"
TREE = EagleParams(tree="60x6x4")  # as wide as the planner's trees


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=Path, nargs="+", default=sorted(DATA.glob("prompts_*.jsonl")))
    parser.add_argument("--split", default="tune", help="the half of the prompts; all: those without halves")
    parser.add_argument("--step", type=int, default=1, help="every so manieth prompt")
    parser.add_argument("--format", default="Q8_0")
    parser.add_argument("-n", type=int, default=160, metavar="TOKENS", help="most tokens of an answer")
    parser.add_argument("--most", type=int, default=1500, help="tokens of the longest prompt to take")
    given = parser.parse_args()
    target = str(smollm2(given.format))
    llm = EagleLlama(
        target, eagle=str(shipped_head()), n_ctx=given.most + given.n, flash_attn=True, verbose=False
    )
    split = None if given.split == "all" else given.split
    with given.out.open("w", encoding="utf-8") as out:
        for path in given.prompts:
            for category, prompt in read_prompts(path, split=split)[:: given.step]:
                tokens = chat_tokens(llm, prompt)
                if len(tokens) <= given.most:
                    record(llm, tokens, given.n, category, out)
                    print(f"{path.name}: {category}", file=sys.stderr, flush=True)


def record(llm: EagleLlama, prompt: list[int], n: int, category: str, out: Any) -> None:
    text, trees = list(prompt), []
    for token, tree in answer(llm, prompt, n):
        text.append(token)
        trees.append(tree)
    print(category, len(prompt), *text, file=out)
    for tree in trees[:-1]:
        print("T", *tree, file=out)
    out.flush()


def answer(llm: EagleLlama, prompt: list[int], n: int) -> Iterator[tuple[int, list[Any]]]:
    """Each token of a greedy answer, with the head's tree after it."""
    engine, sampler = llm.engine, llm._init_sampler(temp=0.0)
    engine.rewind(0)
    for at in range(0, len(prompt), llm.n_batch):
        engine.prefill(prompt[at : at + llm.n_batch])
    token = engine.sample(address(sampler.sampler))
    for _ in range(n):
        engine.steps.draft(token, TREE)
        drafted = engine.drafting.drafted(0)
        nodes = zip(drafted.tokens, drafted.parents, engine.drafting.probabilities())
        yield token, [word for t, parent, q in nodes for word in (t, parent, f"{q:.4f}")]
        if token == llm.token_eos():
            return
        engine.steps.decode(token, [])
        (token,) = engine.steps.verify(address(sampler.sampler))
        engine.steps.commit(1)


if __name__ == "__main__":
    main()
