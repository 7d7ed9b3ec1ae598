"""GGUF files of random or given weights: shapes, metadata, tokenizer, and tensors in any of ggml's formats.

A file of 5 GB takes seconds on 16 cores: random tensors repeat blocks of one pool of weights.
"""

import ctypes
import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import gguf
import numpy as np

TYPES = gguf.GGMLQuantizationType
EPS, BASE = 1e-5, 500000.0


class Shape(NamedTuple):
    """Of a target; its head has one such layer. n_draft: tokens of the draft vocabulary, and of the cycle."""

    n_embd: int
    n_head: int
    n_kv: int
    n_layer: int
    n_ff: int
    n_vocab: int
    n_draft: int
    n_ctx: int = 8192

    @property
    def d(self):
        return self.n_embd // self.n_head


def kind_of(kind, name, more=False):
    """A tensor's type in a file of this kind, as llama-quantize would choose it."""
    if name == "output" and kind in ("Q4_0", "Q4_K", "Q4_K_M"):
        return "Q6_K"
    if kind != "Q4_K_M":
        return kind
    return "Q6_K" if more and name in ("attn_v", "ffn_down") else "Q4_K"


def metadata(w, shape, n_layer):
    w.add_block_count(n_layer)
    w.add_context_length(shape.n_ctx)
    w.add_embedding_length(shape.n_embd)
    w.add_feed_forward_length(shape.n_ff)
    w.add_head_count(shape.n_head)
    w.add_head_count_kv(shape.n_kv)
    w.add_layer_norm_rms_eps(EPS)
    w.add_rope_dimension_count(shape.d)


def tokenizer(w, n_vocab, names=None):
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
    tokens += [f"t{i}" for i in range(len(tokens), n_vocab)]
    for i, name in (names or {}).items():
        tokens[i] = name
    w.add_tokenizer_model("llama")
    w.add_token_list(tokens)
    w.add_token_scores([-float(i) for i in range(n_vocab)])
    w.add_token_types([2, 3, 3] + [6] * 256 + [1] * (n_vocab - 259))
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)


class Tensors:
    """What is written behind the metadata: named now, computed when its turn comes."""

    def __init__(self, w, shape, seed, pools=None):
        """pools: {}, filled and shared by files of one seed, which are then written faster."""
        self.w, self.shape, self.seed, self.made = w, shape, seed, []
        self.pools = {} if pools is None else pools

    def _add(self, name, size, kind, parts):
        kind = TYPES[kind]
        n_bytes = int(np.prod(size[:-1], dtype=int)) * row_bytes(size[-1], kind)
        self.w.add_tensor_info(name, size, np.dtype(np.float32), n_bytes, raw_dtype=kind)
        self.made.append((n_bytes, parts))

    def plain(self, name, x):
        self.w.add_tensor_info(name, x.shape, x.dtype, x.nbytes)
        self.made.append((x.nbytes, lambda: [x.tobytes()]))

    def norm(self, name, value=1.0):
        self.plain(name, np.full(self.shape.n_embd, value, np.float32))

    def random(self, name, size, kind, scale):
        """Blocks of normal weights, from another place of the pool for each tensor."""
        start = sum(map(ord, name))
        self._add(name, size, kind, lambda: self._blocks(size, TYPES[kind], scale, start))

    def rows(self, name, size, kind, scale, at, x):
        """The same, but these rows are x's."""

        def parts():
            of = TYPES[kind]
            out = np.frombuffer(bytearray().join(self._blocks(size, of, scale, 7)), np.uint8)
            out = out.reshape(size[0], -1)
            out[at] = quantized(x, of)
            return [out]

        self._add(name, size, kind, parts)

    def dense(self, name, x, kind):
        self._add(name, x.shape, kind, lambda: [quantized(x, TYPES[kind])])

    def layer(self, i, n_in, kind, adds, given=None, wide=0.45):
        """adds, wide: how large what the layer adds is, and what else it computes. given: not random."""
        s = self.shape
        n, ff, kv = s.n_embd, s.n_ff, s.n_kv * s.d
        sizes = {"attn_q": (n, n_in), "attn_k": (kv, n_in), "attn_v": (kv, n_in), "attn_output": (n, n)}
        sizes |= {"ffn_gate": (ff, n), "ffn_up": (ff, n), "ffn_down": (n, ff)}
        for name, size in sizes.items():
            full = f"blk.{i}.{name}.weight"
            if given and name in given:
                self.dense(full, given[name], kind(name))
                continue
            scale = 0.25 * adds if name in ("attn_output", "ffn_down") else wide
            self.random(full, size, kind(name), scale * size[1] ** -0.5)
        self.norm(f"blk.{i}.attn_norm.weight")
        self.norm(f"blk.{i}.ffn_norm.weight")

    def _blocks(self, size, kind, scale, start):
        """Bytes of a random tensor, in pieces of a pool that it shares with others."""
        row = row_bytes(size[-1], kind)
        left = int(np.prod(size[:-1], dtype=int)) * row
        pool = self._pool(kind, scale)
        block = gguf.GGML_QUANT_SIZES[kind][1]
        at = start * 997 * block % len(pool)
        while left:
            part = pool[at : at + left]
            yield part
            left, at = left - len(part), 0

    def _pool(self, kind, scale):
        key = kind, round(scale, 9)
        if key not in self.pools:
            s = self.shape
            n = max(1 << 18, min(1 << 24, s.n_layer * s.n_embd * s.n_ff)) // 4096 * 4096
            x = np.empty((n // 4096, 4096), np.float32)
            rng = lambda i: np.random.default_rng([self.seed, 3, i])
            in_parallel(lambda i: rng(i).standard_normal(out=x[i], dtype=np.float32), range(len(x)))
            x *= scale
            self.pools[key] = memoryview(quantized(x, kind).reshape(-1))
        return self.pools[key]

    def write(self):
        w = self.w
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_ti_data_to_file()
        [out] = w.fout
        w.write_padding(out, out.tell())
        for n_bytes, parts in self.made:
            for part in parts():
                out.write(part)
            w.write_padding(out, n_bytes)
        w.close()


def row_bytes(n, kind):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    assert n % block == 0, f"rows of {n} numbers have no whole blocks of {kind.name}"
    return n // block * size


def quantized(x, kind):
    """(rows, bytes of a row): x in ggml's own quantisation, which has all formats, on all cores."""
    rows, n = x.shape
    out = np.empty((rows, row_bytes(n, kind)), np.uint8)
    x = np.ascontiguousarray(x, np.float32)
    quantize = _ggml().ggml_quantize_chunk

    def part(first):
        some = x[first : first + 256]
        quantize(int(kind), some.ctypes.data, out[first:].ctypes.data, 0, len(some), n, None)

    in_parallel(part, range(0, rows, 256))
    return out


@functools.cache
def _ggml():
    from eagle3_llama.runtime import hook, library

    ggml = ctypes.CDLL(str(library.find_lib_dir() / f"libggml-base{hook.SUFFIX}"))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    ggml.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    return ggml


def in_parallel(function, arguments):
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        list(threads.map(function, arguments))
