"""What `auto` finds: a head beside the target, in the cache, in the list of published heads, on the hub."""

import json
import os
import shutil
from pathlib import Path

import pytest
import tiny_models
from hub_tools import CLI, cache, files_of, generate, hub, made  # noqa: F401 - fixtures too

from eagle3_llama import EagleLlama
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.common import hub as names
from eagle3_llama.heads import auto
from eagle3_llama.heads.info import describe
from eagle3_llama.models import smollm2
from eagle3_llama.server.settings import ServerSettings


@pytest.fixture
def alone(made, tmp_path, cache, monkeypatch):
    """A target in a folder of its own, an empty cache, an empty list."""
    folder = tmp_path / "models"
    folder.mkdir()
    monkeypatch.setattr(auto, "published", tuple)
    return Path(shutil.copy(made[0], folder / "target.gguf"))


def test_auto_finds_nothing(alone, capsys):
    """What only a head can use is dropped; the text is that without a head."""
    with EagleLlama(alone, eagle="auto", n_max=2, n_ctx=128, n_threads=1, verbose=False) as llm:
        assert not llm.engine.has_head and tiny_models.take(llm, 4)
    said = capsys.readouterr().err.strip()
    expected = "none beside it; none in the cache; none in this package; none in the list of published heads"
    assert said == f"[no head for target.gguf: {expected}; drafts come from the text alone]"


def test_auto_beside(alone, capsys):
    """A head that does not fit is named and passed over."""
    tiny_models.head(alone.parent / "eagle3-a.gguf", layers=(1, 2, 30))
    assert auto.choose_head(alone) is None
    assert "eagle3-a.gguf beside it reads layers [1, 2, 30], of 12; none in" in capsys.readouterr().err
    (alone.parent / "eagle3-b.gguf").write_bytes(b"nothing")
    tiny_models.head(alone.parent / "eagle3-c.gguf")
    settings = ServerSettings(model=str(alone), eagle="auto", n_parallel=1, n_ctx=128, threads=1)
    with Batcher(BatchSettings(**settings.batch())) as batcher:
        assert batcher.base.engine.has_head
        assert batcher.settings.eagle == str(alone.parent / "eagle3-c.gguf")
    assert "[head for target.gguf: eagle3-c.gguf, beside it]" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["head.gguf", "converted.gguf", "tiny-eagle3-Q8_0.gguf"])
def test_auto_knows_a_head_by_what_it_is(alone, name, capsys):
    """Whatever it is called: beside it are other models, what is no model, and a head of another model."""
    folder = alone.parent
    assert dict(describe(alone))["--eagle auto"].startswith("no head: none beside it; none in the cache")
    shutil.copy(alone, folder / "another.gguf")
    (folder / "a-broken.gguf").write_bytes(b"GGUF" + bytes(100))
    for pipe in ("a-pipe.gguf", "eagle3-pipe.gguf"):
        os.mkfifo(folder / pipe)
    (folder / "a-folder.gguf").mkdir()
    tiny_models.head(folder / "a-wide.gguf", n_embd=96)
    assert auto.choose_head(alone) is None
    said = capsys.readouterr().err
    assert "a-wide.gguf beside it is for a hidden size of 96, not 64" in said and "another" not in said
    tiny_models.head(folder / name)
    assert auto.choose_head(alone) == str(folder / name)
    assert f"[head for target.gguf: {name}, beside it]" in capsys.readouterr().err
    assert dict(describe(alone))["--eagle auto"] == f"{name}, beside it"
    assert "--eagle auto" not in dict(describe(folder / name))


def test_auto_among_heads_and_many_files(alone, monkeypatch, capsys):
    """The name that llama.cpp gives comes first. A folder of many files is not read through."""
    tiny_models.head(alone.parent / "a.gguf")
    tiny_models.head(alone.parent / "eagle3-z.gguf")
    assert auto.choose_head(alone) == str(alone.parent / "eagle3-z.gguf")
    assert "eagle3-z.gguf, beside it (of 2 that fit)" in capsys.readouterr().err
    (alone.parent / "eagle3-z.gguf").unlink()
    monkeypatch.setattr(auto, "LOOKED_AT", 2)
    for n in range(3):
        shutil.copy(alone, alone.parent / f"A{n}.gguf")
    assert auto.choose_head(alone) is None


def test_auto_offers_the_shipped_head(alone, monkeypatch, tmp_path, capsys):
    """For a model of its sizes and tokens, whatever it is called."""
    shipped = tiny_models.head(tmp_path / "shipped.gguf")
    monkeypatch.setattr(auto, "shipped_head", lambda: shipped)
    assert auto.choose_head(alone) == str(shipped)
    assert "the one that this package has for it" in capsys.readouterr().err
    assert "this package has" in dict(describe(alone))["--eagle auto"]
    tokens, types = tiny_models._vocabulary()
    monkeypatch.setattr(tiny_models, "_vocabulary", lambda n: (["<else>", *tokens[1:]], types))
    tiny_models.head(shipped)
    assert auto.choose_head(alone) is None


def test_the_shipped_head_is_for_the_demos_model(tmp_path, monkeypatch):
    (tmp_path / "target.gguf").symlink_to(smollm2())
    monkeypatch.setattr(auto, "records", lambda target: [])
    assert auto.would_find(tmp_path / "target.gguf") == "the one that this package has for it"


def test_auto_goes_on_without_a_head_that_does_not_load(alone, capsys):
    """Its sizes fit, its tensors are not there."""
    tiny_models.head(alone.parent / "eagle3-a.gguf", d2t=tiny_models.np.arange(3, dtype="int64"))
    with pytest.warns(RuntimeWarning, match="EagleLlama drafts from the text alone"):
        llm = EagleLlama(alone, eagle="auto", n_ctx=128, n_threads=1, verbose=False)
    assert tiny_models.take(llm, 4)
    llm.close()


def entry(repo, target="Me/Tiny-1B", **sizes):
    return auto.PublishedHead(repo, target, "here", **sizes)


def named(path, name):
    """A copy of a target that calls itself so."""
    import gguf

    reader = gguf.GGUFReader(path)
    w = gguf.GGUFWriter(path.with_name("named.gguf"), "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            w.add_key_value(
                key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
            )
    w.add_name(name)
    for t in reader.tensors:
        w.add_tensor(t.name, t.data)
    tiny_models._finish(w)
    return path.with_name("named.gguf")


def test_auto_from_the_list(alone, made, monkeypatch, capsys):
    """By the name in its metadata. An entry that cannot be used is passed over, and named with its reason."""

    def fetch(name):
        if name.repo == "me/other":
            return files_of(made[2], "me/other")
        return files_of(made[1])

    target = named(alone, "tiny 1b")
    listed = (entry("me/other"), entry("me/wide", n_embd=96), entry("me/head", n_embd=64, n_layer=12))
    monkeypatch.setattr(auto, "published", lambda: listed)
    monkeypatch.setattr(auto, "fetch_head", fetch)
    path = auto.choose_head(target)
    assert Path(path).parent.name == "heads"
    assert "[head for named.gguf: me/head, published for Me/Tiny-1B]" in capsys.readouterr().err
    assert auto.choose_head(target) == path
    assert "in the cache" in capsys.readouterr().err
    monkeypatch.setattr(auto, "published", lambda: listed[:2])
    monkeypatch.setattr(auto, "records", lambda target: [])
    assert auto.choose_head(target) is None
    assert "me/other is published for it, but key vocab_size" in capsys.readouterr().err


AUTO = f"from eagle3_llama.heads import auto; auto.PUBLISHED = auto.Path({{!r}}); {CLI}"


@pytest.mark.thorough
def test_auto_from_the_hub(hub, tmp_path):
    """From nothing to text by the list and the model's repository; a head beside the model on the hub."""
    listed = tmp_path / "heads.json"
    listed.write_text(json.dumps({"heads": [{"repo": "me/head", "target": "you/tiny", "source": "here"}]}))
    code = AUTO.format(str(listed))
    done = generate(hub.env(tmp_path), "hf:me/tiny-GGUF", "auto", code=code)
    assert "[head for tiny-Q8_0.gguf: me/head, published for you/tiny]" in done.stderr
    [gguf] = (tmp_path / "cache/heads").glob("*.gguf")
    hub.repositories["me/tiny-GGUF"]["eagle3-tiny.gguf"] = gguf.read_bytes()
    for tests in (1, 0):  # it is tried once
        done = generate(hub.env(tmp_path), "hf:me/tiny-GGUF", "auto", code=code)
        assert "[head for tiny-Q8_0.gguf: eagle3-tiny.gguf of me/tiny-GGUF, beside it]" in done.stderr
        assert done.stderr.count("10 of 10 texts") == tests


def test_the_list():
    """Each entry has a source, and names that a model's metadata can be compared with."""
    listed = auto.published()
    assert len(listed) >= 8 and len({e.repo for e in listed}) == len(listed)
    for e in listed:
        assert e.source.startswith("https://") and e.layout, e
        assert names.HubName.parse(f"hf:{e.repo}") and names.HubName.parse(f"hf:{e.target}")
