"""The prompt files: unique ids, both halves, sources that are named."""

from __future__ import annotations

import collections
import json
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"
FILES = sorted(DATA.glob("prompts_*.jsonl"))


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_file_of_prompts(path):
    prompts = lines(path)
    name = path.stem.removeprefix("prompts_")
    assert {p["category"] for p in prompts} == {name} and all(len(p["prompt"]) > 20 for p in prompts)
    halves = collections.Counter(p["split"] for p in prompts)
    assert set(halves) == {"tune", "report"} and abs(halves["tune"] - halves["report"]) <= 1
    said = (DATA / "README.md").read_text(encoding="utf-8")
    assert f"`{path.name}` {len(prompts)}" in said
    # a token of English has about four characters: 4,000 to 7,000 tokens, and at most 1,200
    sizes = [len(p["prompt"]) for p in prompts]
    assert 14_000 < min(sizes) and max(sizes) < 32_000 if name == "long" else max(sizes) < 5_000


def test_ids_are_unique():
    ids = [p["id"] for path in FILES for p in lines(path)]
    assert len(ids) == len(set(ids)) > 60
