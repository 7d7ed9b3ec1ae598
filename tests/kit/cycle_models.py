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

import functools
from typing import NamedTuple

import gguf
import numpy as np
from weights import BASE, Shape, Tensors, in_parallel, kind_of, metadata, tokenizer

CONSTANT = 8.0  # coordinate 0 of an embedding

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


def _llama(path, shape, seed, names=None):
    """The tensors of a llama whose metadata, tokenizer and last norm are there. names: {id: another text}."""
    w = gguf.GGUFWriter(path, "llama")
    metadata(w, shape, shape.n_layer)
    w.add_rope_freq_base(BASE)
    tokenizer(w, shape.n_vocab, names)
    tensors = Tensors(w, shape, seed)
    tensors.norm("output_norm.weight")
    return tensors


def target(path, shape, kind="F16", seed=0):
    """Writes it. kind: a GGML type, or Q4_K_M with its mixture."""
    ids, following = cycle(shape, seed)
    code = codes(shape, seed)
    tensors = _llama(path, shape, seed)
    embedding = code.copy()
    embedding[:, 0] = CONSTANT
    size = (shape.n_vocab, shape.n_embd)
    tensors.rows("token_embd.weight", size, kind_of(kind, "token_embd"), 1.0, ids, embedding)
    code *= 4 / np.sqrt(shape.n_embd)
    root = shape.n_embd**-0.5
    tensors.rows("output.weight", size, kind_of(kind, "output"), root, ids[following], code)
    few = (4 / shape.n_layer) ** 0.5  # however many layers there are, they add little in all
    for i in range(shape.n_layer):
        more = i < shape.n_layer // 8 or i >= 7 * shape.n_layer // 8 or i % 3 == 2
        tensors.layer(i, shape.n_embd, lambda name, more=more: kind_of(kind, name, more), few)
    tensors.write()
    return path


def random_target(path, shape, kind="F16", seed=0):
    """Writes a llama whose logits depend on all of its text: for positions, masks and attention."""
    tensors = _llama(path, shape, seed)
    size = (shape.n_vocab, shape.n_embd)
    tensors.random("token_embd.weight", size, kind_of(kind, "token_embd"), 1.0)
    tensors.random("output.weight", size, kind_of(kind, "output"), shape.n_embd**-0.5)
    for i in range(shape.n_layer):
        tensors.layer(i, shape.n_embd, lambda name: kind_of(kind, name), adds=4.0, wide=1.5)
    tensors.write()
    return path


def head(path, shape, p, kind="F16", seed=0, second=0.6, known=None):
    """Writes it. second: how often its second choice is right where its first is not.

    known: (ids, following, codes) of another target than target()'s.
    """
    ids, following, code = known or (*cycle(shape, seed), codes(shape, seed))
    rng = np.random.default_rng([seed, 1])
    w = gguf.GGUFWriter(path, "eagle3")
    metadata(w, shape, 1)
    w.add_rope_freq_base(BASE)
    n = shape.n_layer
    w.add_array("eagle3.target_layers", [min(2, n - 1) if n > 4 else 1, n // 2, n - 1])
    w.add_uint32("eagle3.target_hidden_size", shape.n_embd)
    w.add_bool("eagle3.norm_before_residual", True)
    tokenizer(w, shape.n_vocab)
    tensors = Tensors(w, shape, seed)
    tensors.norm("output_norm.weight")
    tensors.norm("blk.0.attn_norm_2.weight", 1e-3)  # features hardly count
    tensors.random("fc.weight", (shape.n_embd, 3 * shape.n_embd), kind, 0.45 * shape.n_embd**-0.5)
    tensors.layer(0, 2 * shape.n_embd, lambda name: kind, 0.2, _attention(shape))
    tensors.dense("output.weight", _guesses(shape, code, following, rng, p, second), kind)
    tensors.plain("d2t", ids.astype(np.int64))
    tensors.write()
    return path


def codes(shape, seed):
    """(n_draft, n_embd): embeddings of the cycle's tokens, of one length, with 0 in the first column."""
    code = np.empty((shape.n_draft, shape.n_embd), np.float32)

    def fill(first):
        part = code[first : first + 512]
        np.random.default_rng([seed, 2, first]).standard_normal(out=part, dtype=np.float32)
        part[:, 0] = 0
        part *= np.sqrt((shape.n_embd - 1) / np.square(part).sum(1, keepdims=True))

    in_parallel(fill, range(0, shape.n_draft, 512))
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
