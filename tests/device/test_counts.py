"""What a greedy round of one slot costs on a device: its copies and waits, counted in the device's calls.

The table is printed with pytest -s.
"""

import itertools

import pytest
from tiny_models import PROMPT

from eagle3_llama import EagleLlama
from eagle3_llama.runtime.params import Tree

COLUMNS = ("head passes", "blocking_in", "blocking_out", "async_out", "synchronize")
# At most so many a round. A number may be lowered, never raised. On CUDA each blocking copy waits, too.
BOUNDS = {"plain": (0, 6, 0, 1, 9), "chain of 3": (3, 24, 9, 4, 36), "tree 12x4x4": (4, 30, 12, 4, 44)}
DRAFTS = {"plain": {"n_max": 0}, "chain of 3": {"n_max": 3}, "tree 12x4x4": {"tree": Tree(12, 4, 4)}}


@pytest.fixture(scope="module")
def table(device, files):
    rows = {}
    for name, settings in DRAFTS.items():
        with EagleLlama(
            files[0],
            eagle_path=files[1],
            n_gpu_layers=99,
            n_ctx=256,
            flash_attn=True,
            verbose=False,
            **settings,
        ) as llm:
            tokens = llm.generate(PROMPT, temp=0.0)
            list(itertools.islice(tokens, 10))  # the graphs are built
            device.reset()
            before = llm.stats.rounds
            list(itertools.islice(tokens, 50))
            rows[name] = per_round(device.counts(), llm.stats.rounds - before or 50)
            tokens.close()
    print(f"\n{'':12}" + "".join(f"{column:>14}" for column in COLUMNS))
    for name, row in rows.items():
        print(f"{name:12}" + "".join(f"{n:14.1f}" for n in row))
    return rows


def per_round(counts, rounds):
    counts["head passes"] = counts["graphs"] - rounds
    return [counts[column] / rounds for column in COLUMNS]


@pytest.mark.parametrize("name", BOUNDS)
def test_copies_and_waits_of_a_round(table, name):
    over = {c: n for c, n, bound in zip(COLUMNS, table[name], BOUNDS[name]) if n > bound + 0.5}
    assert not over, f"{name}: more a round than {dict(zip(COLUMNS, BOUNDS[name]))}"
    assert table[name][COLUMNS.index("synchronize")] >= 1  # it was on the device
