"""docs/states.md: each state that is kept notices when something that it depends on is another."""

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
import tiny_models
from hub_tools import files_of
from paths import ROOT
from training import lines, make_shards

from eagle3_llama import EagleError, EagleLlama
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.errors import ErrorKind
from eagle3_llama.heads import fitted
from eagle3_llama.llama import model_costs
from eagle3_llama.runtime import variants

PAGE = (ROOT / "eagle3_llama/docs/states.md").read_text(encoding="utf-8")
ROWS = {
    re.sub(r" \(.*", "", name): dependencies.split(", ")
    for name, dependencies in re.findall(r"^\| (.+?) \| (.+?) \|", PAGE, re.MULTILINE)
    if name != "state"
}
CTX = {"n_ctx": 128, "n_batch": 32, "n_threads": 1, "verbose": False}


def pair(folder, seed=0, head_seed=1):
    """A target and a head, of the same sizes whatever their seeds, under the same names.

    Contexts of more than 256 tokens use the target's long rope factors.
    """
    folder.mkdir()
    target, head = folder / "target.gguf", folder / "head.gguf"
    tiny_models.target(target, seed=seed, n_ctx=256, factors=True)
    return str(target), str(tiny_models.head(head, seed=head_seed))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """The files, and the same with another model and another head."""
    d = tmp_path_factory.mktemp("pairs")
    return {"": pair(d / "a"), "model": pair(d / "b", seed=9), "head": pair(d / "c", head_seed=9)}


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    return str(tiny_models.tiny_lora(tmp_path_factory.mktemp("lora") / "lora.gguf"))


def changes(*rows):
    """Rows of the page that a test changes; all are in COVERED at the end."""
    COVERED.extend(rows)
    return [(row, what) for row in rows for what in ROWS[row]]


COVERED: list[str] = []


@pytest.mark.parametrize("row, what", changes("slot of the server", "texts of a client's text memory"))
def test_slots(pairs, lora, row, what):
    common = {"n_ctx": 128, "n_threads": 1, "n_parallel": 2, "text_memory": 1 << 16}
    change = {
        "flash attention": {"flash_attn": False},
        "windows": {"swa_full": False},
        "cache types": {"cache_type_k": "f32"},
        "adapter": {"lora": lora},
        "slots": {"n_parallel": 1},
        "rope settings": {"n_ctx": 400},
    }.get(what, {})
    usual = {"flash_attn": True}
    with Batcher(BatchSettings(*pairs[""], **common, **usual)) as batcher:
        with batcher.request() as llm:
            llm("ab", max_tokens=4)
        slot = next(s["id"] for s in batcher.slots() if s["n_past"])
        data = batcher.save_slot(slot, "")
        assert batcher.load_slot(slot, data, "") > 0
    with Batcher(BatchSettings(*pairs.get(what, pairs[""]), **common | usual | change)) as other:
        with pytest.raises(EagleError, match="another model, head or cache") as e:
            other.load_slot(0, data, "")
        assert e.value.kind is ErrorKind.BAD_VALUE


@pytest.mark.parametrize("row, what", changes("saved state"))
def test_saved_states(pairs, lora, row, what):
    target, head = pairs.get(what, pairs[""])
    more = {
        "overrides": {"kv_overrides": {"general.name": "other"}},
        "adapter": {"lora_path": lora},
        "rope settings": {"rope_freq_base": 500.0},
    }.get(what, {})
    with EagleLlama(pairs[""][0], eagle=pairs[""][1], n_max=2, **CTX) as llm:
        llm("ab", max_tokens=4)
        state = llm.save_state()
        llm.load_state(state)
    with EagleLlama(target, eagle=head, n_max=2, **CTX, **more) as other:
        if what == "head":
            other.load_state(state)
            assert other.n_tokens == state.n_tokens
            other.generate([1, 60])  # it goes on
            return
        said = (
            "rope_freq_base was unset and is 500.0" if what == "rope settings" else "belongs to another model"
        )
        with pytest.raises(EagleError, match=said) as e:
            other.load_state(state)
        assert e.value.kind is ErrorKind.BAD_VALUE and other.n_tokens == 0


@pytest.mark.parametrize("row, what", changes("measured costs"))
def test_costs(pairs, lora, row, what, monkeypatch):
    files = pairs.get(what, pairs[""])
    change = {
        "threads": {"n_threads": 2},
        "batch size": {"n_batch": 64},
        "cache types": {"type_k": 0, "type_v": 0},
        "adapter": {"lora_path": lora},
    }.get(what, {})
    keys = []
    for paths, settings in ((pairs[""], {}), (files, change)):
        if settings is change and what == "placement":
            monkeypatch.setenv("EAGLE3_LLAMA_INTERLEAVE", "0")
        with EagleLlama(paths[0], eagle=paths[1], n_max=2, **CTX | settings) as llm:
            keys.append(model_costs.cost_key(llm, paths[1]))
    assert str(keys[0]) != str(keys[1])


@pytest.mark.parametrize("row, what", changes("CPU variant"))
def test_variants(row, what, tmp_path, monkeypatch):
    lib = tmp_path / "lib"
    lib.mkdir()
    (lib / "libx.so").write_text("x")
    before = variants._key(lib, "")
    if what == "processor":
        monkeypatch.setattr(variants.machine, "cpu", lambda: "another")
    elif what == "library":
        (lib / "libx.so").write_text("xy")
    else:
        assert variants.VARIABLE == what
    assert variants._key(lib, "haswell" if what == variants.VARIABLE else "") != before


@pytest.fixture
def training(tiny, tmp_path):
    target = tmp_path / "target.gguf"
    shutil.copy(tiny.targets[0], target)
    ids = [{"toks": [1, *range(100 + i, 140 + i)], "prompt": 8} for i in range(12)]
    mine = {
        "prompts": (lines(tmp_path / "p.jsonl", ["a", "b"]),),
        "conversations": (lines(tmp_path / "c.jsonl", ids),),
    }
    return dataclasses.replace(
        tiny, targets=(str(target),), out=str(tmp_path / "out"), max_tokens=256, draft_vocab=48, **mine
    )


def change_file(settings, what):
    """Other content under the same name, of the same size where it is a text."""
    if what == "target":
        tiny_models.target(settings.targets[0], seed=9)
        return settings
    [path] = getattr(settings, what)
    text = Path(path).read_text()
    Path(path).write_text(text.replace('"a"', '"z"') if what == "prompts" else text.replace("120", "121"))
    assert Path(path).stat().st_size == len(text.encode())
    return settings


@pytest.mark.thorough
@pytest.mark.parametrize("row, what", changes("shard of training data"))
def test_shards(training, row, what):
    pytest.importorskip("torch")
    from eagle3_llama.train.shards import Shards

    [first, *_] = make_shards(training, training.out)
    if what == "number":
        shards = Shards(first.parent, training)
        first.rename(shards.path(7))
        with pytest.raises(EagleError, match="made with other settings or files"):
            shards._check(shards.path(7))
        return
    if what == "data settings":
        changed = dataclasses.replace(training, n_predict=9)
    else:
        changed = change_file(training, what)
    with pytest.raises(EagleError, match="made with other settings or files") as e:
        Shards(first.parent, changed)
    assert e.value.kind is ErrorKind.BAD_ARGUMENT


@pytest.mark.thorough
@pytest.mark.parametrize("row, what", changes("checkpoint of a training"))
def test_checkpoints(training, row, what, tmp_path):
    pytest.importorskip("torch")
    from eagle3_llama.train import checkpoint
    from eagle3_llama.train.data import Corpus
    from eagle3_llama.train.export import write
    from eagle3_llama.train.loop import Trainer

    out = Path(training.out)
    corpus = Corpus(make_shards(training, out), training.layers)
    trainer = Trainer(training, corpus, out)
    d2t, head = trainer.head.d2t.numpy(), tmp_path / "init"
    write(trainer.head, corpus.layers, head)
    settings = dataclasses.replace(training, init_from=str(head))
    place = tmp_path / "checkpoint.pt"
    checkpoint.save(place, checkpoint.identity(settings, corpus, d2t), {"head": {}})
    assert checkpoint.load(place, checkpoint.identity(settings, corpus, d2t)) is not None
    if what == "settings":
        settings = dataclasses.replace(settings, lr=0.5)
    elif what == "init_from":
        (head / "config.json").write_text("{}")
    elif what == "data":
        corpus.digest = lambda: "another"
    elif what == "draft vocabulary":
        d2t = d2t[::-1]
    else:
        change_file(settings, what)
    with pytest.raises(EagleError, match="was made with other (settings|files|data)") as e:
        checkpoint.load(place, checkpoint.identity(settings, corpus, d2t))
    assert e.value.kind is ErrorKind.BAD_ARGUMENT


@pytest.mark.parametrize("row, what", changes("prepared head"))
def test_prepared_heads(pairs, row, what, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_LLAMA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("eagle3_llama.heads.self_test.is_useless", lambda _: False)  # it is a random one
    target, head = (tmp_path / "mine" / Path(p).name for p in pairs[""])
    (tmp_path / "mine").mkdir()
    for place, file in zip((target, head), pairs[""]):
        shutil.copy(file, place)
    (tmp_path / "head").mkdir()
    head = head.rename(tmp_path / "head" / head.name)
    made = []
    real = fitted._make
    monkeypatch.setattr(fitted, "_make", lambda *a: made.append(1) or real(*a))
    for _ in range(2):
        fitted.fit(files_of(head.parent), target)
    assert made == [1]
    if what == "version":
        monkeypatch.setattr(fitted, "__version__", "another")
    elif what == "content":
        [record] = fitted.records(target)
        tiny_models.head(record.path, seed=3)
    else:
        which = "model" if what == "target" else "head"
        shutil.copy(pairs[which][what == "head"], target if what == "target" else head)
    fitted.fit(files_of(head.parent), target)
    assert made == [1, 1]


def test_all_rows_are_changed():
    assert sorted(COVERED) == sorted(ROWS)
