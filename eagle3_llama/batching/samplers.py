"""Changes to the sampler chains of llama-cpp-python."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..runtime import library
from ..runtime.binding import address, llama_cpp

from llama_cpp import LlamaGrammar
from llama_cpp._internals import LlamaSampler


class LazyGrammar(LlamaGrammar):  # type: ignore[misc]
    """A grammar that begins where the text matches a pattern, at its first group. Before, any token may come.

    patterns: regular expressions, as llama_sampler_init_grammar_lazy_patterns takes them.
    """

    def __init__(self, text: str, patterns: Sequence[str]) -> None:
        super().__init__(_grammar=text)
        self.patterns = list(patterns)


@dataclasses.dataclass(frozen=True)
class Thoughts:
    """Thoughts that a model writes between tags before its answer.

    start, ends: the tags before and behind them. inside: the prompt ends within thoughts. budget: most tokens
    of them, None for any number. closing: the tokens that follow then.
    """

    start: str
    ends: tuple[str, ...]
    inside: bool = False
    budget: int | None = None
    closing: tuple[int, ...] = ()


def with_grammar(chain: Any, model: Any, grammar: LazyGrammar | None, thoughts: Thoughts | None) -> Any:
    """Inserts them into a LlamaSampler where llama-cpp-python puts a grammar, and closes `chain`.

    The grammar sees nothing of the thoughts, where these are given.
    """
    place = len(chain.custom_samplers) + 1  # behind the logits processors and the penalties

    def add(out: Any) -> None:
        if grammar is not None:
            out.add_grammar_lazy_patterns(model, grammar, grammar.patterns, [])
        if thoughts is not None:
            held = None
            if grammar is not None:
                last = llama_cpp.llama_sampler_chain_n(out.sampler) - 1
                held = llama_cpp.llama_sampler_chain_remove(out.sampler, last)
            llama_cpp.llama_sampler_chain_add(out.sampler, _thoughts(model, thoughts, held))

    return _with(chain, place, add)


def _thoughts(model: Any, thoughts: Thoughts, grammar: Any) -> Any:
    """libeagle3's sampler for them, as llama_cpp's pointer. It takes the grammar, a pointer or None."""
    ffi, lib = library.load()
    tags = [ffi.new("char[]", tag.encode()) for tag in thoughts.ends]
    closing = ffi.new("int32_t[]", list(thoughts.closing))
    out = ffi.new("struct llama_sampler **")
    code = lib.eagle3_thoughts(
        ffi.cast("struct llama_vocab *", address(model.vocab)),
        thoughts.start.encode(),
        ffi.new("char *[]", tags),
        len(tags),
        int(thoughts.inside),
        -1 if thoughts.budget is None else thoughts.budget,
        closing,
        len(thoughts.closing),
        ffi.cast("struct llama_sampler *", address(grammar) if grammar else 0),
        out,
    )
    if code < 0 and grammar:
        llama_cpp.llama_sampler_free(grammar)
    library.checked(code)
    return ctypes.cast(int(ffi.cast("uintptr_t", out[0])), ctypes.POINTER(llama_cpp.llama_sampler))


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
