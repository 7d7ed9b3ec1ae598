"""What scripts/device/run_on_card.py wrote, as rows of a measurement: speeds on a card, by format."""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

RUN, REHEARSAL = "a run on a card", "a rehearsal"
MODEL = "random weights with a known text, 8B"
CONDITIONS = "all layers on the card, greedy, one slot"
Row = dict[str, Any]


class Where(NamedTuple):
    """Where and of what a measurement is. machine: a short name. sets: instruction sets."""

    machine: str
    cpu: str
    sets: Collection[str]
    threads: int
    commit: str
    date: str


def where(lines: Sequence[Row]) -> Where:
    """The card, the processor beside it, and the commit. Raises ValueError if the file does not name them."""
    told = step(lines, "machine")
    cards = [row for row in told if row.get("what") == "device"]
    processor = next((row for row in told if row.get("what") == "processor"), None)
    if not cards or processor is None:
        raise ValueError("the file names no card: its step machine failed, or was left out")
    commit = lines[0]["commit"]
    if not re.fullmatch("[0-9a-f]{7}", commit):
        raise ValueError(f"the commit is {commit!r}: run it with --commit, or write it into the first line")
    name = cards[0]["description"]
    cpu = f"{name} beside {processor['name']}"
    return Where(name, cpu, processor["sets"], min(processor["cores"], 8), commit, lines[0]["date"])


def rows(lines: Sequence[Row]) -> Iterator[Row]:
    """Speeds over plain decoding by format and p. Raises ValueError for a rehearsal, or a wrong text."""
    if lines[0]["what"] == REHEARSAL:
        raise ValueError("this is a rehearsal, which measures nothing: run it on a card")
    wrong = [each["step"] for each in lines[1:] if any(row.get("same") is False for row in each["rows"])]
    if wrong:
        raise ValueError(f"the text was not the expected one in {', '.join(wrong)}: mend this first")
    found = [row for name in ("speeds", "q4_k_m", "f16") for row in step(lines, name) if "share" in row]
    for fmt, p in dict.fromkeys((row["format"], row["p"]) for row in found):
        speeds = {row["mode"]: row for row in found if (row["format"], row["p"]) == (fmt, p)}
        if "plain" in speeds:
            peers = [row for row in step(lines, "upstream") if (row["format"], row["p"]) == (fmt, p)]
            yield {"format": fmt, "p": p} | figures(speeds, peers)


def figures(speeds: dict[str, Row], peers: Sequence[Row]) -> Row:
    """plain: tokens a second. The others in units of it; the fixed drafts are the fastest of their kind."""
    speed = {mode: statistics.median(row["tokens_per_second"]) for mode, row in speeds.items()}
    plain = speed["plain"]
    row: Row = {"plain_tokens_per_second": round(plain, 1)}
    for kind in ("chain", "tree"):
        of = {mode: value for mode, value in speed.items() if mode.startswith(kind)}
        if of:
            best = max(of, key=lambda mode: of[mode])
            row |= {kind: round(of[best] / plain, 2), f"{kind}_name": best.removeprefix(f"{kind} ")}
    if "planner" in speed:
        row["planner"] = round(speed["planner"] / plain, 2)
    if "chain 3" in speeds:
        row["head_share"] = speeds["chain 3"]["share"]["draft"]
    if peers:
        best_peer = max(peers, key=lambda peer: peer["tokens_per_second"])
        ratio = round(best_peer["tokens_per_second"] / plain, 2)
        row |= {"upstream": ratio, "upstream_name": str(best_peer["n_max"])}
    return row


def step(lines: Sequence[Row], name: str) -> list[Row]:
    return next((line["rows"] for line in lines if line.get("step") == name), [])
