"""A small model that drafts for a cycle target, right with a chosen chance a token.

    cycle_models.target("big.gguf", BIG, "Q8_0")
    small("small.gguf", BIG, SMALL, p=0.7)     # returns the share of tokens behind which it is right

The pair shares a vocabulary; widths, layers and heads differ. What the small one says follows from the last
token alone: row g(x) of its output matrix is x's embedding there. g is the target's f, but for a share 1 - p
of the tokens, whose successors are exchanged among each other, so that no token is named twice.
"""

import cycle_models
import numpy as np
from weights import Shape, kind_of

BIG = Shape(256, 4, 2, 4, 512, 2048, 512)
SMALL = Shape(128, 4, 2, 2, 256, 2048, 512)


def small(path, big, shape, p, kind="Q8_0", seed=0, more=0, names=None):
    """Writes it. seed: the target's. more: further tokens of its vocabulary. names: {id: another text}."""
    ids, following = cycle_models.cycle(big, seed)
    rng = np.random.default_rng([seed, 11])
    wrong = np.flatnonzero(rng.random(len(ids)) > p)
    named = following.copy()
    named[wrong] = following[np.roll(wrong, 1)]
    code = cycle_models.codes(shape, seed + 1)
    shape = shape._replace(n_vocab=shape.n_vocab + more)
    tensors = cycle_models._llama(path, shape, seed + 1, names)
    embedding = code.copy()
    embedding[:, 0] = cycle_models.CONSTANT
    size = (shape.n_vocab, shape.n_embd)
    tensors.rows("token_embd.weight", size, kind_of(kind, "token_embd"), 1.0, ids, embedding)
    out = np.empty_like(code)
    out[named] = code * 4 / np.sqrt(shape.n_embd)
    tensors.rows("output.weight", size, kind_of(kind, "output"), shape.n_embd**-0.5, ids, out)
    few = (4 / shape.n_layer) ** 0.5
    for i in range(shape.n_layer):
        tensors.layer(i, shape.n_embd, lambda name: kind_of(kind, name), few)
    tensors.write()
    return 1 - len(wrong) / len(ids)
