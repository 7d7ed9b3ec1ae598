"""The files of a model after its load: the process is in another folder, they are gone, or others there."""

import itertools
import os
import pickle
import shutil

import pytest
import tiny_models
from text_tools import PROMPT, tokens_of

from eagle3_llama import EagleError, EagleLlama, EagleParams  # before llama_cpp: it brings the library
from eagle3_llama.common import loaded_files
from eagle3_llama.runtime import library

CTX = {"n_ctx": 512, "n_threads": 1, "flash_attn": True, "verbose": False}


@pytest.fixture
def folder(files, tmp_path, monkeypatch):
    """A folder with the files, where the process is."""
    at = tmp_path / "models"
    at.mkdir()
    for file, name in zip(files, ("target.gguf", "head.gguf")):
        shutil.copy(file, at / name)
    tiny_models.tiny_lora(at / "lora.gguf")
    monkeypatch.chdir(at)
    monkeypatch.setenv("EAGLE3_LLAMA_COSTS", str(tmp_path / "costs"))
    return at


def gone(folder):
    for file in folder.iterdir():
        file.unlink()


def another(folder):
    tiny_models.target(folder / "target.gguf", seed=9)
    tiny_models.head(folder / "head.gguf", seed=9)


def elsewhere(folder):
    os.chdir(folder.parent)


@pytest.mark.parametrize("change", [elsewhere, gone, another])
@pytest.mark.parametrize("head", [None, "head.gguf"])
def test_files_that_are_gone(folder, change, head, monkeypatch):
    """Texts that repeat themselves, settings, states: nothing asks for the file, or takes another's."""
    with EagleLlama("target.gguf", eagle=head, lora_path="lora.gguf", **CTX) as llm:
        assert llm.model_path == str(folder / "target.gguf") and llm.lora_path == str(folder / "lora.gguf")
        before = llm.save_state() if change is not another else None
        change(folder)
        text = tokens_of(llm)  # it repeats the prompt, for which the costs are measured
        for settings in ({"n_max": 0}, {"text": False}, {"n_max": None}):
            for name, value in settings.items():
                setattr(llm, name, value)
            assert tokens_of(llm) == text
        state = llm.save_state()
        llm.reset()
        llm.load_state(state)
        if before is not None:
            llm.load_state(before)
        if change is elsewhere:
            with pickle.loads(pickle.dumps(llm)) as again:
                assert tokens_of(again) == text
        elif change is gone:
            with pytest.raises(EagleError, match=f"no such file: {folder}"):
                pickle.loads(pickle.dumps(llm))
        else:
            with EagleLlama("target.gguf", eagle=head, lora_path="lora.gguf", **CTX) as other:
                other.eval(PROMPT)
                with pytest.raises(EagleError, match="the state belongs to another model"):
                    other.load_state(state)


def test_what_is_said_of_a_file(folder):
    files = loaded_files.loaded("target.gguf", "head.gguf")
    assert files.head.path == str(folder / "head.gguf") and files.lora is None
    assert loaded_files.are_same([*files.model, files.head])
    os.utime("target.gguf", (1, 1))
    with pytest.raises(EagleError, match="target.gguf is another file than the one"):
        loaded_files.check_same(files.model)
    gone(folder)
    with pytest.raises(EagleError, match="target.gguf, from which .* cannot be read any more"):
        loaded_files.check_same(files.model)
    assert not loaded_files.are_same(files.model)


def test_the_folder_of_the_library(monkeypatch, tmp_path):
    """A relative one in the environment stays where it is."""
    lib_dir = library.find_lib_dir().resolve()
    monkeypatch.chdir(lib_dir.parent)
    monkeypatch.setenv("EAGLE3_LLAMA_LIB_DIR", lib_dir.name)
    library.prefer_our_libllama()
    monkeypatch.chdir(tmp_path)
    assert library.find_lib_dir() == lib_dir


def test_a_batcher(folder):
    from eagle3_llama.batching import Batcher, BatchSettings

    with Batcher(BatchSettings("target.gguf", "head.gguf", n_parallel=1, n_ctx=256, n_threads=1)) as batcher:
        gone(folder)
        with batcher.request(params=EagleParams()) as llm:
            assert list(itertools.islice(llm.generate(PROMPT, temp=0.0), 40))
        data = batcher.save_slot(0)
        assert batcher.load_slot(0, data) == batcher.slots()[0]["n_past"] > len(PROMPT)
