"""Changes to the sampler chains of llama-cpp-python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..runtime.binding import llama_cpp

from llama_cpp import LlamaGrammar
from llama_cpp._internals import LlamaSampler


class LazyGrammar(LlamaGrammar):  # type: ignore[misc]
    """A grammar that begins where the text matches a pattern, at its first group. Before, any token may come.

    patterns: regular expressions, as llama_sampler_init_grammar_lazy_patterns takes them.
    """

    def __init__(self, text: str, patterns: Sequence[str]) -> None:
        super().__init__(_grammar=text)
        self.patterns = list(patterns)


def with_lazy_grammar(chain: Any, model: Any, grammar: LazyGrammar) -> Any:
    """Inserts a lazy grammar into a LlamaSampler where llama-cpp-python puts others, and closes `chain`."""
    place = len(chain.custom_samplers) + 1  # behind the logits processors and the penalties
    add = lambda out: out.add_grammar_lazy_patterns(model, grammar, grammar.patterns, [])
    return _with(chain, place, add)


def with_bias(chain: Any, bias: Mapping[int, float], n_vocab: int) -> Any:
    """Inserts llama.cpp's logit bias after the logits processors of a LlamaSampler, and closes `chain`.

    llama-cpp-python adds a bias in Python instead, and copies a row of n_vocab logits for each token.
    """
    # llama-cpp-python puts the processors first
    biases = {int(token): float(value) for token, value in bias.items()}
    return _with(chain, len(chain.custom_samplers), lambda out: out.add_logit_bias(n_vocab, biases))


def _with(chain: Any, place: int, add: Callable[[Any], None]) -> Any:
    out = LlamaSampler()
    for i in range(llama_cpp.llama_sampler_chain_n(chain.sampler)):
        if i == place:
            add(out)
        llama_cpp.llama_sampler_chain_add(out.sampler, llama_cpp.llama_sampler_chain_remove(chain.sampler, 0))
    out.custom_samplers, chain.custom_samplers = chain.custom_samplers, []  # at the same places
    chain.close()
    return out
