"""Token probabilities after the stateless samplers: top-k, typical, top-p, min-p and temperature.

`post_sampling_probs` of llama.cpp's server.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..runtime.binding import llama_cpp
from .logprobs import TopRow, likeliest

from llama_cpp._internals import LlamaSampler

_TOKEN = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data


class Candidates:
    """The samplers of a request, without the draw, and without penalties, grammar and mirostat.

    sampling: arguments of Llama.generate. bias: token -> what is added to its logit. For one thread.
    """

    def __init__(self, sampling: Mapping[str, Any], bias: Mapping[int, float]) -> None:
        self._ids, self._added = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)
        self._data, self._all = np.empty(0, _TOKEN), np.empty(0, np.int32)  # kept: new pages take long
        self._chain = LlamaSampler()
        self._greedy = sampling["temp"] == 0
        if not self._greedy:
            self._chain.add_top_k(sampling["top_k"])
            self._chain.add_typical(sampling["typical_p"], 1)
            self._chain.add_top_p(sampling["top_p"], 1)
            self._chain.add_min_p(sampling["min_p"], 1)
            self._chain.add_temp(sampling["temp"])

    def close(self) -> None:
        self._chain.close()

    def row(self, logits: np.ndarray, token: int, n: int) -> TopRow:
        """The n likeliest of what is left of logits, float32 [n_vocab], with logs of their probabilities."""
        if self._greedy:
            return TopRow(token, 0.0, np.array([token], np.int32)[:n], np.zeros(1, np.float32)[:n])
        if len(self._data) != len(logits):
            self._data, self._all = np.empty(len(logits), _TOKEN), np.arange(len(logits), dtype=np.int32)
        data = self._data
        data["id"], data["logit"], data["p"] = self._all, logits, 0
        if len(self._ids):
            np.add.at(data["logit"], self._ids, self._added)
        left = self._left(data)  # nothing below sorts it: it may be the whole vocabulary, for each token
        ids, values = left["id"].copy(), left["logit"].copy()
        values -= values.max()
        total = np.log(np.exp(values).sum(dtype=np.float64))
        own = np.flatnonzero(ids == token)
        order = likeliest(values, ids, n)
        tops = values[order] - total
        ids, tops = ids[order][np.exp(tops) > 0], tops[np.exp(tops) > 0]
        value = float(values[own[0]] - total) if len(own) else -np.inf
        return TopRow(token, value, ids, tops.astype(np.float32))

    def _left(self, data: np.ndarray) -> np.ndarray:
        """The tokens that the samplers leave, with their logits, in any order. Writes to data."""
        pointer = data.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
        tokens = llama_cpp.llama_token_data_array(data=pointer, size=len(data), selected=-1, sorted=False)
        llama_cpp.llama_sampler_apply(self._chain.sampler, ctypes.byref(tokens))
        return data[: tokens.size]  # samplers sort and cut in place
