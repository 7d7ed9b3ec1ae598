"""A tiny llama with a fixed text: each token follows from the previous one alone, on every machine.

llama-cpp-python's tests hold a model to exact tokens and an exact text; this one meets them, so that they run
to their end.
"""

import re

import gguf
import numpy as np
import tiny_models
from tiny_models import N_EMBD, N_LAYER

N_VOCAB = 9500
SPECIAL = {1: ("<s>", 3), 2: ("</s>", 3), 3: ("<unk>", 2)}  # id: (text, type)
AT = {"!": 0, ",": 11, " world": 1814, "Hello": 9419}  # where the tests expect them
READS = (
    "The quick brown fox jumps over the lazy dog. The Pick a number from 1 to 10?:\n"
    "The capital of france is paris, 'true' or 'false' par"
)
WORDS = ["true", "false", "rot", *"0123456789", *dict.fromkeys(re.findall(r" ?\w+|\W", READS))]
RULES = {
    " fox": " jumps",
    " jumps": " over",
    " over": " the",
    " the": " lazy",
    " lazy": " dog",
    " dog": ".",
    "\n": "true",
}


def _vocabulary():
    """Texts and types: words are found as they stand (user-defined), whatever is around them."""
    tokens, types = [f"<unused {i}>" for i in range(N_VOCAB)], [1] * N_VOCAB
    at = {**{word: 20 + i for i, word in enumerate(w for w in WORDS if w not in AT)}, **AT}
    bytes_ = {f"<0x{i:02X}>": 3000 + i for i in range(256)}
    for i, (text, kind) in {
        **SPECIAL,
        **{i: (w, 4) for w, i in at.items()},
        **{i: (b, 6) for b, i in bytes_.items()},
    }.items():
        tokens[i], types[i] = text, kind
    return tokens, types


def actor(path):
    """Blocks add nothing; an embedding is a one, and a second one in the place of its token's rule."""
    tokens, types = _vocabulary()
    w = gguf.GGUFWriter(path, "llama")
    tiny_models._common(w, N_LAYER, vocabulary=(tokens, types))
    w.add_add_bos_token(False)
    w.add_add_space_prefix(False)
    embedding, output = np.zeros((2, N_VOCAB, N_EMBD), np.float32)
    embedding[:, 0], output[:, 0] = 1, 0.5  # every logit is above zero
    output[[tokens.index(d) for d in "0123456789"], 0] += 0.01 * np.arange(
        10, dtype=np.float32
    )  # no ties, whose order nobody promises
    for i, (last, following) in enumerate(RULES.items(), 1):
        embedding[tokens.index(last), i], output[tokens.index(following), i] = 1, 4
    for name, x in (
        ("token_embd", embedding),
        ("output", output),
        ("output_norm", np.ones(N_EMBD, np.float32)),
    ):
        w.add_tensor(f"{name}.weight", x)
    for i in range(N_LAYER):
        tiny_models._layer(w, i, np.random.default_rng(i), N_EMBD, gguf.GGMLQuantizationType.F32, adds=0.0)
    tiny_models._finish(w)
    return path
