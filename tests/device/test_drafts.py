"""What a head on a device drafts: the same as on the CPU, though all its steps are one graph there."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
from tiers import each
from tiny_models import PROMPT

from eagle3_llama import EagleLlama
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.runtime.asks import Drafting
from eagle3_llama.runtime.params import EagleParams, Tree

KINDS = {
    "chain of 1": EagleParams(n_max=1),
    "chain of 5": EagleParams(n_max=5),
    "chain until unlikely": EagleParams(n_max=7, p_min=0.02),
    "tree 12x4x4": EagleParams(tree=Tree(12, 4, 4)),
    "tree 15x6x3": EagleParams(tree=Tree(15, 6, 3)),  # all three slots have room for it
    "tree of one level": EagleParams(tree=Tree(3, 1, 3)),
}


@pytest.fixture
def drafts(monkeypatch):
    """{(positions before a round, its token): the draft} of all rounds."""
    found, own = {}, Drafting.draft

    def draft(self, asks, buffers):
        own(self, asks, buffers)
        for i, ask in enumerate(asks):
            drafted = self.drafted(i)
            key = (self._session.n_past(ask.slot), ask.token)
            found[key] = (list(drafted.tokens), drafted.parents and list(drafted.parents))

    monkeypatch.setattr(Drafting, "draft", draft)
    return found


def taken(found):
    out = dict(found)
    found.clear()
    return out


def one_slot(files, params, n_gpu_layers):
    with EagleLlama(
        files[0],
        eagle_path=files[1],
        n_gpu_layers=n_gpu_layers,
        n_ctx=512,
        n_threads=1,
        flash_attn=True,
        verbose=False,
    ) as llm:
        llm.eagle_params = params
        tokens = llm.generate(PROMPT * 3, temp=0.0)
        out = list(itertools.islice(tokens, 25))
        tokens.close()
    return out


def several_slots(files, params, n_gpu_layers):
    """Three slots, the second of which ends before the others: those that are left are not neighbours."""

    def text(i):
        with batcher.request(params=params) as llm:
            tokens = llm.generate((PROMPT * 3)[: 5 + 3 * i], temp=0.0)
            return list(itertools.islice(tokens, 8 if i == 1 else 24))

    settings = BatchSettings(
        *files, n_parallel=3, n_ctx=256, n_threads=1, n_gpu_layers=n_gpu_layers, flash_attn=True
    )
    with Batcher(settings) as batcher, ThreadPoolExecutor(3) as pool:
        return list(pool.map(text, range(3)))


# The others of this folder need the device too: these say in short that it drafts.
QUICK = [("chain of 5", one_slot), ("tree 12x4x4", several_slots)]


@pytest.mark.parametrize(
    "kind, slots", each(itertools.product(KINDS, [one_slot, several_slots]), quick=QUICK)
)
def test_drafts_are_the_cpus(device, files, drafts, kind, slots):
    texts, seen = [], []
    for n_gpu_layers in (0, 99, 2):
        device.reset()
        texts.append(slots(files, KINDS[kind], n_gpu_layers))
        seen.append(taken(drafts))
        assert (device.counts()["graphs"] > 0) == (n_gpu_layers > 0)
    assert texts[0] == texts[1] == texts[2]
    for other in seen[1:]:  # a batcher may draft one round more than is taken
        common = seen[0].keys() & other.keys()
        assert len(common) >= 20
        assert {key: seen[0][key] for key in common} == {key: other[key] for key in common}
        assert sum(len(seen[0][key][0]) for key in common) > 10
