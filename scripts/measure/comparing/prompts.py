"""Prompts of compare.py."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from eagle3_llama.bench.prompts import read_prompts

DATA = Path(__file__).resolve().parents[2] / "data"
KINDS = "editing,extraction,quoting,prose"


def files(kinds: str | None) -> list[Path]:
    """Those of scripts/data/prompts_KIND.jsonl, or named ones."""
    names = (kinds or KINDS).split(",")
    return [Path(name) if name.endswith(".jsonl") else DATA / f"prompts_{name}.jsonl" for name in names]


def raw_texts(given: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """(kind, texts to complete), --prompts of each."""
    for file in files(given.kinds):
        found = read_prompts([file], split=None if given.split == "all" else given.split)
        kind = file.stem.removeprefix("prompts_")
        yield kind, [f"{text}\n\n" for _, text in found[: given.prompts]]
