"""Changes to the sampler chains of llama-cpp-python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..runtime.binding import llama_cpp

from llama_cpp._internals import LlamaSampler


def with_bias(chain: Any, bias: Mapping[int, float], n_vocab: int) -> Any:
    """Inserts llama.cpp's logit bias after the logits processors of a LlamaSampler, and closes `chain`.

    llama-cpp-python adds a bias in Python instead, and copies a row of n_vocab logits for each token.
    """
    out = LlamaSampler()
    n_processors = len(chain.custom_samplers)  # llama-cpp-python puts them first
    for i in range(llama_cpp.llama_sampler_chain_n(chain.sampler)):
        if i == n_processors:
            out.add_logit_bias(n_vocab, {int(token): float(value) for token, value in bias.items()})
        llama_cpp.llama_sampler_chain_add(out.sampler, llama_cpp.llama_sampler_chain_remove(chain.sampler, 0))
    out.custom_samplers, chain.custom_samplers = chain.custom_samplers, []  # at the same places
    chain.close()
    return out
