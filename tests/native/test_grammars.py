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

# blanks, then what may begin a grammar: whether a digit is allowed after it, and a blank
TRIGGERS = """
import ctypes, sys
from eagle3_llama import EagleLlama
import llama_cpp
llm = EagleLlama(sys.argv[1], n_ctx=64, n_threads=1, verbose=False)
vocab = llama_cpp.llama_model_get_vocab(llm._model.model)
patterns = (ctypes.c_char_p * 1)(sys.argv[2].encode())
sampler = llama_cpp.llama_sampler_init_grammar_lazy_patterns(
    vocab, b'root ::= "{" [0-9]+ "}"', b"root", patterns, 1, None, 0)
token_of = lambda byte: 3 + byte
for byte in (" " * int(sys.argv[3]) + sys.argv[4]).encode():
    llama_cpp.llama_sampler_accept(sampler, token_of(byte))
data = (llama_cpp.llama_token_data * 2)(*((token_of(byte), 1.0, 0.0) for byte in b"7 "))
array = llama_cpp.llama_token_data_array(data=data, size=2, selected=-1, sorted=False)
llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
print("".join("-+"[one.logit > 0] for one in data))
"""


@pytest.mark.parametrize("where", ["root", "nested"])
@pytest.mark.parametrize("n", [600, 5000])
def test_many_choices(files, n, where):
    text = json.loads(run([sys.executable, "-c", CHOICES, files[0], n, where]).stdout.splitlines()[-1])
    assert text.startswith("b")


def test_a_token_that_is_not_in_the_vocabulary(files):
    assert run([sys.executable, "-c", NO_TOKEN, files[0]]).stdout.splitlines()[-1] == "ok"


@pytest.mark.parametrize(
    "pattern, n, allowed",
    [
        (r"<call>(\{)", 3, "+-"),
        pytest.param(r"<call>(\{)", 100_000, "+-", marks=pytest.mark.thorough),
        (r"^\s*(\{)", 3, "+-"),
        (r"^\s*(\{)", 40_000, "++"),  # too far behind the text's beginning: the grammar does not begin
        pytest.param(r"^\s*(\{)", 100_000, "++", marks=pytest.mark.thorough),
    ],
)
def test_a_trigger_behind_a_long_text(files, pattern, n, allowed):
    """std::regex recurses with a match: 30,000 blanks ended the process."""
    end = "{" if pattern.startswith("^") else "<call>{"
    made = run([sys.executable, "-c", TRIGGERS, files[0], pattern, str(n), end])
    assert made.stdout.splitlines()[-1] == allowed


# of each text that a grammar takes, what it forces next and what the mask of the vocabulary allows
FORCED = """
import ctypes, json, sys
from eagle3_llama import EagleLlama
import llama_cpp
llm = EagleLlama(sys.argv[1], n_ctx=64, n_threads=1, verbose=False)
vocab = llama_cpp.llama_model_get_vocab(llm._model.model)
forced = getattr(llama_cpp.llama_cpp._lib, "_Z25llama_sampler_forced_textPK13llama_samplerPci")  # C++
forced.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32]
grammar, text, size = sys.argv[2].encode(), sys.argv[3].encode(), int(sys.argv[4])
sampler = llama_cpp.llama_sampler_init_grammar(vocab, grammar, b"root")
found = []
for byte in [None, *text]:
    if byte is not None:
        llama_cpp.llama_sampler_accept(sampler, 3 + byte)
    buf = ctypes.create_string_buffer(size + 1)
    n = forced(sampler, buf, size)
    data = (llama_cpp.llama_token_data * 256)(*((3 + b, 1.0, 0.0) for b in range(256)))
    array = llama_cpp.llama_token_data_array(data=data, size=256, selected=-1, sorted=False)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
    found.append([buf.raw[:n].hex(), bytes(b for b in range(256) if data[b].logit > 0).hex()])
chain = llama_cpp.llama_sampler_init_greedy()
assert forced(chain, ctypes.create_string_buffer(8), 8) == 0
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    "grammar, text, seen",
    [
        (r'root ::= "{\"name\":" ("\"get\"" | "\"got\"") "}"', '{"name":"get"}', 13),
        (r'root ::= "a" [ \t\n]* ":" [ \t]* "b" [ ]* "," "c" [ ]? "d"', "a:b,cd", 4),
        ('root ::= "x" ("é" | "öö") "ß→" "z"*', "xéß→zz", 3),
        ('root ::= [a-c] "d" ("ee" | "ef") [^x] "."', "bdef!.", 3),
        ('root ::= "ab"?', "ab", 1),
        (r'root ::= "the quick" [ ] "brown" [\t\n] "fox"', "the quick brown\tfox", 18),
    ],
)
def test_what_a_grammar_forces(files, grammar, text, seen):
    """It is told where one character alone may follow, but for blanks before a colon or a comma."""
    out = run([sys.executable, "-c", FORCED, files[0], grammar, text, "64"]).stdout.splitlines()[-1]
    data, told = text.encode(), 0
    for at, (forced, allowed) in enumerate(json.loads(out)):
        forced, allowed = bytes.fromhex(forced), bytes.fromhex(allowed)
        within = at < len(data) and data[at] & 0xC0 == 0x80  # a character
        if forced:
            assert not within and data[at:].startswith(forced), (forced, data[at:])
            blanks = set(allowed) & set(b" \t\n\r") - {forced[0]}
            assert set(allowed) - blanks == {forced[0]} and (not blanks or chr(forced[0]) in ":,")
            told += 1
        elif not within and len(allowed) == 1 and allowed < b"\x80":
            # the text may end here, too
            assert grammar[-1] in "?*", f"{allowed!r} alone may follow {data[:at]!r}"
    assert told == seen


@pytest.mark.parametrize("size", [0, 1, 3])
def test_what_is_forced_fits_its_room(files, size):
    given = [sys.executable, "-c", FORCED, files[0], 'root ::= "aé→b"', "a", str(size)]
    first = bytes.fromhex(json.loads(run(given).stdout.splitlines()[-1])[0][0])
    assert first == {0: b"", 1: b"a", 3: "aé".encode()}[size]
