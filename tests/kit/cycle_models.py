"""A llama whose greedy text is a known cycle, and an EAGLE-3 head that is right with probability p.

No rounding reaches the margins of its logits, so another text is a fault, on any device; and speed at a
chosen acceptance rate needs no trained head. Attention changes nothing there: random models test that.

    shape = SHAPES["tiny"]
    target("t.gguf", shape, "Q4_0"), head("h.gguf", shape, p=0.8)
    cycle(shape).text(100)                     # the greedy text from its first token on

An 8B of 4.9 GB takes seconds on 16 cores: the tokens of the draft vocabulary alone have rows of their own,
and everything else repeats blocks of random weights.

Target: coordinate 0 of a token's embedding is 8, the others are normal, and all have one length. Layers add
little. Row f(x) of the output matrix is x's embedding without coordinate 0, and f is one cycle over the draft
vocabulary. Head: q and k are large in the fastest pairs of RoPE, so a row attends to itself; v copies as many
coordinates of the embedding as it has; row f(x) of its output matrix has these coordinates of x, exchanged
among a share 1 - p of the tokens.
"""

import ctypes
import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import gguf
import numpy as np

TYPES = gguf.GGMLQuantizationType
CONSTANT = 8.0  # coordinate 0 of an embedding
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


SHAPES = {
    "tiny": Shape(256, 4, 2, 4, 512, 2048, 512),
    "small": Shape(1024, 16, 4, 8, 2816, 32000, 8192),
    "1B": Shape(2048, 32, 8, 16, 8192, 128256, 32000),
    "8B": Shape(4096, 32, 8, 32, 14336, 128256, 32000),
}


class Cycle(NamedTuple):
    """ids: the draft vocabulary, ascending. following: the index of the token that follows each of them."""

    ids: np.ndarray
    following: np.ndarray

    def text(self, n, start=0):
        """n tokens of the cycle, from its token number `start` on."""
        order, at = [], 0
        for _ in range(len(self.ids)):
            order.append(int(self.ids[at]))
            at = self.following[at]
        return [order[(start + i) % len(order)] for i in range(n)]


@functools.cache
def cycle(shape, seed=0):
    """Without special tokens and bytes."""
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.choice(np.arange(300, shape.n_vocab), shape.n_draft, replace=False))
    order = rng.permutation(shape.n_draft)
    following = np.empty(shape.n_draft, int)
    following[order] = np.roll(order, -1)
    return Cycle(ids, following)


def _llama(path, shape, seed):
    """The tensors of a llama whose metadata, tokenizer and last norm are there."""
    w = gguf.GGUFWriter(path, "llama")
    _metadata(w, shape, shape.n_layer)
    w.add_rope_freq_base(BASE)
    _tokenizer(w, shape.n_vocab)
    tensors = _Tensors(w, shape, seed)
    tensors.norm("output_norm.weight")
    return tensors


def target(path, shape, kind="F16", seed=0):
    """Writes it. kind: a GGML type, or Q4_K_M with its mixture."""
    ids, following = cycle(shape, seed)
    code = _codes(shape, seed)
    tensors = _llama(path, shape, seed)
    embedding = code.copy()
    embedding[:, 0] = CONSTANT
    size = (shape.n_vocab, shape.n_embd)
    tensors.rows("token_embd.weight", size, _kind(kind, "token_embd"), 1.0, ids, embedding)
    code *= 4 / np.sqrt(shape.n_embd)
    root = shape.n_embd**-0.5
    tensors.rows("output.weight", size, _kind(kind, "output"), root, ids[following], code)
    few = (4 / shape.n_layer) ** 0.5  # however many layers there are, they add little in all
    for i in range(shape.n_layer):
        more = i < shape.n_layer // 8 or i >= 7 * shape.n_layer // 8 or i % 3 == 2
        tensors.layer(i, shape.n_embd, lambda name, more=more: _kind(kind, name, more), few)
    tensors.write()
    return path


def random_target(path, shape, kind="F16", seed=0):
    """Writes a llama whose logits depend on all of its text: for positions, masks and attention."""
    tensors = _llama(path, shape, seed)
    size = (shape.n_vocab, shape.n_embd)
    tensors.random("token_embd.weight", size, _kind(kind, "token_embd"), 1.0)
    tensors.random("output.weight", size, _kind(kind, "output"), shape.n_embd**-0.5)
    for i in range(shape.n_layer):
        tensors.layer(i, shape.n_embd, lambda name: _kind(kind, name), adds=4.0, wide=1.5)
    tensors.write()
    return path


def head(path, shape, p, kind="F16", seed=0, second=0.6):
    """Writes it. second: how often its second choice is right where its first is not."""
    ids, following = cycle(shape, seed)
    rng = np.random.default_rng([seed, 1])
    w = gguf.GGUFWriter(path, "eagle3")
    _metadata(w, shape, 1)
    w.add_rope_freq_base(BASE)
    n = shape.n_layer
    w.add_array("eagle3.target_layers", [min(2, n - 1) if n > 4 else 1, n // 2, n - 1])
    w.add_uint32("eagle3.target_hidden_size", shape.n_embd)
    w.add_bool("eagle3.norm_before_residual", True)
    _tokenizer(w, shape.n_vocab)
    tensors = _Tensors(w, shape, seed)
    tensors.norm("output_norm.weight")
    tensors.norm("blk.0.attn_norm_2.weight", 1e-3)  # features hardly count
    tensors.random("fc.weight", (shape.n_embd, 3 * shape.n_embd), kind, 0.45 * shape.n_embd**-0.5)
    tensors.layer(0, 2 * shape.n_embd, lambda name: kind, 0.2, _attention(shape))
    tensors.dense("output.weight", _guesses(shape, _codes(shape, seed), following, rng, p, second), kind)
    tensors.plain("d2t", ids.astype(np.int64))
    tensors.write()
    return path


def _kind(kind, name, more=False):
    """A tensor's type in a file of this kind, as llama-quantize would choose it."""
    if name == "output" and kind in ("Q4_0", "Q4_K", "Q4_K_M"):
        return "Q6_K"
    if kind != "Q4_K_M":
        return kind
    return "Q6_K" if more and name in ("attn_v", "ffn_down") else "Q4_K"


def _codes(shape, seed):
    """(n_draft, n_embd): embeddings of the cycle's tokens, of one length, with 0 in the first column."""
    code = np.empty((shape.n_draft, shape.n_embd), np.float32)

    def fill(first):
        part = code[first : first + 512]
        np.random.default_rng([seed, 2, first]).standard_normal(out=part, dtype=np.float32)
        part[:, 0] = 0
        part *= np.sqrt((shape.n_embd - 1) / np.square(part).sum(1, keepdims=True))

    _in_parallel(fill, range(0, shape.n_draft, 512))
    return code


def _guesses(shape, code, following, rng, p, second):
    """(n_draft, n_embd): the head's output matrix. It reads what v copies of the embedding, and no more."""
    copied = shape.n_kv * shape.d
    code[:, copied + 1 :] = 0
    wrong = np.flatnonzero(rng.random(shape.n_draft) > p)
    named = np.arange(shape.n_draft)
    named[wrong] = np.roll(wrong, 1)
    out = np.empty_like(code)
    out[following] = code[named]
    told = wrong[rng.random(len(wrong)) < second]
    out[following[told]] += 0.7 * code[told]
    out *= 3 / np.sqrt(copied)
    return out


def _attention(shape):
    """{name: matrix}: a row attends to itself and copies coordinates 1 to n_kv * d of its embedding."""
    n, d, copied = shape.n_embd, shape.d, shape.n_kv * shape.d
    first = CONSTANT / np.sqrt((CONSTANT**2 + n - 1) / n)  # coordinate 0 behind the norm
    fast = lambda rows: np.arange(rows) % d < 16  # the 8 fastest pairs
    q, k, v = (np.zeros((rows, 2 * n), np.float32) for rows in (n, copied, copied))
    q[fast(n), 0] = k[fast(copied), 0] = 9.0 / first
    v[np.arange(copied), 1 + np.arange(copied)] = 1
    o = np.zeros((n, n), np.float32)
    group = shape.n_head // shape.n_kv
    for i in range(shape.n_head):
        at = np.arange(d)
        o[1 + i // group * d + at, i * d + at] = 1 / group
    return {"attn_q": q, "attn_k": k, "attn_v": v, "attn_output": o}


def _metadata(w, shape, n_layer):
    w.add_block_count(n_layer)
    w.add_context_length(shape.n_ctx)
    w.add_embedding_length(shape.n_embd)
    w.add_feed_forward_length(shape.n_ff)
    w.add_head_count(shape.n_head)
    w.add_head_count_kv(shape.n_kv)
    w.add_layer_norm_rms_eps(EPS)
    w.add_rope_dimension_count(shape.d)


def _tokenizer(w, n_vocab):
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
    tokens += [f"t{i}" for i in range(len(tokens), n_vocab)]
    w.add_tokenizer_model("llama")
    w.add_token_list(tokens)
    w.add_token_scores([-float(i) for i in range(n_vocab)])
    w.add_token_types([2, 3, 3] + [6] * 256 + [1] * (n_vocab - 259))
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)


class _Tensors:
    """What is written behind the metadata: named now, computed when its turn comes."""

    def __init__(self, w, shape, seed):
        self.w, self.shape, self.seed, self.made = w, shape, seed, []
        self.pools = {}

    def _add(self, name, size, kind, parts):
        kind = TYPES[kind]
        n_bytes = int(np.prod(size[:-1], dtype=int)) * _row_bytes(size[-1], kind)
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
        row = _row_bytes(size[-1], kind)
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
            _in_parallel(lambda i: rng(i).standard_normal(out=x[i], dtype=np.float32), range(len(x)))
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


def _row_bytes(n, kind):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    assert n % block == 0, f"rows of {n} numbers have no whole blocks of {kind.name}"
    return n // block * size


def quantized(x, kind):
    """(rows, bytes of a row): x in ggml's own quantisation, which has all formats, on all cores."""
    rows, n = x.shape
    out = np.empty((rows, _row_bytes(n, kind)), np.uint8)
    x = np.ascontiguousarray(x, np.float32)
    quantize = _ggml().ggml_quantize_chunk

    def part(first):
        some = x[first : first + 256]
        quantize(int(kind), some.ctypes.data, out[first:].ctypes.data, 0, len(some), n, None)

    _in_parallel(part, range(0, rows, 256))
    return out


@functools.cache
def _ggml():
    from eagle3_llama.runtime import hook, library

    ggml = ctypes.CDLL(str(library.find_lib_dir() / f"libggml-base{hook.SUFFIX}"))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    ggml.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    return ggml


def _in_parallel(function, arguments):
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        list(threads.map(function, arguments))
