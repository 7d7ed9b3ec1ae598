"""Captured features against the tensors of the graph itself, read by llama.cpp's evaluation callback."""

import ctypes

import numpy as np
import pytest
import tiny_models

from eagle3_llama import EagleError
from eagle3_llama._library import find_lib_dir
from eagle3_llama.capture import Capture

import llama_cpp  # after eagle3_llama: it brings the library

N_LAYER, N_EMBD = tiny_models.N_LAYER, tiny_models.N_EMBD
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)


class Target:
    """A llama_context whose evaluation callback keeps every layer's input as the graph computes it."""

    def __init__(self, path, n_ubatch, n_seq=2):
        base = ctypes.CDLL(str(find_lib_dir() / "libggml-base.so"))
        base.ggml_get_name.restype, base.ggml_get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        base.ggml_nbytes.restype, base.ggml_nbytes.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
        base.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        names = {b"embd": 0, b"inp_embd": 0, **{f"l_out-{i}".encode(): i + 1 for i in range(N_LAYER)}}
        self.seen = {}

        def callback(tensor, ask, _):
            k = names.get(base.ggml_get_name(tensor))
            if k is not None and not ask:
                data = np.empty(base.ggml_nbytes(tensor) // 4, np.float32)
                base.ggml_backend_tensor_get(tensor, data.ctypes.data, 0, data.nbytes)
                self.seen.setdefault(k, []).append(data.reshape(-1, N_EMBD))
            return k is not None if ask else True

        self._callback = CALLBACK(callback)
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max, params.kv_unified = 512, 128, n_ubatch, n_seq, True
        params.cb_eval = ctypes.cast(self._callback, type(params.cb_eval)) if params.cb_eval is not None else self._callback
        self.ctx = llama_cpp.llama_init_from_model(self.model, params)
        self.address = ctypes.cast(self.ctx, ctypes.c_void_p).value

    def decode(self, tokens, positions, sequences, logits):
        self.seen.clear()
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (t, p, s, out) in enumerate(zip(tokens, positions, sequences, logits)):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = t, p, 1, out
            batch.seq_id[i][0] = s
        code = llama_cpp.llama_decode(self.ctx, batch)
        llama_cpp.llama_batch_free(batch)
        return code

    def truth(self, k):
        return np.concatenate(self.seen[k])

    def close(self):
        llama_cpp.llama_free(self.ctx)
        llama_cpp.llama_model_free(self.model)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_models.target(tmp_path_factory.mktemp("tiny") / "target.gguf")


@pytest.fixture(params=[128, 16, 7])
def target(path, request):
    t = Target(path, request.param)
    yield t
    t.close()


@pytest.mark.parametrize("layers", [[0], [1, 2, 3], [N_LAYER], [0, 1, 2, 3, 4]])
def test_layers_are_the_graphs(target, layers):
    """Over several micro-batches, every token in the batch's order."""
    n = 100
    with Capture(target.address, layers, N_EMBD) as capture:
        assert target.decode([3 + i % 200 for i in range(n)], range(n), [0] * n, [1] * n) == 0
        features = capture.read(n)
    for j, k in enumerate(layers):
        np.testing.assert_array_equal(features[:, j], target.truth(k))
    assert np.isfinite(features).all() and features.std() > 0


def test_logits_of_the_last_token_only(target):
    """Inputs of layers come whole though the last layer is computed for one row only."""
    n = 60
    with Capture(target.address, [1, 3], N_EMBD) as capture:
        target.decode([3 + i for i in range(n)], range(n), [0] * n, [0] * (n - 1) + [1])
        features = capture.read(n)
    np.testing.assert_array_equal(features[:, 1], target.truth(3))


def test_after_the_last_layer_needs_all_logits(target):
    with Capture(target.address, [N_LAYER], N_EMBD) as capture:
        assert target.decode([5, 6, 7], range(3), [0] * 3, [0, 0, 1]) < 0
        with pytest.raises(EagleError):
            capture.read(3)
        assert target.decode([8], [3], [0], [1]) == 0  # and the context lives
        assert np.isfinite(capture.read(1)).all()


def test_several_sequences_in_a_batch(target):
    """Rows of two sequences, interleaved: batch order, and each row as if its sequence were alone."""
    n = 40
    tokens = [10 + i if i % 2 else 90 - i for i in range(n)]
    with Capture(target.address, [2, 4], N_EMBD) as capture:
        assert target.decode(tokens, [i // 2 for i in range(n)], [i % 2 for i in range(n)], [1] * n) == 0
        both = capture.read(n)
        for s in (0, 1):
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(target.ctx), True)
            target.decode(tokens[s::2], range(n // 2), [s] * (n // 2), [1] * (n // 2))
            np.testing.assert_allclose(both[s::2], capture.read(n // 2), atol=2e-4, rtol=2e-3)


def test_off_leaves_nothing(target):
    capture = Capture(target.address, [1], N_EMBD)
    target.decode([5], [0], [0], [1])
    capture.close()
    target.decode([6], [1], [0], [1])
    with pytest.raises(EagleError):
        capture.read(1)


@pytest.mark.parametrize("layers", [[-1], [N_LAYER + 1], [2, 1], [1, 1]])
def test_layers_out_of_range(target, layers):
    with pytest.raises(EagleError, match="layer"):
        Capture(target.address, layers, N_EMBD)


def test_more_tokens_than_were_decoded(target):
    with Capture(target.address, [1], N_EMBD) as capture:
        target.decode([5, 6], range(2), [0, 0], [1, 1])
        with pytest.raises(EagleError):
            capture.read(3)
