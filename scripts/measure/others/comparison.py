"""Modes on prompts of several categories and formats, in slices of time. A file keeps what is done."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle3_llama.bench.child import Crash
from eagle3_llama.bench.mode import Mode
from eagle3_llama.bench.prompts import Answer, Prompt, read_prompts
from eagle3_llama.bench.run import spaced
from eagle3_llama.bench.target import BenchTarget
from eagle3_llama.bench.turns import Run
from eagle3_llama.errors import EagleError, ErrorKind
from eagle3_llama.llama.chat import chat_tokens
from eagle3_llama.runtime import machine

Record = dict[str, Any]  # what: "settings", "found", "answer" or "failed"
GREEDY = {"temp": 0.0}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Every prompt runs in every mode, greedily.

    limit: prompts of a category, evenly spaced. searched: of these, how many the modes of others find their
    best setting on. They are among the prompts that are compared, which favours the others.
    """

    targets: tuple[str, ...]
    modes: tuple[Mode, ...]
    prompts: tuple[str, ...]
    split: str | None = "report"
    limit: int | None = None
    searched: int = 2
    n_predict: int = 96
    n_threads: int = 2
    n_ctx: int = 8192
    flash_attn: bool | None = True

    def conditions(self) -> Record:
        """What must be the same in all slices of a file."""
        names = ("split", "searched", "n_predict", "n_threads", "n_ctx", "flash_attn")
        heads = sorted({m.head for m in self.modes if m.head is not None})
        same = {name: getattr(self, name) for name in names}
        return {"what": "settings", "processor": machine.model(), "heads": heads, **same}

    def categories(self) -> dict[str, list[Prompt]]:
        by: dict[str, list[Prompt]] = {}
        for category, prompt in read_prompts(self.prompts, split=self.split):
            by.setdefault(category, []).append(prompt)
        return {category: spaced(prompts, self.limit) for category, prompts in by.items()}


class Journal:
    """The records of a comparison, a line of JSON each. A line that was cut off is dropped."""

    def __init__(self, file: Path, conditions: Record) -> None:
        self._file, self.records = file, list[Record]()
        if file.exists():
            whole, newline, cut = file.read_text(encoding="utf-8").rpartition("\n")
            self.records = [json.loads(line) for line in whole.splitlines()]
            if cut:
                file.write_text(whole + newline, encoding="utf-8")
        if not self.records:
            self.add(conditions)
        differ = [k for k, v in conditions.items() if self.records[0].get(k) != v]
        if differ:
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"{file} was measured with other {', '.join(differ)}: use the same, or another file",
            )

    def add(self, *records: Record) -> None:
        with self._file.open("a", encoding="utf-8") as out:
            out.write("".join(json.dumps(r) + "\n" for r in records))
        self.records += records

    def has(self, **fields: Any) -> bool:
        return self.find(**fields) is not None

    def find(self, **fields: Any) -> Record | None:
        wanted = fields.items()
        return next((r for r in self.records if all(r.get(k) == v for k, v in wanted)), None)


def run_slice(
    c: Comparison, file: Path, seconds: float, say: Callable[[str], None] = lambda line: None
) -> bool:
    """Goes on with the comparison for about this time, and returns whether everything is done.

    An answer that has begun is finished. Raises EagleError BAD_ARGUMENT if the file has other conditions.
    """
    journal, end = Journal(file, c.conditions()), time.monotonic() + seconds
    for mode in c.modes:
        mode.prepare()
    for path in c.targets:
        if not _target(c, path, journal, end, say):
            return False
    return True


def _target(c: Comparison, path: str, journal: Journal, end: float, say: Callable[[str], None]) -> bool:
    failed = [m for m in c.modes if journal.has(what="failed", target=path, mode=m.name)]
    modes = [m for m in c.modes if m not in failed]
    if all(not _missing(journal, path, cat, p, modes) for cat, ps in c.categories().items() for p in ps):
        return True
    if time.monotonic() > end:
        return False
    target = BenchTarget(path, modes, c.n_threads, c.n_ctx, c.flash_attn)
    try:
        for category, prompts in c.categories().items():
            for done in _category(c, target, category, prompts, journal):
                say(f"{target.format} {category}: {done}")
                if time.monotonic() > end:
                    return False
        return True
    finally:
        for name, why in target.failed.items():
            journal.add({"what": "failed", "target": path, "format": target.format, "mode": name, "why": why})
        target.close()


def _category(
    c: Comparison, target: BenchTarget, category: str, prompts: Sequence[Prompt], journal: Journal
) -> Iterator[str]:
    """Does what is missing in a category, step by step; yields what was done."""
    cell = {"target": target.path, "format": target.format, "category": category}
    if all(not _missing(journal, target.path, category, p, target.working()) for p in prompts):
        return
    tokens = [chat_tokens(target.plain, p) for p in prompts]
    for mode in target.working():
        found = journal.find(what="found", mode=mode.name, **cell)
        if found is not None:
            mode.use(target.llm(mode), found["found"])
            continue
        try:
            mode.settle(target.llm(mode), spaced(tokens, c.searched))
        except Crash as e:
            target.failed[mode.name] = str(e)
            continue
        setting = mode.found(target.llm(mode))
        journal.add({"what": "found", **cell, "mode": mode.name, "found": setting})
        if setting:
            yield f"{mode.name} is fastest with {setting}"
    for i, (prompt, ids) in enumerate(zip(prompts, tokens)):
        modes = _missing(journal, target.path, category, prompt, target.working())
        if modes:
            journal.add(*({**cell, **r} for r in _answers(c, target, modes, prompt, ids, i % 2 == 1)))
            yield f"prompt {i + 1} of {len(prompts)}"


def _missing(journal: Journal, path: str, category: str, prompt: Prompt, modes: Sequence[Mode]) -> list[Mode]:
    """The modes without an answer to the prompt; plain decoding with them, because it runs beside them."""
    done = {
        r["mode"]
        for r in journal.records
        if r["what"] == "answer" and (r["target"], r["category"], r["id"]) == (path, category, name(prompt))
    }
    left = [m for m in modes if m.name not in done]
    return [m for m in modes if m in left or m.kind == "plain"] if left else []


def _answers(
    c: Comparison, target: BenchTarget, modes: Sequence[Mode], prompt: Prompt, ids: list[int], back: bool
) -> Iterator[Record]:
    """An answer in each mode, forward or backward in their order."""
    runs: dict[str, Run] = {}
    target.seed(1)
    for mode in modes[::-1] if back else modes:
        run = target.run(mode, ids, c.n_predict, GREEDY)
        if run is not None:
            runs[mode.name] = run
    answer = Answer("", {mode: [run] for mode, run in runs.items()})
    for mode in (m for m in modes if m.name in runs):
        run, plain = runs[mode.name], runs["plain"]
        yield {
            "what": "answer",
            "id": name(prompt),
            "mode": mode.name,
            "kind": mode.kind,
            "tokens": len(run.tokens),
            "plain_tokens": len(plain.tokens),
            "plain_seconds": plain.seconds,
            "relative": answer.relative(mode.name),
            "rounds": len(run.rounds),
            "drafted": sum(n for _, _, n in run.rounds),
            "sources": run.sources,  # accepted and all draft tokens of each
            "same": run.tokens == plain.tokens,
            "gap": None if run.tokens == plain.tokens else target.gap(ids, plain.tokens, run.tokens),
        }


def name(prompt: Prompt) -> str:
    """A short name of a prompt, by its text."""
    return hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:12]
