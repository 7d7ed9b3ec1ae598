"""Models and heads by name, against a small local hub: fetched, converted, tried and kept."""

import hashlib
import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import tiny_models
from converting import gains
from hub_tools import CLI, SAY, cache, child, files_of, generate, hub, left, made  # noqa: F401 - fixtures too
from tiers import each

from eagle3_llama import EagleError, ErrorKind
from eagle3_llama.common.gguf_reader import read_gguf
from eagle3_llama.common.model_reader import fingerprint
from eagle3_llama.heads import fitted, self_test
from eagle3_llama.heads.fitted import HeadFiles, fit

# -- from nothing to text -----------------------------------------------------------------------------------


@pytest.mark.parametrize("more", each([False, True], quick=[False]), ids=["", "in other ways"])
def test_from_nothing_to_text_and_offline(hub, tmp_path, made, more):
    """By name and by path: the same text. The second time nothing is asked, converted or tried."""
    env = hub.env(tmp_path)
    first = generate(env, "hf:me/tiny-GGUF", "hf:me/head", "--n-max", "2")
    assert "converting me/head for tiny-Q8_0.gguf, once" in first.stderr and "10 of 10 texts" in first.stderr
    assert "accepted: " in first.stderr  # it drafted
    assert [Path(n).suffix for n in left(tmp_path / "cache/heads")] == [".gguf", ".json"]
    asked = len(hub.asked)
    hub.close()
    second = generate({**env, "HF_HUB_OFFLINE": "1"}, "hf:me/tiny-GGUF", "hf:me/head", "--n-max", "2")
    assert second.stdout == first.stdout and len(hub.asked) == asked
    assert "converting" not in second.stderr and "self-test" not in second.stderr
    if not more:
        return
    unreached = generate(env, "hf:me/tiny-GGUF", "hf:me/head", "--n-max", "2")
    assert unreached.stdout == first.stdout
    assert "[cannot fetch me/head: the Hub cannot be reached (" in unreached.stderr
    assert "taking what was fetched before]" in unreached.stderr
    auto = generate({**env, "HF_HUB_OFFLINE": "1"}, "hf:me/tiny-GGUF", "auto")
    assert "[head for tiny-Q8_0.gguf: me/head, in the cache]" in auto.stderr and auto.stdout == first.stdout
    plain = child(env, "generate", "--model", made[0], *SAY)
    assert plain.stdout == first.stdout
    offline = generate({**env, "HF_HUB_OFFLINE": "1"}, "hf:me/many-GGUF", "auto", status=2)
    assert "cannot fetch me/many-GGUF: it was not fetched before" in offline.stderr
    assert offline.stderr.count("\n") == 1, offline.stderr


RESUMES = "import huggingface_hub.constants as c; c.DOWNLOAD_CHUNK_SIZE = 4096; " + CLI


def test_a_broken_download_is_resumed(hub, tmp_path, made):
    """From where it broke off. Chunks are small, because only whole ones are kept."""
    hub.break_off = {"tiny-Q8_0.gguf"}
    done = child(hub.env(tmp_path), "info", "hf:me/tiny-GGUF", code=RESUMES)
    assert "target, architecture llama" in done.stdout
    whole, rest = hub.gets("tiny-Q8_0.gguf")
    assert whole is None and int(rest.removeprefix("bytes=").removesuffix("-")) > 0
    [blob] = (tmp_path / "hf/hub/models--me--tiny-GGUF/blobs").iterdir()
    assert blob.read_bytes() == made[0].read_bytes()


@pytest.mark.thorough
def test_a_wrong_pair_is_refused_with_one_line(hub, tmp_path):
    for head, said in (("hf:me/other", "vocab_size"), ("hf:me/pickled", "hf:me/pickled/pytorch_model.bin")):
        done = generate(hub.env(tmp_path), "hf:me/tiny-GGUF", head, status=2)
        error = done.stderr.splitlines()[-1]
        assert error.startswith("error: ") and said in error and "Traceback" not in done.stderr
        assert left(tmp_path / "cache/heads") == []
    hub.sizes["config.json"] = 1 << 40
    large = generate(hub.env(tmp_path), "hf:me/tiny-GGUF", "hf:me/head", status=2)
    assert "error: me/head/config.json has 1099511627776 bytes" in large.stderr
    nothing = generate(hub.env(tmp_path), "hf:me/tiny-GGUF", "hf:me/none", status=2)
    assert "cannot fetch me/none: the Hub has no such repository" in nothing.stderr
    assert nothing.stderr.count("\n") == 1


@pytest.mark.thorough
def test_a_pickle_is_read_by_the_converters_rule(hub, tmp_path, made):
    pytest.importorskip("torch", "2.10", reason="torch 2.10 is not installed")
    done = generate(hub.env(tmp_path), "hf:me/tiny-GGUF", "hf:me/pickled/pytorch_model.bin", status=2)
    assert "is a pickle that torch.load refuses" in done.stderr.splitlines()[-1]


@pytest.mark.thorough
def test_commands_take_names(hub, tmp_path):
    """convert, compare and info; bench has both kinds of names."""
    env, out = hub.env(tmp_path), tmp_path / "out.gguf"
    child(env, "convert", "hf:me/head", "--model", "hf:me/tiny-GGUF", "--out", out)
    assert "EAGLE-3 head" in child(env, "info", out).stdout
    hub.repositories["me/ggufs"] = {"eagle3-tiny.gguf": out.read_bytes()}
    assert "EAGLE-3 head" in child(env, "info", "hf:me/ggufs/eagle3-tiny.gguf").stdout
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"x"\n')
    few = ["--prompts", prompts, "-n", "4", "-t", "1", "-c", "256", "--n-max", "1"]
    done = child(env, "bench", "-m", "hf:me/tiny-GGUF", "--eagle", "hf:me/ggufs", *few)
    assert "eagle" in done.stdout
    child(env, "compare", "hf:me/ggufs", "-m", "hf:me/tiny-GGUF")


FROM_PRETRAINED = """
import sys
from eagle3_llama import EagleLlama, EagleError
llm = EagleLlama.from_pretrained("me/many-GGUF", filename="*Q4_0.gguf", eagle="me/head", n_ctx=128, n_max=2,
                                 n_threads=1, verbose=False)
print(llm("a", max_tokens=8, temperature=0)["usage"]["completion_tokens_details"])
print(llm.model_path)
for wanted in ("*Q*.gguf", "*none*"):
    try:
        EagleLlama.from_pretrained("me/many-GGUF", filename=wanted)
    except ValueError as e:
        print(type(e).__name__, e)
from eagle3_llama.server.settings import ServerSettings
s = ServerSettings(model="hf:me/many-GGUF:Q8_0", eagle="hf:me/head")
print(s.model, s.eagle)
from eagle3_llama.train import TrainSettings
t = TrainSettings(targets=("hf:me/many-GGUF:Q8_0",), out="out", init_from="hf:me/head")
print(t.targets[0], t.init_from)
"""


@pytest.mark.thorough
def test_from_python_and_in_settings(hub, tmp_path):
    """from_pretrained() with globs that mean one file, several, none; settings of server and training."""
    done = child(hub.env(tmp_path), code=FROM_PRETRAINED).stdout.splitlines()
    assert "rejected_prediction_tokens" in done[0] and done[1].endswith("many-Q4_0.gguf")
    assert done[2].startswith("TargetError several files of me/many-GGUF for *Q*.gguf: name one of many-Q4_0")
    assert done[3].startswith("TargetError no file of me/many-GGUF for *none*: it has many-F16.gguf")
    model, eagle = done[4].split()
    assert model.endswith("many-Q8_0.gguf") and Path(eagle).parent == tmp_path / "cache/heads"
    target, folder = done[5].split()
    assert target == model and (Path(folder) / "config.json").is_file()


ELSEWHERE = """
import sys
from eagle3_llama import EagleLlama
llm = EagleLlama.from_pretrained("me/tiny-GGUF", eagle="me/head", cache_dir=sys.argv[1], n_ctx=128, n_max=2,
                                 n_threads=1, verbose=False)
print(llm.model_path)
"""


def test_the_head_goes_where_its_model_goes(hub, tmp_path):
    """Into the cache_dir of from_pretrained()."""
    done = child(hub.env(tmp_path), tmp_path / "elsewhere", code=ELSEWHERE).stdout
    assert done.startswith(str(tmp_path / "elsewhere"))
    assert {"models--me--head", "models--me--tiny-GGUF"} <= set(left(tmp_path / "elsewhere"))
    assert not [n for n in left(tmp_path / "hf/hub") if n.startswith("models")]


# -- pairs --------------------------------------------------------------------------------------------------


def test_a_pair_is_made_once(cache, made, monkeypatch):
    """The record is written last; the files are known by their content."""
    target, head, _, _ = made
    path = fit(files_of(head), target)
    assert path.parent == cache / "heads" and left(path.parent) == [path.name, path.with_suffix(".json").name]
    monkeypatch.setattr(fitted, "convert", None)  # not called again
    assert fit(files_of(head), target) == path
    assert fit(HeadFiles("copy", files_of(head).files), target) == path
    assert [r.path for r in fitted.records(target)] == [str(path)]
    path.with_suffix(".json").write_text("{")
    assert fitted.records(target) == []


def test_another_file_is_another_pair(cache, made, tmp_path):
    target, head, _, _ = made
    changed = tmp_path / "head"
    shutil.copytree(head, changed)
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"rope_theta": 12345.0}))
    other = tiny_models.target(tmp_path / "target.gguf", seed=9, n_layer=12)  # only its weights differ
    keys = {fitted._pair(files_of(h), fingerprint(t)) for h in (head, changed) for t in (target, other)}
    assert len(keys) == 4


def test_nothing_stays_of_what_is_broken_off(cache, made, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(self_test, "self_test", stop)
    with pytest.raises(KeyboardInterrupt):
        fit(files_of(made[1]), made[0])
    assert left(cache / "heads") == []


def test_two_at_once_make_a_pair_once(cache, made, monkeypatch):
    """Threads of one process, as processes in two containers with one cache folder: one waits."""
    tried, results = [], []

    def slow(*_, **__):
        tried.append(1)
        time.sleep(0.5)
        return gains(self_test.neighbours([2, 6, 9], 12), best=None)

    monkeypatch.setattr(self_test, "self_test", slow)
    work = lambda: results.append(fit(files_of(made[1]), made[0]))
    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(tried) == 1 and len(set(results)) == 1 and len(results) == 3


def test_a_head_that_was_damaged_in_the_cache_is_made_again(cache, made):
    path = fit(files_of(made[1]), made[0])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert fitted.records(made[0]) == []
    assert fit(files_of(made[1]), made[0]) == path and path.read_bytes() == whole


def in_the_hubs_cache(folder, file):
    """The file as huggingface_hub keeps it: a link to a blob that is called by its hash."""
    blob = folder / "models--me--head/blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
    link = folder / "models--me--head/snapshots/main" / file.name
    for place in (blob, link):
        place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, blob)
    link.symlink_to(Path("../../blobs") / blob.name)
    return link


def test_a_verdict_about_a_damaged_file_is_not_kept(cache, made, monkeypatch, tmp_path):
    """In the Hub's cache a file's name is the hash of what it should have."""
    links = {p.name: in_the_hubs_cache(tmp_path, p) for p in made[1].iterdir()}
    head = HeadFiles("me/head", links)
    report = gains(self_test.neighbours([2, 6, 9], 12), best=None)
    chance = self_test.Report(report.positions, 0.9, report.trials)
    monkeypatch.setattr(self_test, "self_test", lambda *_, **__: chance)
    blob = links["model.safetensors"].resolve()
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    with pytest.raises(EagleError, match=f"is damaged: remove {blob}") as e:
        fit(head, made[0])
    assert e.value.kind is ErrorKind.BAD_FILE and left(cache / "heads") == []
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    with pytest.raises(EagleError, match="does not fit"):
        fit(head, made[0])
    assert [Path(n).suffix for n in left(cache / "heads")] == [".json"]


def test_links_of_others_do_not_name_their_content(tmp_path, made):
    """Only the Hub's own names are trusted: not any link whose path has "snapshots" in it."""
    link = in_the_hubs_cache(tmp_path, made[0])
    assert fingerprint(link) == link.resolve().name
    others = [tmp_path / "snapshots" / name for name in ("a.gguf", "b.gguf")]
    others[0].parent.mkdir()
    for other, file in zip(others, (made[0], made[3])):
        shutil.copy(file, tmp_path / file.name)
        other.symlink_to(tmp_path / file.name)
    assert fingerprint(others[0]) == fingerprint(made[0]) != fingerprint(others[1])
    others[1].unlink()
    (tmp_path / "o").mkdir()
    shutil.copy(made[3], tmp_path / "o" / made[0].name)
    others[1].symlink_to(tmp_path / "o" / made[0].name)  # another file of the same name
    assert fingerprint(others[1]) != fingerprint(others[0])


def test_a_cache_that_cannot_be_written(made, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EAGLE3_LLAMA_CACHE", str(tmp_path / "file"))
    with pytest.raises(EagleError, match="cannot write .*/heads: Not a directory") as e:
        fit(files_of(made[1]), made[0])
    assert e.value.kind is ErrorKind.BAD_FILE


def test_a_useless_head_is_refused_and_not_tried_again(cache, made, monkeypatch):
    """What stays says why; no head does."""
    tried = []

    def chance(*_, **__):
        tried.append(1)
        report = gains(self_test.neighbours([2, 6, 9], 12), best=None)
        return self_test.Report(report.positions, 0.9, report.trials)

    monkeypatch.setattr(self_test, "self_test", chance)
    for _ in range(2):
        with pytest.raises(
            EagleError, match="me/head does not fit target.gguf: cannot tell: .* the same token"
        ) as e:
            fit(files_of(made[1]), made[0])
        assert e.value.kind is ErrorKind.HEAD_MISMATCH and "\n" not in str(e.value)
    assert len(tried) == 1 and [Path(n).suffix for n in left(cache / "heads")] == [".json"]
    assert fitted.records(made[0]) == []


def test_better_layers_are_taken(cache, made, monkeypatch, capsys):
    """Of a checkpoint, and of a GGUF, which is converted then."""
    choices = self_test.neighbours([2, 6, 9], 12)
    monkeypatch.setattr(self_test, "self_test", lambda *_, **__: gains(choices, [3, 7, 10]))
    path = fit(files_of(made[1]), made[0])
    assert read_gguf(path).get("eagle3.target_layers") == [3, 7, 10]
    assert "the self-test prefers layers [3, 7, 10] to [2, 6, 9]" in capsys.readouterr().err
    gguf = shutil.copy(path, cache / "head.gguf")
    again = fit(HeadFiles("gguf", {"head.gguf": Path(gguf)}), made[0])
    assert again not in (path, Path(gguf)) and again.parent == cache / "heads"
