"""Fixtures of several test files: a tiny target and its head; and for training, data made with it, a head before any training."""

import numpy as np
import pytest
import tiny_models
from training import lines, make_shards


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A tiny target and settings for it: conversations of random ids, some structure in them."""
    from eagle3_llama.train import TrainSettings

    d = tmp_path_factory.mktemp("tiny")
    target = str(tiny_models.target(d / "target.gguf"))
    rng = np.random.default_rng(0)
    made = [{"toks": [1, *(int(3 + (a + b * i) % 40) for i in range(60))], "prompt": 8} for a, b in rng.integers(1, 30, (96, 2))]
    return TrainSettings(targets=(target,), out=str(d / "out"), conversations=(lines(d / "made.jsonl", made),), weights=(0, 0, 1),
                         layers=(1, 2, 3), draft_vocab=64, steps=3, batch_tokens=512, epochs=2, eval_every=4, heldout=8, slots=4, max_tokens=5000)


@pytest.fixture(scope="session")
def corpus(tiny):
    from eagle3_llama.train.data import Corpus

    return Corpus(make_shards(tiny, tiny.out))


@pytest.fixture(scope="session")
def head(tiny, corpus):
    from eagle3_llama.train.data import draft_vocabulary
    from eagle3_llama.train.model import build
    from eagle3_llama.train.weights import TargetWeights

    weights = TargetWeights(tiny.targets[0])
    d2t, coverage = draft_vocabulary(corpus.answers(corpus.items), weights.shape.n_vocab, 64)
    assert coverage == 1.0 and len(set(d2t.tolist())) == 64
    return build(weights, 3, d2t, 0)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A tiny random target and a head for it."""
    d = tmp_path_factory.mktemp("tiny")
    return str(tiny_models.target(d / "target.gguf")), str(tiny_models.head(d / "head.gguf"))
