"""Images and sound: llama-cpp-python's chat handlers with EagleLlama, on tiny random vision models.

The text is stock Llama's. The handlers decode the rows of images themselves, on the context that
EagleLlama drafts for.
"""

import os
import random
import sys

import numpy as np
import pytest
import tiny_models
import tiny_vision
from commands import run
from tiers import crossed, each
from tiny_models import scripted, wanted
from tiny_vision import asks, needs_mtmd, picture

from eagle3_llama import EagleError, EagleLlama, EagleParams  # before llama_cpp: it brings the library
from eagle3_llama.runtime import library as _library
from eagle3_llama.runtime.binding import address
from eagle3_llama.runtime.engine import Draft
from eagle3_llama.runtime.library import checked

import llama_cpp
from llama_cpp import Llama, LlamaRAMCache

KINDS = {
    "llava": ("llama", "mlp", "Llava15ChatHandler", (1, 2, 3)),
    "any": ("llama", "mlp", "MTMDChatHandler", (1, 2, 4)),
    "qwen": ("qwen2vl", "qwen2vl_merger", "Qwen25VLChatHandler", (1, 2, 3)),
}
ASK = {"max_tokens": 40, "temperature": 0.0, "repeat_penalty": 1.0}


class Vlm:
    """Files of a vision model and its head; each call makes a model of them."""

    def __init__(self, kind, folder):
        arch, projector, self.handler, layers = KINDS[kind]
        self.target = str(
            tiny_models.target(folder / "target.gguf", arch=arch, chat_template=tiny_vision.CHAT, ends=False)
        )
        self.head = str(tiny_models.head(folder / "head.gguf", layers=layers))
        self.projector = str(tiny_vision.projector(folder / "mmproj.gguf", projector))
        self.made = []

    def __call__(self, cls=Llama, **settings):
        from llama_cpp import llama_chat_format

        handler = getattr(llama_chat_format, self.handler)(self.projector, verbose=False)
        self.made.append(
            cls(
                self.target,
                chat_handler=handler,
                **{"n_ctx": 512, "n_batch": 64, "verbose": False, **settings},
            )
        )
        return self.made[-1]

    def eagle(self, **settings):
        return self(EagleLlama, eagle_path=self.head, n_max=4, **settings)


@pytest.fixture(scope="module", params=each(KINDS, quick=["qwen"]))
def files(request, tmp_path_factory):
    return Vlm(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def vlm(files):
    yield files
    while files.made:
        files.made.pop().close()


def chat(llm, *messages, stream=False, **settings):
    """(text, ids of prompt and answer, length of the prompt) of a chat completion."""
    made = llm.create_chat_completion(messages=list(messages), stream=stream, **{**ASK, **settings})
    if stream:
        return "".join(item["choices"][0]["delta"].get("content") or "" for item in made), None, None
    return (
        made["choices"][0]["message"]["content"],
        llm.input_ids[: llm.n_tokens].tolist(),
        made["usage"]["prompt_tokens"],
    )


def drafts_of(llm, ids, n_prompt, seed=0):
    """Drafts what follows in an answer known already, one in four tokens wrong, or in a tree each beside a
    wrong one. Returns what undoes it."""
    rng = random.Random(seed)

    def propose(ask):
        seen = llm.n_tokens + 1  # token is at n_tokens
        known = ids[seen : seen + wanted(ask.params)] if seen >= n_prompt else []
        if llm.engine.trees(ask.params):
            levels = [[(t + 1) % tiny_models.N_VOCAB, t] for t in known[:3]]  # the right one lies last
            parents = [max(2 * i - 1, -1) for i, level in enumerate(levels) for _ in level]
            return Draft([t for level in levels for t in level], parents)
        return Draft([t if rng.random() < 0.75 else (t + 1) % tiny_models.N_VOCAB for t in known])

    return scripted(llm, propose)


@needs_mtmd
def test_our_library_is_the_one_opened():
    """In a process of its own, where nothing has set the way."""
    code = (
        "from eagle3_llama import EagleLlama; from llama_cpp import llama_cpp, mtmd_cpp; "
        "print(mtmd_cpp._libmtmd._name, llama_cpp._lib._name); "
        "print(mtmd_cpp.mtmd_default_marker().decode())"
    )
    lib_dir = _library.find_lib_dir()
    env = {k: v for k, v in os.environ.items() if k not in ("MTMD_CPP_LIB", "LLAMA_CPP_LIB_PATH")}
    done = run([sys.executable, "-c", code], env=env)
    mtmd, libllama, marker = done.stdout.split()
    assert os.path.dirname(mtmd) == os.path.dirname(libllama) == str(lib_dir) and marker


SAMPLING = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_k": 0, "top_p": 1.0, "seed": 7},
    "penalties": {"temperature": 0.7, "repeat_penalty": 1.2, "seed": 8},
}
in_all_kinds = pytest.mark.parametrize("files", KINDS, indirect=True)


@needs_mtmd
@pytest.mark.parametrize(
    "files, sampling, tree", crossed(KINDS, SAMPLING, [False, "8x3x2"]), indirect=["files"], scope="module"
)
def test_same_text(vlm, sampling, tree):
    settings = SAMPLING[sampling]
    message = asks("what is b5 here?", picture(1, 56, 84))
    more = {"flash_attn": True} if tree else {}
    stock, plain, eagle = vlm(**more), vlm(EagleLlama, **more), vlm.eagle(**more)
    text, ids, n_prompt = chat(stock, message, **settings)
    assert chat(plain, message, **settings)[0] == text
    assert (
        chat(plain, message, stream=True, **settings)[0] == text
    )  # stock's loses characters of several tokens
    if tree:
        eagle.eagle_params = EagleParams(tree=tree)
        assert chat(eagle, message, **settings)[0] == text
        assert eagle.stats.drafted > 0  # the head's own, which may all be wrong
        eagle.stats.reset()
    drafts_of(eagle, ids, n_prompt)
    assert chat(eagle, message, **settings)[0] == text
    assert chat(eagle, message, stream=True, **settings)[0] == text
    assert eagle.stats.drafted > eagle.stats.accepted > 10


@needs_mtmd
def test_sound(tmp_path):
    """In an image's place, as the handlers take it, with a model that hears too."""
    vlm = Vlm("any", tmp_path)
    tiny_vision.projector(vlm.projector, hears=True)
    stock, eagle = vlm(), vlm.eagle()
    for seed in (1, 2):
        message = asks("what is b5 here?", tiny_vision.sound(seed))
        text, ids, n_prompt = chat(stock, message)
        undo = drafts_of(eagle, ids, n_prompt)
        assert chat(eagle, message)[0] == text
        undo()
    assert chat(stock, asks("what is b5 here?", tiny_vision.sound(1)))[0] != text
    assert eagle.stats.accepted > 20
    stock.close()
    eagle.close()


@needs_mtmd
def test_another_image_another_text(vlm):
    """Else the other tests compare nothing."""
    stock = vlm()
    assert chat(stock, asks("what?", picture(1)))[0] != chat(stock, asks("what?", picture(2)))[0]


@needs_mtmd
def test_a_conversation(vlm):
    """An image, another one, then text alone: each answer is a fresh stock Llama's, and drafted for."""
    eagle, messages = vlm.eagle(), [{"role": "system", "content": "s1 t2"}]
    for ask in (
        asks("what is this?", picture(1)),
        {"role": "user", "content": "and a9?"},
        asks("or that?", picture(2, 84, 56)),
    ):
        messages.append(ask)
        text, ids, n_prompt = chat(vlm(), *messages)
        known, undo = eagle.stats.accepted, drafts_of(eagle, ids, n_prompt)
        assert chat(eagle, *messages)[0] == text
        assert eagle.stats.accepted > known
        undo()
        messages.append({"role": "assistant", "content": text})
    only_text = ({"role": "user", "content": "c1 d2 e3"},)
    text, ids, n_prompt = chat(vlm(), *only_text)
    known = eagle.stats.accepted
    drafts_of(eagle, ids, n_prompt)
    assert chat(eagle, *only_text)[0] == text
    assert eagle.stats.accepted > known


def stopped_at_completion(llm, *messages):
    """The prompt that a handler comes to create_completion with, and its texts."""
    seen, texts, evaluate = [], [], llm.eval
    llm.eval = lambda tokens: texts.append(list(tokens)) or evaluate(tokens)

    def stop(prompt, **_):
        seen.append(list(prompt))
        raise StopIteration

    llm.create_completion = stop
    with pytest.raises(StopIteration):
        llm.create_chat_completion(messages=list(messages), **ASK)
    del llm.create_completion, llm.eval
    return seen[0], texts


@needs_mtmd
@in_all_kinds
def test_the_head_goes_on_behind_the_image(vlm):
    """It drafts as one that has read the text behind the image and no more; positions are the target's."""
    eagle = vlm.eagle(n_batch=128)
    prompt, (before, after) = stopped_at_completion(eagle, asks("what is b5 here?", picture(1, 56, 84)))
    assert prompt[: len(before)] == before and prompt[-len(after) :] == after
    engine, layers = eagle.engine, eagle.engine.head.info()["layers"]
    assert (
        engine.n_past()
        == eagle.n_tokens
        == len(prompt)
        == llama_cpp.llama_memory_seq_pos_max(eagle._ctx.memory, 0) + 1
    )

    # of the last batch, which was that text
    features = np.empty((len(after), len(layers), tiny_models.N_EMBD), np.float32)
    ctx, ids = engine.ffi.cast("void *", address(eagle._ctx.ctx)), engine.ffi.new("int32_t[]", layers)
    checked(
        engine.lib.eagle3_capture_get(
            ctx, ids, len(layers), len(after), engine.ffi.from_buffer("float[]", features)
        )
    )
    (token,), (prob,) = engine.steps.draft(70, EagleParams(1))
    logits = engine.head.forward(np.array([*after[1:], 70]), features)[2][-1]
    assert token == engine.head.d2t()[logits.argmax()]
    np.testing.assert_allclose(prob, 1 / np.exp(logits - logits.max()).sum(), rtol=1e-3)


def answer(llm, ids, **settings):
    return llm.create_completion(ids, **{"max_tokens": 20, "temperature": 0.0, **settings})["choices"][0][
        "text"
    ]


@needs_mtmd
@pytest.mark.parametrize("cached", [False, True], ids=["", "cached"])
def test_an_image_is_no_text(vlm, cached):
    """A text that lay where an image's rows are now is read anew, though all around the image is there."""
    eagle, message = vlm.eagle(), asks("what is b5 here?", picture(1))
    if cached:
        eagle.set_cache(LlamaRAMCache())
    prompt, (before, after) = stopped_at_completion(vlm(), message)
    text = [*before, *(60 + i for i in range(len(prompt) - len(before) - len(after))), *after]
    answer(eagle, text, max_tokens=1)
    about_image = chat(eagle, message)
    assert about_image[0] == chat(vlm(), message)[0]
    later = [*text, *about_image[1][len(text) :], 61, 62]  # as if the answer had been about the text
    assert answer(eagle, later) == answer(vlm(), later)
    assert chat(eagle, message)[0] == about_image[0]


@needs_mtmd
def test_more_of_an_answer(vlm):
    """One may go on from what the context holds, the image in it, after load_state() too."""
    stock, eagle, message = vlm(), vlm.eagle(), asks("what is b5 here?", picture(1))
    chat(stock, message)
    expected = answer(stock, [*stock.input_ids[: stock.n_tokens].tolist(), 61, 62])
    _, ids, _ = chat(eagle, message)
    state = eagle.save_state()
    assert answer(eagle, [*ids, 61, 62]) == expected
    answer(eagle, [1, 60, 70])
    eagle.load_state(state)
    assert answer(eagle, [*ids, 61, 62]) == expected


@needs_mtmd
def test_an_answer_whose_image_is_gone(vlm):
    """A stream that is first read after another call: no text about no image. The model goes on."""
    eagle, message = vlm.eagle(), asks("what is b5 here?", picture(1))
    late = eagle.create_chat_completion(messages=[message], stream=True, **ASK)
    answer(eagle, [1, 60, 70])
    with pytest.raises(EagleError, match="image"):
        list(late)
    assert answer(eagle, [1, 60, 70]) == answer(vlm(), [1, 60, 70])
    assert chat(eagle, message)[0] == chat(vlm(), message)[0]


@needs_mtmd
@in_all_kinds
def test_to_the_end_of_the_context(vlm):
    """To stock Llama's last token, though an image may fill more cells of the cache than it has positions."""

    def all_tokens(llm):
        prompt, _ = stopped_at_completion(llm, asks("what is b5 here?", picture(1, 84, 84)))
        out = [*prompt]
        with pytest.raises((RuntimeError, EagleError)):
            out.extend(llm.generate(prompt, temp=0.0))  # what came before the error stays
        return out, len(prompt)

    eagle = vlm.eagle(n_ctx=512)
    ids, n_prompt = all_tokens(vlm(EagleLlama, n_ctx=512))
    expected, _ = all_tokens(vlm(n_ctx=512))
    assert len(ids) > 480 and ids[n_prompt:] == expected[n_prompt:]
    drafts_of(eagle, ids, n_prompt)
    assert all_tokens(eagle)[0][n_prompt:] == ids[n_prompt:]
    assert eagle.stats.accepted > 20


def test_rows_of_others(tmp_path):
    """Without libmtmd: rows that somebody else decodes, from the start on, where a text as long was."""
    llm = EagleLlama(
        str(tiny_models.target(tmp_path / "target.gguf")),
        eagle_path=str(tiny_models.head(tmp_path / "head.gguf")),
        n_max=4,
        n_ctx=256,
        verbose=False,
    )
    text = [1, *range(60, 80)]
    expected = answer(llm, [*text, 90])
    answer(llm, text, max_tokens=1)

    def decode_others():
        llm.reset()
        llm._ctx.kv_cache_clear()
        llm._batch.set_batch(batch=[1, *range(100, 120)], n_past=0, logits_all=False)
        llm._ctx.decode(llm._batch)
        llm.n_tokens = len(text)

    decode_others()
    llm.eval([90])
    ids = llm.input_ids[: llm.n_tokens].tolist()
    about = answer(llm, ids)
    assert about == answer(llm, [1, *range(100, 120), 90]) != expected
    assert answer(llm, [*text, 90]) == expected
    with pytest.raises(EagleError, match="image"):
        answer(llm, ids)
    decode_others()
    llm.eval([90])
    assert answer(llm, llm.input_ids[: llm.n_tokens].tolist()) == about
    llm.close()
