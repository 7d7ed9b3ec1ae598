"""What a run leaves to go on with belongs to its settings, files, data and vocabulary, and to no others."""

import dataclasses
import resource
import shutil
from pathlib import Path

import pytest
import tiny_models
from training import lines, make_shards

from eagle3_llama import EagleError
from eagle3_llama.errors import ErrorKind

# ruff: noqa: E402 - the imports below need torch, which may be absent
torch = pytest.importorskip("torch")

from eagle3_llama.train import checkpoint
from eagle3_llama.train.data import Corpus
from eagle3_llama.train.export import write
from eagle3_llama.train.loop import Trainer
from eagle3_llama.train.shards import Shards


def conversations(path, first):
    """As many, and as long, with other tokens."""
    return lines(
        path, [{"toks": [1, *range(100 + first + i, 140 + first + i)], "prompt": 8} for i in range(20)]
    )


@pytest.fixture
def mine(tiny, tmp_path):
    """Settings with a file of conversations that the test may change."""
    made = conversations(tmp_path / "mine.jsonl", 0)
    return dataclasses.replace(
        tiny, out=str(tmp_path / "out"), conversations=(made,), draft_vocab=48, max_tokens=256
    )


def trained(settings):
    """A run that was stopped, and the corpus that it had."""
    out = Path(settings.out)
    corpus = Corpus(make_shards(settings, out), settings.layers)
    trainer = Trainer(settings, corpus, out)
    trainer.evaluate()
    trainer.save()
    return trainer, corpus


def test_a_file_with_other_content_under_the_same_name(mine):
    """The data is refused. Without it, as the error says, the checkpoint is: its rows mean other tokens."""
    first, _ = trained(mine)
    size = Path(mine.conversations[0]).stat().st_size
    conversations(Path(mine.conversations[0]), 60)
    assert Path(mine.conversations[0]).stat().st_size == size
    with pytest.raises(EagleError, match="other settings or files: .* and the checkpoint.pt") as e:
        make_shards(mine, mine.out)
    assert e.value.kind is ErrorKind.BAD_ARGUMENT
    shutil.rmtree(Path(mine.out) / "data")
    corpus = Corpus(make_shards(mine, mine.out), mine.layers)
    again = Trainer(mine, corpus, Path(mine.out))
    assert not torch.equal(again.head.d2t, first.head.d2t)
    for read in (again.resume, again.best_head):
        with pytest.raises(EagleError, match=r"made with other files \(conversations\): choose another") as e:
            read()
        assert e.value.kind is ErrorKind.BAD_ARGUMENT


def test_other_data_of_the_same_files(mine):
    """As another machine makes it, whose sums are rounded in another way."""
    trainer, corpus = trained(mine)
    assert Trainer(mine, corpus, Path(mine.out)).resume()
    fewer = Corpus(make_shards(mine, mine.out), mine.layers)
    fewer._digest = "another"
    with pytest.raises(EagleError, match=r"made with other data \(conversations\)"):
        Trainer(mine, fewer, Path(mine.out)).resume()
    of = checkpoint.identity(mine, corpus, trainer.head.d2t.numpy()[::-1])
    with pytest.raises(EagleError, match=r"made with other data \(draft vocabulary\)"):
        checkpoint.load(trainer.path, of)


def test_another_head_to_go_on_from(mine, tmp_path):
    trainer, corpus = trained(mine)
    write(trainer.head, corpus.layers, tmp_path / "head")
    more = dataclasses.replace(mine, out=str(tmp_path / "more"), init_from=str(tmp_path / "head"))
    Path(more.out).mkdir()
    Trainer(more, corpus, Path(more.out)).save()
    assert Trainer(more, corpus, Path(more.out)).resume()
    with torch.no_grad():
        trainer.head.fc.weight.mul_(2)
    write(trainer.head, corpus.layers, tmp_path / "head")
    with pytest.raises(EagleError, match=r"made with other files \(init_from\)"):
        Trainer(more, corpus, Path(more.out)).resume()


def test_another_target_under_the_same_name(mine, tmp_path):
    target = tiny_models.target(tmp_path / "target.gguf")
    mine = dataclasses.replace(mine, targets=(str(target),))
    _, corpus = trained(mine)
    tiny_models.target(target, seed=5)
    with pytest.raises(EagleError, match="other settings or files"):
        Shards(Path(mine.out) / "data", mine)
    with pytest.raises(EagleError, match=r"made with other files \(targets\)"):
        Trainer(mine, corpus, Path(mine.out)).resume()


def test_shards_of_elsewhere(mine, tmp_path):
    """Each says what it belongs to: without settings.json too, and under another number."""
    paths = make_shards(mine, mine.out)
    (Path(mine.out) / "data/settings.json").unlink()
    other = dataclasses.replace(mine, seed=9)
    with pytest.raises(EagleError, match="other settings or files"):
        Shards(paths[0].parent, other)
    shards = Shards(paths[0].parent, mine)
    shutil.copy(paths[0], shards.path(1))
    with pytest.raises(EagleError, match="shard-00001.safetensors has data made with other settings"):
        shards._check(shards.path(1))


@pytest.mark.parametrize("which", ["checkpoint.pt", "best.pt"])
def test_what_cannot_be_read(mine, which):
    trainer, corpus = trained(mine)
    place = Path(mine.out) / which
    read = Trainer(mine, corpus, Path(mine.out))
    call = read.resume if which == "checkpoint.pt" else read.best_head
    place.write_bytes(place.read_bytes()[:500])
    with pytest.raises(EagleError, match=f"{which} is damaged, or of an earlier version") as e:
        call()
    assert e.value.kind is ErrorKind.BAD_FILE
    torch.save({"settings": "{}", "head": {}}, place)  # as earlier versions wrote it
    with pytest.raises(EagleError, match="of an earlier version"):
        call()
    place.unlink()
    if which == "best.pt":
        with pytest.raises(EagleError, match="best.pt is gone: remove .*checkpoint.pt too"):
            call()
    else:
        assert not call()


def test_a_full_disk(mine, tmp_path):
    """One error for each file that a run writes, and nothing half-written. EFBIG stands for ENOSPC."""
    trainer, corpus = trained(mine)
    out, before = tmp_path / "full", resource.getrlimit(resource.RLIMIT_FSIZE)
    out.mkdir()
    trainer.out = out

    trainer.state["best"] = -1.0  # so that it writes best.pt
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        for call in (
            trainer.save,
            trainer.evaluate,
            lambda: write(trainer.head, corpus.layers, out),
            lambda: make_shards(mine, out),
        ):
            with pytest.raises(EagleError, match="no space left for .*: free some space") as e:
                call()
            assert e.value.kind is ErrorKind.NO_SPACE and "\n" not in str(e.value)
            assert not [p for p in out.rglob("*") if p.is_file() and p.name != "settings.json"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
