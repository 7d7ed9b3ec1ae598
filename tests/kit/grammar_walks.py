"""Random walks through grammars, character by character, and what answers of a template begin with."""

import ctypes
import json
import random
import re

import pytest
from grammar_texts import let_through

from eagle3_llama.models import smollm2


class Characters:
    """Walks through a grammar, character by character: the tokens that are one byte each."""

    def __init__(self):
        import llama_cpp

        self.llama = llama_cpp
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self.model = llama_cpp.llama_model_load_from_file(str(smollm2("Q8_0")).encode(), params)
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.of = {}
        buffer = ctypes.create_string_buffer(16)
        for i in range(llama_cpp.llama_vocab_n_tokens(self.vocab)):
            n = llama_cpp.llama_token_to_piece(self.vocab, i, buffer, 16, 0, False)
            if n == 1 and (buffer.raw[0] > 127 or chr(buffer.raw[0]).isprintable() or buffer.raw[0] == 10):
                self.of.setdefault(buffer.raw[0], i)
        self.byte = {token: byte for byte, token in self.of.items()}
        self.end = llama_cpp.llama_vocab_eos(self.vocab)

    def walk(self, grammar, begun, seed, written=""):
        """A text of this grammar that begins with `begun`, or `begun` and `written`. Ends where it may."""
        llama, rng = self.llama, random.Random(seed)
        sampler = llama.llama_sampler_init_grammar(self.vocab, grammar.encode(), b"root")
        assert sampler
        ids = [*self.byte, self.end]
        out, literals = begun.encode(), literals_of(grammar)
        for byte in out:
            llama.llama_sampler_accept(sampler, self.of[byte])
        for _ in range(4000):
            open_ = let_through(sampler, ids)
            assert open_, out
            if self.end in open_ and (not written or out.decode() == begun + written):
                break
            allowed = {self.byte[t] for t in open_ if t != self.end}
            if written:
                goes_on = written[len(out) - len(begun.encode()) :].encode()
                assert goes_on and goes_on[0] in allowed, (out, goes_on)
                allowed = {goes_on[0]}
            wanted = [ways & allowed for ways in likely(out, literals) if ways & allowed]
            token = self.of[rng.choice(sorted(wanted[0] if rng.random() < 0.95 else set().union(*wanted)))]
            llama.llama_sampler_accept(sampler, token)
            out += bytes([self.byte[token]])
        else:
            pytest.fail(f"a walk without an end: {out[-200:]!r}")
        llama.llama_sampler_free(sampler)
        return out.decode()


def literals_of(grammar):
    """The texts between quotes in a grammar, as bytes."""
    words = re.compile(r'\[(?:[^\]\\]|\\.)*\]|"((?:[^"\\]|\\.)+)"')  # those in [] are characters
    found = [text for line in grammar.splitlines() for text in words.findall(line) if text]
    return {json.loads(f'"{text}"').encode() for text in found}


def likely(text, literals):
    """Bytes that may come next, the best first: they end what is open, without blanks, so that walks end."""
    longest = max((n for w in literals for n in range(1, len(w)) if text.endswith(w[:n])), default=0)
    begun = {w[longest] for w in literals if longest and len(w) > longest and text.endswith(w[:longest])}
    letters = {b for b in range(128) if chr(b).isalnum()}
    first = {w[0] for w in literals if len(w) > 1} | set(b'"}])>')
    return begun, first, letters, set(range(33, 256)), {10, 32}


def begun(made, thinking):
    """What an answer begins with: thoughts, where the prompt has begun them or `thinking` says so."""
    tags = made["thinking"]
    if tags is None:
        return ""
    prompt, start, end = made["generation_prompt"], tags["start"].strip(), tags["ends"][0].strip()
    at = prompt.rfind(start)
    if at < 0:
        apart = prompt if "<|channel|>analysis" in start else ""
        return f"{start}A coat.{end}{apart}" if thinking else ""
    return "" if end in prompt[at + len(start) :] else f"A coat.{end}"
