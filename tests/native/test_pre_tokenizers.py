"""Every pre-tokenizer that the pinned llama.cpp knows: the tokens of an unpatched library, and any text.

Patch 0010 splits texts without std::regex. native/tests/pre_tokenizers_test.cpp compares the expressions.
"""

import json
import random
import re
import sys

import gguf
import pytest
from commands import run
from native_programs import passes
from paths import ROOT
from stock import environment, stock_dir
from tiers import each

from eagle3_llama.common.gguf_reader import read_gguf
from eagle3_llama.models import smollm2
from eagle3_llama.runtime import library

sys.path.insert(0, str(ROOT / "native"))

import fetch

# Characters and words of many scripts; bytes that are no UTF-8 too.
WORDS = """a Z word HELLO fooBar straße ÉCOLE don't I'M we'LL мир МИР ὕδωρ שלום كتاب شَكْل हिन्दी বাংলা ไทย ខ្មែរ
中文字 漢 ひらがな カタカナ ｶﾅ 한국어 ㄅㄆ 𐐀𐐨 ǅ ʰ 0 42 2024 1234567 ٣٤٥ ५६ Ⅷ ½ 🙂 👩\u200d👩\u200d👧 🇩🇪 👍🏽
' " ! ?! ... , - -- — _ / // \\ ( ) [] {} < => + ^ ~ ` | $ € # @ % & * : ; 。 、 ！ … “ ”
x_1=y2; for( /* */ http://a.b/c?d=1""".split()
BREAKS = [*"   ", "", "", "", "  ", "    ", *"\n\t\u00a0\u3000", "\n\n", "\r\n", "\t\t", " \n "]
ODD = [*"\u0301\u200d\x00\u0085\u2028\ufffd\ue000\U0010ffff", "\u0301" * 3, "\x01\x7f"]
BROKEN = [b"\xff", b"\xc3", b"\xe4\xb8", b"\x80\x80", b"\xed\xa0\x80", b"\xf0\x9f"]

# Expressions of several kinds, and none.
FEW = ["llama3", "deepseek-v3", "tekken", "gpt-4o", "whitespace"]

# Reads paths and texts, and prints the tokens of each text with each model; it imports llama_cpp alone.
_TOKENIZE = """
import json, sys
import llama_cpp
given = json.load(open(sys.argv[1]))
no_log = llama_cpp.llama_log_callback(lambda *_: None)
llama_cpp.llama_log_set(no_log, None)
texts = [bytes.fromhex(text) for text in given["texts"]]
params = llama_cpp.llama_model_default_params()
params.vocab_only = True
for path in given["paths"]:
    model = llama_cpp.llama_model_load_from_file(path.encode(), params)
    vocab = llama_cpp.llama_model_get_vocab(model)
    out = []
    for text in texts:
        room = (llama_cpp.llama_token * (len(text) + 8))()
        n = llama_cpp.llama_tokenize(vocab, text, len(text), room, len(room), True, False)
        assert n >= 0, n
        out.append(room[:n])
    print(json.dumps(out), flush=True)
    llama_cpp.llama_model_free(model)
"""


def pre_types():
    """{pre type: a name of it}, as llama-vocab.cpp of the pinned tree has them."""
    source = (fetch.patched_tree(None)[0] / "src" / "llama-vocab.cpp").read_text()
    cases = set(re.findall(r"case (LLAMA_VOCAB_PRE_TYPE_\w+):", source))
    source, found, names = source[source.index("tokenizer_pre.empty()") :], {}, []
    each = re.compile(r'tokenizer_pre == "([^"]+)"|\bpre_type = (LLAMA_VOCAB_PRE_TYPE_\w+);')
    for name, kind in each.findall(source):
        if name:
            names.append(name)
        elif names:
            found.setdefault(kind, names[0])
            names = []
    assert cases <= set(found), f"no model's name leads to {cases - set(found)}"
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """SmolLM2's vocabulary without weights, once for each pre type: {name: path}."""
    folder = tmp_path_factory.mktemp("vocabularies")
    made = vocabulary(folder / "vocabulary.gguf", "NAME OF THE PRE-TOKENIZER").read_bytes()
    paths = {name: folder / f"{name}.gguf" for name in pre_types().values()}
    for name, path in paths.items():
        path.write_bytes(made.replace(_string("NAME OF THE PRE-TOKENIZER"), _string(name)))
    return paths | {"whitespace": vocabulary(folder / "whitespace.gguf", "whitespace", model="whitespace")}


@pytest.fixture(params=each([FEW, None], quick=[FEW], ids=["few", "all"]))
def some(request, models):
    return [models[name] for name in request.param or models]


def vocabulary(path, pre, model="gpt2"):
    writer = gguf.GGUFWriter(path, "llama")
    for name, key in read_gguf(smollm2("Q8_0")).keys.items():
        if name.startswith(("tokenizer.", "llama.")):
            value = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.model": model}.get(name, key.value)
            writer.add_key_value(name, value, key.type, key.item_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _string(text):
    """As GGUF writes it: its length, then its bytes."""
    return len(text).to_bytes(8, "little") + text.encode()


def random_texts(n, seed=1):
    rng = random.Random(seed)
    texts = []
    for _ in range(n):
        words = rng.sample(WORDS, rng.randint(1, 12)) if rng.random() < 0.5 else rng.sample(WORDS + ODD, 3)
        text = b""
        for _ in range(rng.randint(1, 20)):
            text += (rng.choice(words) * (rng.randint(2, 9) if rng.random() < 0.1 else 1)).encode()
            text += rng.choice(BROKEN) if rng.random() < 0.02 else rng.choice(BREAKS).encode()
        texts.append(text)
    return texts


def tokens_of(paths, texts, tmp_path, folder):
    """[model][text] its tokens, by the libllama of a folder, in a process of its own."""
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"paths": list(map(str, paths)), "texts": [text.hex() for text in texts]}))
    done = run([sys.executable, "-c", _TOKENIZE, request], env=environment(folder))
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.thorough
def test_expressions_under_sanitizers(programs):
    """The matches of std::regex; steps that grow with the text; 200,000 characters of each kind."""
    passes(programs, "pre_tokenizers_test", 1)


@pytest.mark.thorough
def test_tokens_of_an_unpatched_library(models, tmp_path):
    texts = random_texts(400) + [word.encode() for word in WORDS + BREAKS + ODD] + BROKEN
    texts += [text[1:-1] for text in random_texts(200, seed=2)]  # inside a character
    ours = tokens_of(models.values(), texts, tmp_path, library.find_lib_dir())
    theirs = tokens_of(models.values(), texts, tmp_path, stock_dir())
    assert len(ours) == len(theirs) == len(models) > 50
    for name, mine, stock in zip(models, ours, theirs, strict=True):
        wrong = [text for text, a, b in zip(texts, mine, stock, strict=True) if a != b]
        assert not wrong, (name, wrong[0])


def test_long_texts_are_tokenized(some, tmp_path):
    """60,000 equal characters of most kinds overflowed the stack of 8 MB with some of the pre-tokenizers."""
    text = b"".join((kind * 60_000).encode() for kind in ("a", "E", "7", " ", "-", "中"))
    found = tokens_of(some, [text], tmp_path, library.find_lib_dir())
    assert len(found) == len(some) and all(len(tokens) > 1000 for (tokens,) in found)


@pytest.mark.parametrize("n", each([40_000, 200_000], quick=[40_000]))
def test_merges_of_long_words(models, tmp_path, n):
    """A word of so many characters, which a pre-tokenizer leaves whole, is merged too."""
    kinds = "a E aB я م हि 中 한 7 ٣ ! - = 。 ' 's 🙂 € the e\u0301 \x01".split(" ") + [*" \n\t\u00a0"]
    texts = [(kind * (n // len(kind))).encode() for kind in kinds]
    (found,) = tokens_of([models["gpt-4o"]], texts, tmp_path, library.find_lib_dir())
    assert all(len(tokens) > n // 200 for tokens in found)


def test_bytes_that_no_text_has(some, tmp_path):
    """Beyond Unicode: one U+FFFD for each byte, as elsewhere outside UTF-8. They ended the process."""
    texts = [b"a\xf7\xbf\xbf\xbfb", b"a\xf4\x90\x80\x80b", "a\ufffd\ufffd\ufffd\ufffdb".encode()]
    for beyond, next_one, replaced in tokens_of(some, texts, tmp_path, library.find_lib_dir()):
        assert beyond == next_one == replaced


def test_spaces_that_are_not_escaped(tmp_path):
    """The merges asserted that there are none, but this pre-tokenizer in a model of another kind has some."""
    path = vocabulary(tmp_path / "vocabulary.gguf", "whitespace")
    ((tokens,),) = tokens_of([path], [b"a  b"], tmp_path, library.find_lib_dir())
    assert tokens
