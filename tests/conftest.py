"""Fixtures that several test files share: a tiny target, its head, training data, an untrained head,
the native tests' programs.

Also for the whole run: a folder of measured costs, which tests it has (tiers.py), the end of the summary
(skipped.py), and what becomes of it when a worker process dies (workers.py).
"""

import os
import shutil
import signal
import tempfile

import native_programs
import numpy as np
import pytest
import skipped
import tiny_models
from tiers import Tiers, pytest_addoption  # noqa: F401  a hook of this file
from training import lines, make_shards
from workers import Workers


def pytest_configure(config):
    """Costs that earlier runs measured are not used, and none are left for later runs. Workers share them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what it puts behind a &
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(Tiers(config), "tiers")
    config.pluginmanager.register(skipped)
    config.pluginmanager.register(Workers(config))
    if not hasattr(config, "workerinput"):
        config.costs = os.environ["EAGLE3_LLAMA_COSTS"] = tempfile.mkdtemp(prefix="eagle3-costs-")


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        shutil.rmtree(config.costs, ignore_errors=True)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A tiny target and settings for it: conversations of random ids, some structure in them."""
    from eagle3_llama.train import TrainSettings

    d = tmp_path_factory.mktemp("tiny")
    target = str(tiny_models.target(d / "target.gguf"))
    rng = np.random.default_rng(0)
    made = [
        {"toks": [1, *(int(3 + (a + b * i) % 40) for i in range(60))], "prompt": 8}
        for a, b in rng.integers(1, 30, (96, 2))
    ]
    return TrainSettings(
        targets=(target,),
        out=str(d / "out"),
        conversations=(lines(d / "made.jsonl", made),),
        weights=(0, 0, 1),
        layers=(1, 2, 3),
        draft_vocab=64,
        steps=3,
        batch_tokens=512,
        epochs=2,
        eval_every=4,
        heldout=8,
        slots=4,
        max_tokens=6000,
    )


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


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    """A tiny random target of 12 layers, in which the layers that heads read are far apart."""
    return tiny_models.target(tmp_path_factory.mktemp("target") / "target.gguf", n_layer=12)


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A target whose text does not end, and a head."""
    d = tmp_path_factory.mktemp("endless")
    target = tiny_models.target(d / "target.gguf", ends=False)
    return str(target), str(tiny_models.head(d / "head.gguf"))


@pytest.fixture(scope="module")
def foreseen(tmp_path_factory):
    """A target whose text does not end, in which a token depends on the one before it alone, and a head."""
    d = tmp_path_factory.mktemp("foreseen")
    target = tiny_models.target(d / "target.gguf", adds=0.0, ends=False)
    return target, tiny_models.head(d / "head.gguf")


@pytest.fixture(scope="session")
def programs(pytestconfig):
    """The folder of native/tests' programs, built with sanitizers in a run of all tests."""
    return native_programs.folder(sanitized=pytestconfig.getoption("all"))


@pytest.fixture(scope="session")
def fast_programs():
    """The same without sanitizers, for many cases of what `programs` runs one of."""
    return native_programs.folder()


@pytest.fixture
def cheap_rows(monkeypatch, tmp_path):
    """Rows cost so little that drafts pay, whatever this machine is like."""
    from text_tools import CHEAP

    from eagle3_llama.runtime import cost_files, costs

    monkeypatch.setenv("EAGLE3_LLAMA_COSTS", str(tmp_path))
    monkeypatch.setattr(cost_files, "measure", lambda *_, **__: CHEAP)
    monkeypatch.setattr(costs, "measure_in_use", lambda *_, **__: CHEAP)
