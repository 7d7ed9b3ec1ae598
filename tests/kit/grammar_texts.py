"""All texts that a grammar allows, for a model with a token for each byte: see tiny_models.py."""

import ctypes
import functools
import math

import numpy as np

from eagle3_llama.runtime.binding import llama_cpp

END = 2  # the token that ends a text


def _token(byte):
    return 3 + byte


@functools.cache
def _buffer(n):
    """Memory for n candidates, and their rows as an array. It is made once: millions of places are tried."""
    data = (llama_cpp.llama_token_data * n)()
    view = np.frombuffer(data, dtype=np.dtype([("id", "i4"), ("logit", "f4"), ("p", "f4")]))
    return data, view


def let_through(sampler, tokens):
    """Those of these tokens that a sampler lets through."""
    data, view = _buffer(len(tokens))
    view["id"], view["logit"] = tokens, 0
    array = llama_cpp.llama_token_data_array(data=data, size=len(tokens), selected=-1, sorted=False)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
    left = view[: array.size]
    return left["id"][left["logit"] > -math.inf].tolist()


class Walk:
    """A place in a grammar: after some text. Free it with close()."""

    def __init__(self, sampler):
        self._sampler = sampler

    def close(self):
        llama_cpp.llama_sampler_free(self._sampler)

    def allowed(self, tokens):
        """Those of these tokens that may follow."""
        return let_through(self._sampler, tokens)

    def behind(self, text):
        """The place behind a text; None if the grammar does not allow it. This place stays."""
        tokens = [_token(byte) for byte in text.encode()]
        if tokens and not self.allowed(tokens[:1]):
            return None  # most end here, and a clone takes long
        walk = Walk(llama_cpp.llama_sampler_clone(self._sampler))
        for token in tokens:
            if not walk.allowed([token]):
                walk.close()
                return None
            llama_cpp.llama_sampler_accept(walk._sampler, token)
        return walk

    def takes(self, text, ends=False):
        """True if a text may follow. ends: and nothing behind it."""
        walk = self.behind(text)
        if walk is None:
            return False
        fine = not ends or bool(walk.allowed([END]))
        walk.close()
        return fine


def texts(grammars, grammar, alphabet, longest, begun="", close=""):
    """All texts of a grammar up to a length, of the characters of the alphabet.

    begun, close: what stands before and behind them.
    """
    start = Walk(grammars._sampler(grammar))
    left = [("", start.behind(begun))]
    start.close()
    assert left[0][1] is not None, begun
    found = set()
    while left:
        text, walk = left.pop()
        if walk.takes(close, ends=True):
            found.add(text)
        if len(text) < longest:
            more = ((text + c, walk.behind(c)) for c in alphabet)
            left += [(t, w) for t, w in more if w is not None]
        walk.close()
    return found
