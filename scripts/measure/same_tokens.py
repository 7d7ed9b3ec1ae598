#!/usr/bin/env python3
"""Compare the tokens of a fixed corpus between two versions of this project.

    python scripts/measure/same_tokens.py write FILE   # with the version to compare with
    python scripts/measure/same_tokens.py check FILE   # with yours: exit code 1 if a token differs
    python scripts/measure/same_tokens.py plain        # this version with plain decoding: the same

The corpus has 20 prompts in four formats of SmolLM2, greedy and sampled, decoded with chains, with trees,
with the planner on fixed costs, and in four slots at once. For chains and trees the file also holds how many
tokens were drafted and accepted. The planner corrects its costs by the clock, so only its tokens are
compared. Both runs need the same processor, because another instruction set rounds in another way.

`plain` also decodes without a head, and with a memory of earlier texts that lies.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from eagle3_llama import EagleLlama, EagleParams  # before llama_cpp: it brings the library
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.llama.chat import chat_tokens, is_end
from eagle3_llama.models import shipped_head, smollm2
from eagle3_llama.runtime.stats import EagleStats

from llama_cpp import Llama

PROMPTS = Path(__file__).resolve().parents[1] / "data" / "eval_prompts.jsonl"
FORMATS = "Q4_0,Q8_0,BF16,F32"
SAMPLINGS = {"greedy": {"temp": 0.0}, "sampled": {"temp": 0.8, "top_p": 0.95}}
DRAFTS = {"chain": EagleParams(3), "tree": EagleParams(tree="16x4x4"), "planner": EagleParams()}
N_SLOTS = 4
N_CTX = 2048  # tokens of a slot: the longest prompt has more than 1,000
# Seconds. Two rows cost a tenth more than one, and a pass of the head a tenth of a row: the planner drafts.
LAYERS = [0.0, *(0.010 * (0.9 + 0.1 * n) for n in range(1, 65))]
COSTS = SimpleNamespace(
    layers=LAYERS,
    output=[t / 4 for t in LAYERS],
    head=[t / 10 for t in LAYERS],
    cell=[0.0] * 65,
    first=0.0,
    other=0.0,
    context=8.0,
    back=0.0,
)

Answer = tuple[str, str, int, dict[str, Any]]  # kind of drafts, sampling, number of the prompt, record

app = typer.Typer(add_completion=False)


def prompts(count: int) -> list[str]:
    """Prompts of the evaluation set, spread over its categories."""
    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    step = max(len(lines) // count, 1)
    return [line["prompt"] for line in lines[::step][:count]]


def answer(llm: Any, prompt: str, sampling: dict[str, Any], n_predict: int) -> list[int]:
    """The token ids of one answer, up to its end: a Batcher decodes nothing behind it."""
    llm.set_seed(7)
    found: list[int] = []
    with contextlib.closing(llm.generate(chat_tokens(llm, prompt), **sampling)) as tokens:
        for token in itertools.islice(tokens, n_predict):
            found.append(int(token))
            if is_end(llm, int(token)):
                break
    return found


def one_slot(fmt: str, texts: list[str], n_predict: int) -> Iterator[Answer]:
    """EagleLlama's answers, with drafts of each kind."""
    llm = opened(EagleLlama, fmt, eagle=str(shipped_head()))
    llm.engine.planner.set_costs(COSTS)
    for kind, params in DRAFTS.items():
        llm.eagle_params = params
        for name, i, record in every(llm, texts, n_predict):
            yield kind, name, i, record
    llm.close()


def four_slots(fmt: str, texts: list[str], n_predict: int) -> Iterator[Answer]:
    """The answers of a Batcher whose slots are all busy."""
    settings = BatchSettings(str(smollm2(fmt)), str(shipped_head()), n_parallel=N_SLOTS, n_ctx=N_CTX)
    with Batcher(settings) as batcher, ThreadPoolExecutor(N_SLOTS) as pool:

        def ask(text: str, sampling: dict[str, Any]) -> dict[str, Any]:
            with batcher.request() as llm:
                return recorded(llm, text, sampling, n_predict)

        for name, sampling in SAMPLINGS.items():
            for i, record in enumerate(pool.map(lambda text, s=sampling: ask(text, s), texts)):
                yield "four slots", name, i, record


def without_head(fmt: str, texts: list[str], n_predict: int) -> Iterator[Answer]:
    """EagleLlama's answers, with drafts from the text alone."""
    llm = opened(EagleLlama, fmt)
    llm.engine.planner.set_costs(COSTS)
    for name, i, record in every(llm, texts, n_predict):
        yield "text alone", name, i, record
    llm.close()


def lied_to(
    fmt: str, texts: list[str], n_predict: int, right: dict[tuple[str, int], list[int]]
) -> Iterator[Answer]:
    """EagleLlama's answers, with a memory of these very answers in which every fourth token is wrong."""
    llm = opened(EagleLlama, fmt, eagle=str(shipped_head()), text_memory="64M")
    llm.engine.planner.set_costs(COSTS)
    for tokens in right.values():
        llm._context.memory.add([(t + 1) % llm.n_vocab() if k % 4 == 3 else t for k, t in enumerate(tokens)])
    for name, i, record in every(llm, texts, n_predict):
        yield "lies", name, i, record
    llm.close()


def opened(kind: type[Llama], fmt: str, **settings: Any) -> Any:
    """A model of this class. Flash attention: trees need it."""
    return kind(str(smollm2(fmt)), flash_attn=True, n_ctx=N_CTX, n_threads=2, verbose=False, **settings)


def every(llm: Any, texts: list[str], n_predict: int) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(sampling, number of the prompt, record) of each answer."""
    for name, sampling in SAMPLINGS.items():
        for i, text in enumerate(texts):
            yield name, i, recorded(llm, text, sampling, n_predict)


def recorded(llm: Any, text: str, sampling: dict[str, Any], n_predict: int) -> dict[str, Any]:
    """The tokens of one answer, and how many were drafted and accepted."""
    stats = getattr(llm, "stats", EagleStats())
    stats.reset()
    tokens = answer(llm, text, sampling, n_predict)
    return {"tokens": tokens, "drafted": stats.drafted, "accepted": stats.accepted}


def corpus(formats: str, count: int, n_predict: int) -> dict[str, Any]:
    """Every record by its key."""
    found: dict[str, Any] = {}
    texts = prompts(count)
    for fmt in formats.split(","):
        for way in (one_slot, four_slots):
            for kind, name, i, record in way(fmt, texts, n_predict):
                kept = record if kind in ("chain", "tree") else {"tokens": record["tokens"]}
                found[f"{fmt} {kind} {name} {i}"] = kept
            print(f"{fmt}, {way.__name__.replace('_', ' ')}: {len(found)} answers so far", flush=True)
    return found


def compare_with_plain(fmt: str, texts: list[str], n_predict: int) -> int:
    """How many answers differ from llama-cpp-python's own loop on the same library. Prints each kind."""
    llm = opened(Llama, fmt)
    right = {(name, i): record["tokens"] for name, i, record in every(llm, texts, n_predict)}
    llm.close()
    same: Counter[str] = Counter()
    other: Counter[str] = Counter()
    drafted: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for way in (one_slot, without_head, partial(lied_to, right=right), four_slots):
        for kind, name, i, record in way(fmt, texts, n_predict):
            is_same = record["tokens"] == right[name, i]
            (same if is_same else other)[kind] += 1
            drafted[kind] += record["drafted"]
            accepted[kind] += record["accepted"]
            if not is_same:
                print(f"differs: {fmt} {kind} {name} {i}\n  {record['tokens']}\n  plain {right[name, i]}")
    print(f"{fmt}: answers that are plain decoding's, of {len(right)} each; draft tokens accepted, of all")
    for kind in same | other:
        print(f"  {kind}: {same[kind]}; {accepted[kind]} of {drafted[kind]}", flush=True)
    return other.total()


Formats = Annotated[str, typer.Option(help="formats of SmolLM2")]
Count = Annotated[int, typer.Option(help="prompts")]
Length = Annotated[int, typer.Option("--n-predict", "-n", help="most tokens of an answer")]


@app.command()
def write(file: Path, formats: Formats = FORMATS, count: Count = 20, n_predict: Length = 48) -> None:
    """Write the tokens of this version to FILE."""
    records = corpus(formats, count, n_predict)
    made = {"formats": formats, "count": count, "n_predict": n_predict, "records": records}
    file.write_text(json.dumps(made) + "\n", encoding="utf-8")
    print(f"wrote {len(records)} answers to {file}")


@app.command()
def check(file: Path) -> None:
    """Compare this version with FILE."""
    before = json.loads(file.read_text(encoding="utf-8"))
    now = corpus(before["formats"], before["count"], before["n_predict"])
    other = [key for key, record in before["records"].items() if now.get(key) != record]
    for key in other:
        print(f"differs: {key}\n  before {before['records'][key]}\n  now    {now.get(key)}")
    print(f"{len(before['records']) - len(other)} of {len(before['records'])} answers are the same")
    raise typer.Exit(1 if other else 0)


@app.command()
def plain(formats: Formats = FORMATS, count: Count = 20, n_predict: Length = 48) -> None:
    """Compare this version with plain decoding."""
    texts = prompts(count)
    n_other = sum(compare_with_plain(fmt, texts, n_predict) for fmt in formats.split(","))
    raise typer.Exit(1 if n_other else 0)


if __name__ == "__main__":
    app()
