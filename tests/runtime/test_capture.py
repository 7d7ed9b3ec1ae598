"""Captured features against the tensors of the graph itself, read by llama.cpp's evaluation callback."""

import numpy as np
import pytest
import tiny_models

from eagle3_llama import EagleError
from eagle3_llama.heads.compare.graph import GraphLayers
from eagle3_llama.runtime.capture import Capture

N_LAYER, N_EMBD = tiny_models.N_LAYER, tiny_models.N_EMBD


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_models.target(tmp_path_factory.mktemp("tiny") / "target.gguf")


@pytest.fixture(params=[128, 16, 7])
def target(path, request):
    t = GraphLayers(path, n_ubatch=request.param, n_seq=2)
    yield t
    t.close()


@pytest.mark.parametrize("layers", [[0], [1, 2, 3], [N_LAYER], [0, 1, 2, 3, 4]])
def test_layers_are_the_graphs(target, layers):
    """Over several micro-batches, every token in the batch's order."""
    n = 100
    with Capture(target.ctx, layers, N_EMBD) as capture:
        assert target.decode([3 + i % 200 for i in range(n)], range(n), [0] * n, [1] * n) == 0
        features = capture.read(n)
    for j, k in enumerate(layers):
        np.testing.assert_array_equal(features[:, j], target.truth(k))
    assert np.isfinite(features).all() and features.std() > 0


def test_logits_of_the_last_token_only(target):
    """Inputs of layers come whole though the last layer is computed for one row only."""
    n = 60
    with Capture(target.ctx, [1, 3], N_EMBD) as capture:
        target.decode([3 + i for i in range(n)], range(n), [0] * n, [0] * (n - 1) + [1])
        features = capture.read(n)
    np.testing.assert_array_equal(features[:, 1], target.truth(3))


def test_after_the_last_layer_needs_all_logits(target):
    with Capture(target.ctx, [N_LAYER], N_EMBD) as capture:
        assert target.decode([5, 6, 7], range(3), [0] * 3, [0, 0, 1]) < 0
        with pytest.raises(EagleError):
            capture.read(3)
        assert target.decode([8], [3], [0], [1]) == 0  # and the context lives
        assert np.isfinite(capture.read(1)).all()


def test_several_sequences_in_a_batch(target):
    """Rows of two sequences, interleaved: batch order, and each row as if its sequence were alone."""
    n = 40
    tokens = [10 + i if i % 2 else 90 - i for i in range(n)]
    with Capture(target.ctx, [2, 4], N_EMBD) as capture:
        assert target.decode(tokens, [i // 2 for i in range(n)], [i % 2 for i in range(n)], [1] * n) == 0
        both = capture.read(n)
        for s in (0, 1):
            target.clear()
            target.decode(tokens[s::2], range(n // 2), [s] * (n // 2), [1] * (n // 2))
            np.testing.assert_allclose(both[s::2], capture.read(n // 2), atol=2e-4, rtol=2e-3)


def test_off_leaves_nothing(target):
    capture = Capture(target.ctx, [1], N_EMBD)
    target.decode([5], [0], [0], [1])
    capture.close()
    target.decode([6], [1], [0], [1])
    with pytest.raises(EagleError):
        capture.read(1)


@pytest.mark.parametrize("layers", [[-1], [N_LAYER + 1], [2, 1], [1, 1]])
def test_layers_out_of_range(target, layers):
    with pytest.raises(EagleError, match="layer"):
        Capture(target.ctx, layers, N_EMBD)


def test_more_tokens_than_were_decoded(target):
    with Capture(target.ctx, [1], N_EMBD) as capture:
        target.decode([5, 6], range(2), [0, 0], [1, 1])
        with pytest.raises(EagleError):
            capture.read(3)
