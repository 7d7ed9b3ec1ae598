"""What rounds and prompts cost on a device: its copies, graphs and waits, counted in the device's calls.

A table is printed with pytest -s. A wait is a blocking copy, or a synchronize after something was queued.
"""

import itertools

import pytest
from tiny_models import N_VOCAB, PROMPT, take

from eagle3_llama import EagleLlama
from eagle3_llama.runtime.binding import address
from eagle3_llama.runtime.params import Tree

pytestmark = pytest.mark.thorough  # it needs the library of a device
COLUMNS = ("graphs", "blocking_in", "blocking_out", "async_in", "async_out", "waits")
# At most so many in a greedy round of one slot. A number may be lowered, never raised.
BOUNDS = {
    "plain": (1, 0, 0, 6, 1, 1),
    "chain of 3": (2, 0, 0, 8, 2, 2),
    "chain of 7": (2, 0, 0, 8, 2, 2),
    "tree 12x4x4": (2, 0, 0, 8, 2, 2),
}
DRAFTS = {
    "plain": {"n_max": 0},
    "chain of 3": {"n_max": 3},
    "chain of 7": {"n_max": 7},
    "tree 12x4x4": {"tree": Tree(12, 4, 4)},
}


def loaded(files, **settings):
    return EagleLlama(
        files[0], n_gpu_layers=99, n_ctx=1024, n_batch=512, flash_attn=True, verbose=False, **settings
    )


@pytest.fixture(scope="module")
def table(device, files):
    rows = {}
    for name, settings in DRAFTS.items():
        with loaded(files, eagle_path=files[1], **settings) as llm:
            tokens = llm.generate(PROMPT, temp=0.0)
            list(itertools.islice(tokens, 10))  # the graphs are built
            device.reset()
            before = llm.stats.rounds
            list(itertools.islice(tokens, 50))
            rounds = llm.stats.rounds - before or 50
            rows[name] = [device.counts()[column] / rounds for column in COLUMNS]
            tokens.close()
    print(f"\n{'':12}" + "".join(f"{column:>14}" for column in COLUMNS))
    for name, row in rows.items():
        print(f"{name:12}" + "".join(f"{n:14.1f}" for n in row))
    return rows


@pytest.mark.parametrize("name", BOUNDS)
def test_copies_and_waits_of_a_round(table, name):
    over = {c: n for c, n, bound in zip(COLUMNS, table[name], BOUNDS[name]) if n > bound + 0.5}
    assert not over, f"{name}: more a round than {dict(zip(COLUMNS, BOUNDS[name]))}"
    assert table[name][COLUMNS.index("waits")] >= 1  # it was on the device


def waits_of_a_prompt(device, files, n_tokens, **settings):
    with loaded(files, **settings) as llm:
        prompt = (PROMPT * n_tokens)[:n_tokens]
        for _ in range(2):  # the second time, the graphs are built
            llm.reset()
            device.reset()
            tokens = llm.generate(prompt, temp=0.0)
            next(tokens)
            tokens.close()
        return device.counts()


@pytest.mark.parametrize("n_tokens", [512, 700])
def test_a_prompts_features_stay_on_the_device(device, files, n_tokens):
    plain = waits_of_a_prompt(device, files, n_tokens)
    head = waits_of_a_prompt(device, files, n_tokens, eagle_path=files[1])
    assert head["waits"] <= plain["waits"] + -(-n_tokens // 512)  # one for each chunk
    assert head["graphs"] > plain["graphs"]  # it went over the head
    assert head["async_out_bytes"] + head["blocking_out_bytes"] <= 2 * (
        plain["async_out_bytes"] + plain["blocking_out_bytes"]
    )


@pytest.mark.parametrize(
    "moves, parents", [(1, [-1, -1, 1, 1]), (0, [-1, 0])], ids=["beside the path", "a path alone"]
)
def test_moved_rows_are_not_waited_for(device, files, moves, parents):
    """One graph moves the rows that stay, and none if they are the first ones of the tree."""
    with loaded(files, eagle_path=files[1], n_max=0) as llm:
        text = take(llm, 3)
        wrong = [(token + 1) % N_VOCAB for token in text]
        tokens = [wrong[1], text[1], wrong[2], text[2]] if moves else text[1:]
        engine, sampler = llm.engine, llm._init_sampler(temp=0.0)
        engine.rewind(0)
        engine.prefill(PROMPT)
        engine.steps.decode(text[0], tokens, parents)
        assert engine.steps.verify(address(sampler.sampler))[:2] == text[1:]
        device.reset()
        engine.steps.commit(3)
        counts = device.counts()
    assert counts["graphs"] == moves and counts["waits"] == counts["copies"] == 0
