"""Files and calls that a new user gets wrong: all commands and classes answer alike."""

import dataclasses
import json
import re
import struct
from pathlib import Path

import gguf
import hybrid_models
import numpy as np
import pytest
import tiny_models

from eagle3_llama import EagleError, EagleLlama, EagleParams
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.cli.main import app
from eagle3_llama.common.model_files import check_models
from eagle3_llama.errors import ErrorKind, TargetError
from eagle3_llama.heads.convert import convert
from eagle3_llama.heads.info import describe
from eagle3_llama.server.settings import ServerSettings
from eagle3_llama.train.settings import TrainSettings

from llama_cpp import Llama

CTX = {"n_ctx": 256, "n_threads": 1, "verbose": False}


@pytest.fixture(scope="module")
def wrong(files, tmp_path_factory):
    """What is given as the target or the head: path, the error's kind, what it says."""
    d = tmp_path_factory.mktemp("wrong")
    (d / "text.gguf").write_text("Once upon a time")
    (d / "empty.gguf").write_bytes(b"")
    (d / "cut.gguf").write_bytes(b"GGUF\3\0\0\0")
    for name in ("folder", "checkpoint", "trained"):
        (d / name).mkdir()
    (d / "checkpoint/config.json").write_text("{}")
    tiny_models.head(d / "trained/head.gguf")
    bad = ErrorKind.BAD_FILE
    return {
        "missing": (str(d / "none.gguf"), bad, "no such file"),
        "a text": (str(d / "text.gguf"), bad, "is not a GGUF file"),
        "empty": (str(d / "empty.gguf"), bad, "is not a GGUF file"),
        "cut off": (str(d / "cut.gguf"), ErrorKind.TRUNCATED, "truncated"),
        "a folder": (str(d / "folder"), bad, "is a folder: give a file"),
        "a checkpoint": (str(d / "checkpoint"), bad, "is a folder: a"),
        "a trained head's folder": (str(d / "trained"), bad, "trained/head.gguf"),
    }


CASES = ("missing", "a text", "empty", "cut off", "a folder", "a checkpoint", "a trained head's folder")


def ways(target, head, out):
    """Everything that takes a target and a head, by name."""
    prompts = out / "prompts.jsonl"
    prompts.write_text('"x"\n')
    command = lambda name, *more: app([name, "-m", target, "--eagle", head, *more], standalone_mode=False)
    return {
        "EagleLlama": lambda: EagleLlama(target, eagle=head, **CTX),
        "Batcher": lambda: Batcher(BatchSettings(target, head, n_ctx=128, n_threads=1)),
        "serve": lambda: ServerSettings(model=target, eagle=head),
        "bench": lambda: command("bench", "--prompts", str(prompts)),
        "generate": lambda: command("generate", "-p", "x"),
    }


@pytest.mark.parametrize("case", CASES)
def test_wrong_files(files, wrong, case, tmp_path):
    """As the target and as the head."""
    path, kind, said = wrong[case]
    for target, head in ((path, files[1]), (files[0], path)):
        for way, call in ways(target, head, tmp_path).items():
            with pytest.raises(EagleError) as error:
                call()
            assert error.value.kind is kind and said in str(error.value), way
            assert path in str(error.value) and "\n" not in str(error.value), way
            assert isinstance(error.value, ValueError) == (target == path), way
    for call in (
        lambda: describe(path),
        lambda: TrainSettings(targets=(path,), out=str(tmp_path / "out")),
        lambda: convert(files[1], path, tmp_path / "out.gguf"),
    ):
        with pytest.raises(EagleError) as error:
            call()
        assert error.value.kind is kind and said in str(error.value)


NOT_GGUF = {
    "an LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "git lfs pull"),
    "a page": (b"\n<!DOCTYPE html><html><head>", "a web page: download the file itself"),
    "a bare page": (b"<html lang='en'>", "a web page"),
    "an error in XML": (b"<?xml version='1.0'?><Error>", "a text in XML"),
    "an error in JSON": (b'{"error": "gated"}', "a text in JSON"),
    "safetensors": (b"\x40\0\0\0\0\0\0\0" + b'{"a":{}}' * 20, "one of safetensors: convert"),
    "PyTorch": (b"PK\x03\x04" + b"\0" * 60, "a ZIP archive, as PyTorch's"),
    "a pickle": (b"\x80\x02}q\0." + b"x" * 60, "a pickle"),
    "gzip": (b"\x1f\x8b\x08" + b"x" * 60, "compressed (gzip): unpack it"),
    "GGML": (b"tjgg" + b"\x03\0\0\0" * 9, "a format before GGUF"),
    "a hole": (b"\0" * 99, "not fetched to the end"),
    "nothing": (b"", "empty: fetch it again"),
}
# general.architecture, general.type, and whether it has a tensor
NO_MODELS = {
    "a projector": ("clip", None, True, "a projector for images or sound (mmproj): give the model"),
    "a typed projector": ("clip", "mmproj", True, "a projector"),
    "an adapter": ("llama", "adapter", True, "an adapter (LoRA): give the model .* as lora_path"),
    "an importance matrix": (None, "imatrix", True, "an importance matrix"),
    "a control vector": ("controlvector", None, True, "a control vector"),
    "a block drafter": ("dflash", "model", True, r"a block drafter \(DFlash\): give the model, and no head"),
    "a vocabulary": ("llama", "model", False, "a vocabulary alone, without weights"),
}


def gguf_of(path, architecture, kind, tensors):
    w = gguf.GGUFWriter(path, architecture or "llama")
    if architecture is None:
        del w.kv_data[0]["general.architecture"]
    if kind is not None:
        w.add_type(kind)
    tiny_models._tokenizer(w, *tiny_models._vocabulary())
    if tensors:
        w.add_tensor("a.weight", np.ones((2, 2), np.float32))
    tiny_models._finish(w)
    return path


def test_files_that_are_no_model(files, tmp_path, monkeypatch):
    """Heads, which test_heads_in_the_wrong_place has, and these: by name, before anything is loaded."""
    monkeypatch.setattr(Llama, "__init__", lambda *_, **__: pytest.fail("it was loaded"))
    made = {}
    for name, (data, said) in NOT_GGUF.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(data)
        made[path] = "is not a GGUF file, but .*" + re.escape(said)
    for name, (architecture, kind, tensors, said) in NO_MODELS.items():
        path = gguf_of(tmp_path / f"{name}.gguf", architecture, kind, tensors)
        made[path] = "is no model by itself, but " + said.replace("(mmproj)", r"\(mmproj\)").replace(
            "(LoRA)", r"\(LoRA\)"
        )
    monkeypatch.setattr(hybrid_models, "_layer", lambda *_: None)
    layers = hybrid_models.target(tmp_path / "mtp-x.gguf", hybrid_models.MODELS["tiny-hybrid"], 1.0)
    made[layers] = r"is no model by itself, but a file of next-token layers \(MTP\) alone: give the model"
    for path, said in made.items():
        for call in (
            lambda: check_models(path),
            lambda: EagleLlama(path, **CTX),
            lambda: ServerSettings(model=str(path)),
            lambda: TrainSettings(targets=(str(path),), out=str(tmp_path / "out")),
        ):
            with pytest.raises(TargetError, match=said) as error:
                call()
            assert error.value.kind is ErrorKind.BAD_FILE and str(error.value).startswith(str(path))
            assert "\n" not in str(error.value)
        with pytest.raises(EagleError, match="is not a GGUF file, but|is not an EAGLE head, but") as error:
            EagleLlama(files[0], eagle=path, **CTX)
        assert not isinstance(error.value, TargetError) and "general.architecture" not in str(error.value)


@pytest.mark.parametrize("given", [True, False, 3, b"head.gguf", ""])
def test_names_that_are_no_names(files, given):
    for call, said in (
        (lambda: EagleLlama(files[0], eagle=given, **CTX), "eagle is .*expected a GGUF file"),
        (lambda: EagleLlama(files[0], head=given, **CTX), "eagle is .*expected a GGUF file"),
        (lambda: EagleLlama(given, **CTX), "the model is .*expected a GGUF file"),
        (lambda: Batcher(BatchSettings(files[0], given, n_ctx=128, n_threads=1)), "eagle is "),
    ):
        with pytest.raises(EagleError, match=said) as error:
            call()
        assert error.value.kind is ErrorKind.BAD_ARGUMENT and repr(given) in str(error.value)


def test_a_head_of_another_size_is_refused_first(files, tmp_path, monkeypatch):
    """Before the target is loaded, which may take minutes."""
    monkeypatch.setattr(Llama, "__init__", lambda *_, **__: pytest.fail("it was loaded"))
    wide = str(tiny_models.head(tmp_path / "wide.gguf", n_embd=128))
    named = str(tiny_models.head(tmp_path / "named.gguf", target_hidden_size=96))
    for head, size in ((wide, 128), (named, 96)):
        said = f"{head} is for a target of hidden size {size}, {files[0]} has 64: take the head trained"
        for call in (lambda: EagleLlama(files[0], eagle=head, **CTX), lambda: check_models(files[0], head)):
            with pytest.raises(EagleError, match=said) as error:
                call()
            assert error.value.kind is ErrorKind.HEAD_MISMATCH


def test_heads_in_the_wrong_place(files, tmp_path):
    target, head = files
    for given, said in (
        ((head, target), "exchange the two"),
        ((head, head), "is a head itself"),
        ((target, target), "is not an EAGLE head, but a model|is the target itself"),
    ):
        for way, call in ways(*given, tmp_path).items():
            with pytest.raises(EagleError) as error:
                call()
            assert error.value.kind is ErrorKind.HEAD_MISMATCH and re.search(said, str(error.value)), way
    for call in (
        lambda: check_models(head),
        lambda: EagleLlama(head, **CTX),
        lambda: TrainSettings(targets=(head,), out=str(tmp_path / "out")),
        lambda: convert(target, head, tmp_path / "out.gguf"),
    ):
        with pytest.raises(EagleError, match="is a head itself"):
            call()
    check_models(target, head, None)


def test_a_target_that_llama_cpp_refuses(files, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(open(files[0], "rb").read()[:-200])
    with pytest.raises(TargetError, match="cut.gguf cannot be loaded: the file is damaged"):
        EagleLlama(cut, **CTX)


def test_weights_of_a_type_that_llama_cpp_does_not_know(files, tmp_path):
    """Wherever a model is loaded: generate, the server's Batcher, Python."""
    data, name = bytearray(open(files[0], "rb").read()), b"blk.0.attn_q.weight"
    at = data.find(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    n_dims = struct.unpack_from("<I", data, at)[0]
    struct.pack_into("<I", data, at + 4 + 8 * n_dims, 999)
    newer = tmp_path / "newer.gguf"
    newer.write_bytes(data)
    for call in (
        lambda: EagleLlama(newer, **CTX),
        lambda: Batcher(BatchSettings(str(newer), n_ctx=128, n_threads=1)),
        lambda: app(["generate", "-m", str(newer), "-p", "x"], standalone_mode=False),
    ):
        with pytest.raises(TargetError, match="blk.0.attn_q.weight' has a weight type that") as e:
            call()
        assert e.value.kind is ErrorKind.UNSUPPORTED and "another format" in str(e.value)


@pytest.mark.parametrize("name", ["me/tiny-GGUF", "me/tiny-GGUF:Q8_0", "me/tiny-GGUF/head-Q8_0.gguf"])
def test_a_name_on_the_hub_without_hf(files, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for target, head in ((name, files[1]), (files[0], name)):
        for way, call in ways(target, head, tmp_path).items():
            with pytest.raises(EagleError) as e:
                call()
            assert str(e.value) == f"no such file: {name}; for the Hub write hf:{name}", way
    for call in (lambda: describe(name), lambda: convert(Path(name), files[0], tmp_path / "out.gguf")):
        with pytest.raises(EagleError, match=f"; for the Hub write hf:{name}"):
            call()


@pytest.mark.parametrize("name", ["models/head.gguf", "/a/b", "a", "here/b"])
def test_a_path_is_no_name_on_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(EagleError) as e:
        check_models(name)
    assert str(e.value) == f"no such file: {name}"
    with pytest.raises(EagleError, match="no such file: me/prompts$"):
        TrainSettings(targets=(tiny_models.target(tmp_path / "t.gguf"),), out="out", prompts=("me/prompts",))


def test_a_checkpoint_in_the_targets_place(wrong, files, tmp_path):
    """It is the model's, so the answer is not about heads."""
    folder = wrong["a checkpoint"][0]
    for call in (lambda: check_models(folder), lambda: convert(files[1], folder, tmp_path / "out.gguf")):
        with pytest.raises(EagleError, match="convert_hf_to_gguf.py of llama.cpp makes one") as e:
            call()
        assert "head" not in str(e.value)
    with pytest.raises(EagleError, match="for a head, eagle3-llama convert"):
        check_models(files[0], folder)


def test_a_long_prompt_is_both_errors(files):
    with EagleLlama(files[0], **CTX) as llm:
        for error in (EagleError, ValueError):
            with pytest.raises(error, match=r"exceed context window of 256: shorten the prompt") as found:
                llm([1] * 300)
            assert found.value.kind is ErrorKind.BAD_ARGUMENT


def test_a_closed_model_says_so(files):
    """Llama's methods would end the process."""
    with EagleLlama(files[0], eagle=files[1], **CTX) as llm:
        llm([1, 60], max_tokens=2)
    chat = [{"role": "user", "content": "x"}]
    for call in (
        lambda: llm("x"),
        lambda: list(llm("x", stream=True)),
        lambda: llm.create_chat_completion(chat),
        lambda: llm.tokenize(b"x"),
        lambda: llm.detokenize([60]),
        lambda: llm.n_ctx(),
        lambda: llm.token_bos(),
        lambda: next(llm.generate([1, 60])),
        lambda: llm.eval([1]),
        lambda: llm.embed("x"),
        lambda: llm.save_state(),
        llm.sample,
        llm.reset,
    ):
        with pytest.raises(EagleError, match="closed|NULL"):
            call()
    llm.close()
    assert llm.stats.tokens == 2


def test_assigned_settings_hold_or_are_refused(files):
    with EagleLlama(files[0], eagle=files[1], **CTX) as llm:
        for field in dataclasses.fields(EagleParams):
            assert isinstance(getattr(type(llm), field.name), property), field.name
        llm.text = False
        assert llm.eagle_params == EagleParams(text=False)
        llm.text = True
        llm.n_max = 3
        llm.p_min = 0.25
        assert llm.eagle_params == EagleParams(3, p_min=0.25) and (llm.n_max, llm.p_min) == (3, 0.25)
        for name, value in (("n_max", 99), ("tree", "8x2x2"), ("n_min", 4)):
            with pytest.raises(EagleError):
                setattr(llm, name, value)
        assert llm.eagle_params == EagleParams(3, p_min=0.25)
    with EagleLlama(files[0], **CTX) as llm, pytest.raises(EagleError, match="no head"):
        llm.n_max = 3
    with Batcher(BatchSettings(*files, n_parallel=1, n_ctx=128, n_threads=1)) as batcher:
        with batcher.request() as llm, pytest.raises(EagleError, match="Batcher.request"):
            llm.n_max = 3


def test_logprobs_can_be_written(files):
    """As JSON, with Llama's values."""
    from eagle3_llama.runtime.binding import Llama

    asked = {"max_tokens": 4, "logprobs": 2, "temperature": 0.0, "echo": True}
    told = []
    for make, more in ((Llama, {"logits_all": True}), (EagleLlama, {})):
        llm = make(files[0], **CTX, **more)
        told.append(llm("ab", **asked)["choices"][0]["logprobs"])
        llm.close()
    assert json.loads(json.dumps(told[1])) == told[1] == told[0]


def test_case_of_names_does_not_matter(files, tmp_path):
    """Formats, types and modes, as llama.cpp writes them or not."""
    from eagle3_llama.models import smollm2

    convert(files[1], files[0], tmp_path / "out.gguf", "Q8_0")
    assert "Q8_0" in dict(describe(tmp_path / "out.gguf"))["weights"]
    assert smollm2("q4_1") == smollm2("Q4_1")
    with pytest.raises(EagleError, match="unknown format 'Q9_9'"):
        smollm2("q9_9")
    settings = TrainSettings((files[0],), str(tmp_path / "out"), optimizer="Muon", capture="LLAMA")
    assert (settings.optimizer, settings.capture) == ("muon", "llama")
