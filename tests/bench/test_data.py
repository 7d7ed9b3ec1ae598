"""The prompt files: unique ids, both halves, sources that are named, sizes."""

from __future__ import annotations

import json

import pytest
from paths import PROMPTS

from eagle3_llama import EagleLlama
from eagle3_llama.common.files import cache_dir

COUNTS = {
    "agents": 16,
    "editing": 24,
    "extraction": 24,
    "long": 8,
    "prose": 16,
    "quoting": 24,
    "retrieval": 16,
    "translation": 16,
}


def path_of(name):
    return PROMPTS / f"prompts_{name}.jsonl"


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def token_counts(prompts):
    """By SmolLM2's tokenizer, or None if no file of that model is in the cache."""
    model = next(iter(sorted(cache_dir().glob("smollm2-135m-instruct-Q*.gguf"))), None)
    if model is None:
        return None
    with EagleLlama(str(model), vocab_only=True, verbose=False) as llm:
        return [len(llm.tokenize(p["prompt"].encode())) for p in prompts]


def test_every_file_of_prompts_is_checked():
    assert {p.name for p in PROMPTS.glob("prompts_*.jsonl")} == {path_of(name).name for name in COUNTS}


@pytest.mark.parametrize("name", COUNTS)
def test_a_file_of_prompts(name):
    prompts = lines(path_of(name))
    assert len(prompts) == COUNTS[name]
    for n, p in enumerate(prompts, 1):
        assert (p["id"], p["category"]) == (f"{name}-{n:02d}", name) and len(p["prompt"].strip()) > 20
        assert p["split"] == ("tune" if n % 2 else "report")
    assert len({p["prompt"] for p in prompts}) == len(prompts)
    # a token of these texts has two to five characters: 4,000 to 7,000 tokens, and at most 1,200
    sizes = [len(p["prompt"]) for p in prompts]
    assert 14_000 < min(sizes) and max(sizes) < 32_000 if name == "long" else max(sizes) < 5_000


def test_the_sources_are_named():
    said = (PROMPTS / "README.md").read_text(encoding="utf-8")
    for name, count in COUNTS.items():
        row = next(line for line in said.splitlines() if f"`{path_of(name).name}` {count}" in line)
        assert "this project" in row or "public domain" in row


def test_ids_are_unique_and_the_files_are_small():
    ids = [p["id"] for name in COUNTS for p in lines(path_of(name))]
    assert len(ids) == len(set(ids)) == sum(COUNTS.values())
    assert sum(path_of(name).stat().st_size for name in COUNTS) < 600_000


def test_lengths_in_tokens():
    prompts = [p for name in COUNTS for p in lines(path_of(name))]
    counts = token_counts(prompts)
    if counts is None:
        pytest.skip("no SmolLM2 in the cache")
    for p, n in zip(prompts, counts):
        assert 4_000 <= n <= 7_000 if p["category"] == "long" else n <= 1_200, (p["id"], n)
