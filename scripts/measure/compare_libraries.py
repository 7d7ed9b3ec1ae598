#!/usr/bin/env python3
"""Compares the speed of two builds of this package's library: a wheel's with a native build's, say.

    scripts/measure/compare_libraries.py MODEL.gguf... --lib FOLDER [--base FOLDER] [--eagle HEAD.gguf]
                                 [-n 64] [-t 2] [--rounds 8]

--lib: the folder of libeagle3, such as site-packages/eagle3_llama/lib. --base: the other one; without it,
this checkout's. Each has a process of its own, and they alternate by answer, and in which of them begins. A
figure is the median over the rounds of the speed in units of the base's, in plain decoding and with the
planner. It also says whether all texts are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eagle3_llama.bench.child import Child

MODES = ("plain", "planner")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--lib", type=Path, metavar="FOLDER")
    parser.add_argument("--base", type=Path, metavar="FOLDER")
    parser.add_argument("--eagle", type=Path, metavar="HEAD.gguf", help="default: the shipped one")
    parser.add_argument("-n", type=int, default=64, metavar="TOKENS", help="of an answer")
    parser.add_argument("-t", type=int, default=2, metavar="THREADS")
    parser.add_argument("--rounds", type=int, default=8, help="answers of each library and mode")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given)
        return 0
    from eagle3_llama.runtime import machine
    from eagle3_llama.runtime.library import find_lib_dir

    base = given.base or find_lib_dir()
    for folder in (given.lib, base):
        if folder is None or not (folder / "eagle3.h").is_file():
            parser.error(f"{folder or '--lib'}: name a folder with libeagle3 and eagle3.h")
    print(machine.model())
    print("| model | " + " | ".join(MODES) + " | texts |\n" + "|---" * (len(MODES) + 2) + "|")
    for model in given.models:
        print(row(given, model, [base, given.lib]), flush=True)
    return 0


def row(given: argparse.Namespace, model: Path, folders: list[Path]) -> str:
    children: list[Child] = []
    ratios: dict[str, list[float]] = {mode: [] for mode in MODES}
    same = True
    try:
        for folder in folders:
            children.append(start(given, model, folder))
            children[-1].read()  # it is loaded: two loads at once would disturb what each measures
        for turn in range(given.rounds + 1):
            for mode in MODES:
                order = (0, 1) if turn % 2 else (1, 0)
                told = {i: ask(children[i], mode, turn) for i in order}
                if turn:  # the first one warms up
                    ratios[mode].append(told[0][0] / told[1][0])
                same = same and told[0][1] == told[1][1]
    finally:
        for child in children:
            child.close()
    figures = [f"{statistics.median(ratios[mode]):.3f}" for mode in MODES]
    return f"| {model.stem} | " + " | ".join(figures) + f" | {'the same' if same else 'differ'} |"


def start(given: argparse.Namespace, model: Path, folder: Path) -> Child:
    from eagle3_llama.bench.child import Child

    env = {**os.environ, "EAGLE3_LLAMA_LIB_DIR": str(folder.absolute())}
    env.pop("OMP_WAIT_POLICY", None)
    head = ["--eagle", given.eagle] if given.eagle else []
    return Child([sys.executable, __file__, model, "--serve", "-n", given.n, "-t", given.t, *head], env)


def ask(child: Child, mode: str, turn: int) -> tuple[float, str]:
    """The seconds of an answer, and what was answered."""
    line = child.ask(f"{mode} {turn}")
    if not line:
        raise SystemExit(f"a measuring process ended: {child.last_words()}")
    return tuple(json.loads(line))


def serve(given: argparse.Namespace) -> None:
    """Answers lines "MODE TURN" with the seconds that the answer took after its first token, and its text."""
    from eagle3_llama import EagleLlama
    from eagle3_llama.llama.chat import chat_tokens
    from eagle3_llama.llama.flash import FlashLlama
    from eagle3_llama.models import shipped_head

    settings = {"n_ctx": 4096, "n_threads": given.t, "n_threads_batch": given.t, "flash_attn": True}
    [model] = given.models
    head = str(given.eagle or shipped_head())
    llms = {
        "plain": FlashLlama(str(model), verbose=False, **settings),
        "planner": EagleLlama(str(model), eagle=head, verbose=False, **settings),
    }
    prompts = Path(__file__).resolve().parents[1] / "data" / "eval_prompts.jsonl"
    texts = [json.loads(line)["prompt"] for line in prompts.read_text(encoding="utf-8").splitlines()]
    print("loaded", flush=True)
    for line in sys.stdin:
        mode, turn = line.split()
        llm = llms[mode]
        tokens = chat_tokens(llm, [{"role": "user", "content": texts[int(turn) * 23 % len(texts)]}])
        llm.reset()
        stream = llm.generate(tokens, temp=0.0)
        made, begin = [next(stream)], time.perf_counter()
        made += [token for token, _ in zip(stream, range(given.n - 1))]
        print(json.dumps([time.perf_counter() - begin, str(made)]), flush=True)
        stream.close()


if __name__ == "__main__":
    sys.exit(main())
