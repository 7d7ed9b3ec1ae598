"""A row's logits do not depend on how many rows are decoded with it: bit for bit, in every format."""

import ctypes
import itertools

import numpy as np
import pytest
from tiers import crossed, each

import eagle3_llama.llama.eagle_llama  # noqa: F401 - loads the library that llama_cpp opens
from eagle3_llama.models import smollm2
from eagle3_llama.runtime.hook import SUFFIX
from eagle3_llama.runtime.library import find_lib_dir

import llama_cpp

SIZES = (1, 2, 3, 4, 8, 16)


class Decoder:
    def __init__(self, path, flash, n_threads=2, cache="F16"):
        self.model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        p = llama_cpp.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_threads, p.n_threads_batch, p.flash_attn_type = (
            1024,
            1024,
            n_threads,
            n_threads,
            int(flash),
        )
        p.type_k = p.type_v = getattr(llama_cpp, f"GGML_TYPE_{cache}")
        self.ctx = llama_cpp.llama_init_from_model(self.model, p)
        assert self.ctx, "no context: values are quantised with flash attention alone"
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def rows(self, tokens, pos):
        """Logits, float32 [n, n_vocab], of tokens at pos, pos + 1, ... Removes the tokens afterwards."""
        self._decode(tokens, pos, True)
        out = np.ctypeslib.as_array(
            llama_cpp.llama_get_logits(self.ctx), shape=(len(tokens), self.n_vocab)
        ).copy()
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.ctx), 0, pos, -1)
        return out

    def _decode(self, tokens, pos, logits, last=False):
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, t in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = t, pos + i, 1
            batch.logits[i] = logits or (last and i == len(tokens) - 1)
            batch.seq_id[i][0] = 0
        assert llama_cpp.llama_decode(self.ctx, batch) == 0
        llama_cpp.llama_batch_free(batch)

    def one_by_one(self, tokens, pos):
        out = []
        for i, t in enumerate(tokens):
            self._decode([t], pos + i, True)
            out.append(
                np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.ctx), shape=(self.n_vocab,)).copy()
            )
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.ctx), 0, pos, -1)
        return np.stack(out)

    def last(self, tokens, sizes):
        """Logits, float32 [n_vocab], of the last of tokens, which come in parts of these sizes."""
        done = 0
        for n in sizes:
            self._decode(tokens[done : done + n], done, False, last=done + n == len(tokens))
            done += n
        out = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.ctx), shape=(self.n_vocab,)).copy()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.ctx), True)
        return out

    def close(self):
        llama_cpp.llama_free(self.ctx)
        llama_cpp.llama_model_free(self.model)


def check(decoder, starts):
    """starts: {position: how many rows are decoded there}, ascending."""
    text = [int(t) for t in np.random.default_rng(0).integers(100, 40000, 1000)]
    done = 0
    for start, sizes in starts.items():
        while done < start:
            n = min(256, start - done)
            decoder._decode(text[done : done + n], done, False)
            done += n
        tokens = text[start : start + max(sizes)]
        alone = decoder.one_by_one(tokens, start)
        for n in sizes:
            together = decoder.rows(tokens[:n], start)
            assert (together.view(np.uint32) == alone[:n].view(np.uint32)).all(), f"{n} rows after {start}"
            assert np.abs(together).max() > 1


FORMATS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K_M", "Q5_K_M", "Q6_K"]


@pytest.mark.parametrize("fmt, flash", crossed(FORMATS, [False, True]))
def test_rows_are_alike(fmt, flash):
    decoder = Decoder(smollm2(fmt), flash)
    check(decoder, {250 if flash else 30: SIZES})  # the padded cache grows at 256, 512, ...
    decoder.close()


@pytest.mark.parametrize(
    "flash, cache",
    each(
        [(False, "F16"), (False, "F32"), *((True, c) for c in ("F16", "F32", "Q8_0", "Q4_0"))],
        quick=[(True, "F16")],
    ),
)
def test_long_drafts_and_contexts(flash, cache):
    decoder = Decoder(smollm2("BF16"), flash, cache=cache)
    check(decoder, {30: (64,), 250: SIZES, 509: (5,)})
    decoder.close()


@pytest.mark.parametrize("n_threads", each([1, 3], quick=[3]))
def test_any_number_of_threads(n_threads):
    decoder = Decoder(smollm2("BF16"), True, n_threads)
    check(decoder, {250: (1, 3, 16)})
    decoder.close()


def wide_target(tmp_path, ftype):
    """SmolLM2's rows are too short for most K-quants; these are 256 wide."""
    import tiny_models

    wide, path = tiny_models.target(tmp_path / "wide.gguf", n_embd=256), tmp_path / "target.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{ftype}")
    assert llama_cpp.llama_model_quantize(str(wide).encode(), str(path).encode(), ctypes.byref(params)) == 0
    return path


def interleaves():
    """True if the CPU backend interleaves weights, for products that sum prompts as they sum single rows."""
    base, ggml = (ctypes.CDLL(str(find_lib_dir() / f"lib{name}{SUFFIX}")) for name in ("ggml-base", "ggml"))
    pointer, name = ctypes.c_void_p, ctypes.c_char_p
    for function in (
        ggml.ggml_backend_dev_by_type,
        base.ggml_backend_dev_backend_reg,
        base.ggml_backend_reg_get_proc_address,
    ):
        function.restype = pointer
    base.ggml_backend_buft_name.restype = name
    device = pointer(ggml.ggml_backend_dev_by_type(0))
    registry = pointer(base.ggml_backend_dev_backend_reg(device))
    listing = base.ggml_backend_reg_get_proc_address(registry, name(b"ggml_backend_dev_get_extra_bufts"))
    types = ctypes.CFUNCTYPE(ctypes.POINTER(pointer), pointer)(listing)(device)
    kinds = itertools.takewhile(bool, (types[i] for i in itertools.count()))
    return any(base.ggml_backend_buft_name(pointer(kind)) == b"CPU_INTERLEAVED" for kind in kinds)


@pytest.mark.parametrize("ftype", ["Q4_K_M", "Q2_K", "Q5_K_M", "IQ4_XS"])
def test_k_quants_of_wide_rows(tmp_path, ftype):
    decoder = Decoder(wide_target(tmp_path, ftype), True)
    text = [int(t) for t in np.random.default_rng(0).integers(3, 300, 80)]
    decoder._decode(text[:60], 0, False)
    alone = decoder.one_by_one(text[60:76], 60)
    for n in (1, 2, 3, 4, 8, 16):
        assert (decoder.rows(text[60 : 60 + n], 60).view(np.uint32) == alone[:n].view(np.uint32)).all()
    decoder.close()


def check_cuts(decoder, n, cuts):
    """A prompt of n tokens whole, and cut in two: the last logits."""
    text = [int(t) for t in np.random.default_rng(1).integers(3, min(decoder.n_vocab, 40000), n)]
    whole = decoder.last(text, [n])
    assert np.abs(whole).max() > 0.1
    for cut in cuts:
        same = decoder.last(text, [cut, n - cut]).view(np.uint32) == whole.view(np.uint32)
        assert same.all(), f"cut at {cut}: {(~same).sum()} of {same.size} logits differ"


@pytest.mark.parametrize("head", [16, 24, 32, 40, 64, 80, 128])
def test_a_cut_leaves_no_trace_for_heads_of_any_size(tmp_path, head):
    import tiny_models

    path = tiny_models.target(tmp_path / "target.gguf", kind="Q8_0", n_embd=head * tiny_models.N_HEAD)
    decoder = Decoder(path, head != 32)  # both kinds of attention
    check_cuts(decoder, 160, [1, 4, 33, 64, 65, 100, 150, 159])
    decoder.close()


@pytest.mark.parametrize("cache", ["F32", "Q8_0", "Q4_0", "Q5_1"])
def test_a_cut_leaves_no_trace_in_other_caches(tmp_path, cache):
    """520 tokens: more than a chunk of cells."""
    import tiny_models

    path = tiny_models.target(tmp_path / "target.gguf", kind="Q8_0", n_embd=128)
    decoder = Decoder(path, True, cache=cache)
    check_cuts(decoder, 520, [4, 65, 300, 515])
    decoder.close()


def check_chunks(decoder, n):
    """A prompt of n tokens whole, and in chunks of 7, 64 and 100: the last logits."""
    text = [int(t) for t in np.random.default_rng(1).integers(3, min(decoder.n_vocab, 40000), n)]
    whole = decoder.last(text, [n])
    assert np.abs(whole).max() > 0.1
    for size in (7, 64, 100):
        sizes = [min(size, n - done) for done in range(0, n, size)]
        same = decoder.last(text, sizes).view(np.uint32) == whole.view(np.uint32)
        assert same.all(), f"chunks of {size}: {(~same).sum()} of {same.size} logits differ"


@pytest.mark.thorough
@pytest.mark.parametrize("fmt", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K_M", "Q6_K"])
def test_chunks_leave_no_trace_in_a_real_model(fmt):
    """600 tokens: more than a chunk of attention's cells, more rows than any product's tile."""
    if fmt not in ("Q8_0", "Q4_0", "Q4_1") and not interleaves():
        pytest.skip("without interleaved weights, products may sum prompts in another order")
    decoder = Decoder(smollm2(fmt), True)
    check_chunks(decoder, 600)
    decoder.close()


@pytest.mark.parametrize("ftype", ["Q4_K_M", "Q5_K_M", "Q6_K"])
def test_chunks_leave_no_trace_in_k_quants_of_wide_rows(tmp_path, ftype):
    if not interleaves():
        pytest.skip("without interleaved weights, products may sum prompts in another order")
    decoder = Decoder(wide_target(tmp_path, ftype), True)
    check_chunks(decoder, 600)
    decoder.close()
