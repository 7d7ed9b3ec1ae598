"""Grammars with many choices work, and what fails in a C function is an error, not the end of the process."""

import json
import sys

import pytest
from commands import run

# in a process of its own: an exception that leaves a C function ends it
CHOICES = """
import sys, json
from eagle3_llama import EagleLlama
from llama_cpp import LlamaGrammar
path, n, nested = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "nested"
words = " | ".join(json.dumps(f"b{i} ") for i in range(n))
text = f'root ::= "b" ( {words} )+' if nested else f"root ::= {words}"
llm = EagleLlama(path, n_ctx=128, n_threads=1, verbose=False)
answer = llm.create_completion("b1 b2", max_tokens=4, temperature=0.0, grammar=LlamaGrammar.from_string(text))
print(json.dumps(answer["choices"][0]["text"]))
"""
NO_TOKEN = """
import sys
from eagle3_llama import EagleLlama
import llama_cpp
llm = EagleLlama(sys.argv[1], n_ctx=64, n_threads=1, verbose=False)
vocab = llama_cpp.llama_model_get_vocab(llm._model.model)
for token in (-1, 1 << 30):
    assert not llama_cpp.llama_vocab_is_control(vocab, token)
    assert llama_cpp.llama_vocab_get_attr(vocab, token) == 0
    assert not llama_cpp.llama_vocab_get_text(vocab, token)
print("ok")
"""


@pytest.mark.parametrize("where", ["root", "nested"])
@pytest.mark.parametrize("n", [600, 5000])
def test_many_choices(files, n, where):
    text = json.loads(run([sys.executable, "-c", CHOICES, files[0], n, where]).stdout.splitlines()[-1])
    assert text.startswith("b")


def test_a_token_that_is_not_in_the_vocabulary(files):
    assert run([sys.executable, "-c", NO_TOKEN, files[0]]).stdout.splitlines()[-1] == "ok"
