"""Models and heads by name, against a small local hub: fetched, converted, tried, kept, found by `auto`."""

import json
import shutil
import sys
from pathlib import Path

import heads
import pytest
import tiny_models
from checkpoints import write_head
from commands import run
from converting import gains
from hub_server import Hub
from test_variants import shared

from eagle3_llama import EagleError, EagleLlama, ErrorKind
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.common import hub as names
from eagle3_llama.common import model_names
from eagle3_llama.common.gguf_reader import read_gguf
from eagle3_llama.heads import auto, fitted, self_test
from eagle3_llama.heads.fitted import HeadFiles, fit
from eagle3_llama.heads.hub import fetch_head
from eagle3_llama.server.settings import ServerSettings

CLI = "import eagle3_llama.cli.main as m; m.main()"
SAY = ["-p", "x", "--raw", "-n", "16", "-t", "1", "-c", "256", "--temp", "0"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(target's file, folder of a head's checkpoint, folder of one for another target)."""
    d = tmp_path_factory.mktemp("made")
    target = tiny_models.target(d / "target.gguf", n_layer=12, ends=False)
    wide = tiny_models.target(d / "wide.gguf", n_layer=12, n_embd=96)
    head = heads.make("SpecForge", shared(target))
    write_head(d / "head", head.config, head.tensors)
    other = heads.make("SafeAILab", shared(target))
    write_head(d / "other", other.config | {"vocab_size": 999}, other.tensors)
    return target, d / "head", d / "other", wide


@pytest.fixture
def hub(made):
    """A hub with a model in one file, a model in two, a head, a head of another model, and a pickle."""
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    target, head, other, _ = made
    model = target.read_bytes()
    checkpoint = {p.name: p.read_bytes() for p in head.iterdir()}
    made_hub = Hub(
        {
            "me/tiny-GGUF": {"README.md": b"", "tiny-Q8_0.gguf": model, "mmproj-tiny-F16.gguf": b"no model"},
            "me/many-GGUF": {f"many-{f}.gguf": model for f in ("Q8_0", "Q4_0", "F16")},
            "me/head": checkpoint,
            "me/other": {p.name: p.read_bytes() for p in other.iterdir()},
            "me/pickled": {"config.json": checkpoint["config.json"], "pytorch_model.bin": b"not a pickle"},
        }
    )
    yield made_hub
    made_hub.close()


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache of its own."""
    monkeypatch.setenv("EAGLE3_LLAMA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def child(env, *args, code=CLI, status=0):
    return run([sys.executable, "-c", code, *args], status, env=env)


def generate(env, model, eagle, *more, **settings):
    return child(env, "generate", "--model", model, "--eagle", eagle, *SAY, *more, **settings)


def left(folder):
    """The names of what is in a folder, none if there is no folder."""
    return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []


def files_of(folder, name="me/head"):
    return HeadFiles(name, {p.name: p for p in folder.iterdir()})


# -- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, parts",
    [
        ("hf:a/b", ("a/b", None, None)),
        ("hf:a/b-1.7B.x/c/d-Q4_0.gguf", ("a/b-1.7B.x", "c/d-Q4_0.gguf", None)),
        ("hf:a/b:Q4_K_M", ("a/b", None, "Q4_K_M")),
    ],
)
def test_names(text, parts):
    found = names.HubName.parse(text)
    assert (found.repo, found.file, found.format) == parts


@pytest.mark.parametrize(
    "text", ["hf:", "hf:a", "hf:a/b/../c", "hf:a/b/", "hf:a/b:", "hf:a/b//c", "hf:a/b/c:Q4_0"]
)
def test_no_names(text):
    with pytest.raises(EagleError, match="expected hf:OWNER/REPO, ") as e:
        names.HubName.parse(text)
    assert e.value.kind is ErrorKind.BAD_ARGUMENT


def test_paths_stay_paths(tmp_path):
    for path in ("model.gguf", "./hf:a/b", str(tmp_path / "auto"), "hf/auto"):
        assert model_names.model(path) == path == model_names.head(path, "target.gguf")
    assert model_names.head(None, "target.gguf") is None


def test_without_huggingface_hub(monkeypatch, made):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(EagleError, match="^hf: names need huggingface_hub: pip install ") as e:
        EagleLlama("hf:me/tiny-GGUF")
    assert e.value.kind is ErrorKind.LIBRARY and "[hub]" in str(e.value)
    with pytest.raises(EagleError, match="hf: names need huggingface_hub"):
        EagleLlama(made[0], eagle="hf:me/head")


# -- which file ---------------------------------------------------------------------------------------------

FORMATS = ["m-Q8_0.gguf", "m-Q4_0.gguf", "m-UD-Q4_K_XL.gguf", "m-Q4_K_S.gguf"]


def test_which_format():
    assert names.choose(FORMATS, None, "a/b", []) == "m-Q4_0.gguf"
    assert names.choose([*FORMATS, "q4_k_m/m.gguf"], None, "a/b", []) == "q4_k_m/m.gguf"
    assert names.choose(FORMATS, "Q4_K_S", "a/b", []) == "m-Q4_K_S.gguf"
    assert names.choose(["x.gguf"], None, "a/b", []) == "x.gguf"
    with pytest.raises(EagleError, match="no file of a/b for Q4_K: it has m-Q8_0.gguf, m-Q4_0.gguf"):
        names.choose(FORMATS, "Q4_K", "a/b", [])  # no prefix of another format
    with pytest.raises(EagleError, match="several files of a/b: name one of x.gguf, y.gguf"):
        names.choose(["x.gguf", "y.gguf"], None, "a/b", [])
    with pytest.raises(EagleError, match="no file of a/b: it has README.md"):
        names.choose([], None, "a/b", ["README.md"])
    with pytest.raises(EagleError, match="and 2 more"):
        names.choose([f"{i}.gguf" for i in range(names.MOST_SHOWN + 2)], None, "a/b", [])


def test_split_models():
    split = ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf", "n-00002-of-00002.gguf"]
    assert names.firsts(split) == split[:1]
    assert names.parts(split[0], split) == split[:2] and names.parts("x.gguf", split) == ["x.gguf"]
    with pytest.raises(EagleError, match="m-Q8_0-00002-of-00002.gguf is not beside it"):
        names.parts(split[0], split[:1])


class Listed(names.Repository):
    """A repository that is only a listing. Fetches nothing."""

    def __init__(self, *listed):
        self.repo, self.listed, self.fetched = "a/b", list(listed), []

    def files(self):
        return self.listed

    def fetch(self, name, most=None):
        self.fetched.append(name)
        return Path(name)


def test_which_model(capsys):
    assert Listed("m.gguf", "mmproj-m.gguf", "eagle3-m.gguf", "m-imatrix.gguf").fetch_model() == Path(
        "m.gguf"
    )
    assert capsys.readouterr().err == ""
    assert Listed(*FORMATS).fetch_model() == Path("m-Q4_0.gguf")
    assert "[hf:a/b has 4 models: took m-Q4_0.gguf]" in capsys.readouterr().err
    two = Listed("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    assert two.fetch_model() == Path("m-00001-of-00002.gguf") and two.fetched == two.listed
    assert Listed("m-Q8_0.gguf", "mmproj-Q8_0.gguf").fetch_model("*Q8_0.gguf") == Path("m-Q8_0.gguf")
    assert Listed("m.gguf", "mmproj-F16.gguf").fetch_model("mmproj-F16.gguf") == Path("mmproj-F16.gguf")
    with pytest.raises(
        EagleError, match="several files of a/b for .*: name one of m-Q4_0.gguf, m-Q4_K_S.gguf"
    ):
        Listed("m-Q4_0.gguf", "m-Q4_K_S.gguf").fetch_model("*Q4*.gguf")
    with pytest.raises(EagleError, match="no file of a/b: it has mmproj-m.gguf"):
        Listed("mmproj-m.gguf").fetch_model()


def test_names_from_a_listing_stay_inside():
    inside = names._is_inside
    assert inside("a.gguf") and inside("sub/a b.gguf")
    for name in ("../a.gguf", "a/../../b", "/etc/a.gguf", "C:/a.gguf", "a\\..\\b", "a//b", "", "a\nb", "./a"):
        assert not inside(name), name


@pytest.mark.parametrize(
    "listed, wanted, fetched",
    [
        (["eagle3-m-F16.gguf", "eagle3-m-Q8_0.gguf", "m-Q8_0.gguf"], "hf:a/b", ["eagle3-m-Q8_0.gguf"]),
        (["eagle3-m-F16.gguf", "eagle3-m-Q8_0.gguf"], "hf:a/b:F16", ["eagle3-m-F16.gguf"]),
        (["config.json", "model.safetensors", "a.bin"], "hf:a/b", ["config.json", "model.safetensors"]),
        (["config.json", "eagle.safetensors"], "hf:a/b", ["config.json", "eagle.safetensors"]),
        (["config.json", "a.bin", "model.safetensors"], "hf:a/b/a.bin", ["config.json", "a.bin"]),
        (["head.gguf", "README.md"], "hf:a/b", ["head.gguf"]),
    ],
)  # fmt: skip
def test_which_files_are_a_head(monkeypatch, listed, wanted, fetched):
    repository = Listed(*listed)
    monkeypatch.setattr("eagle3_llama.heads.hub.Repository", lambda repo: repository)
    fetch_head(names.HubName.parse(wanted))
    assert repository.fetched == fetched


@pytest.mark.parametrize(
    "listed, wanted, said",
    [
        (["config.json", "pytorch_model.bin"], "hf:a/b", "only as a pickle, .* hf:a/b/pytorch_model.bin"),
        (
            ["config.json", "a.safetensors", "b.safetensors"],
            "hf:a/b",
            "several files .*a.safetensors, b.safe",
        ),
        (["README.md"], "hf:a/b", "no file of a/b is a head: it has README.md"),
        (["README.md"], "hf:a/b/README.md", "hf:a/b/README.md is no head"),
        (["a.bin"], "hf:a/b/a.bin", "config.json"),
    ],
)
def test_what_is_no_head(monkeypatch, listed, wanted, said):
    monkeypatch.setattr("eagle3_llama.heads.hub.Repository", lambda repo: Listed(*listed))
    with pytest.raises(EagleError, match=said):
        fetch_head(names.HubName.parse(wanted))


# -- from nothing to text -----------------------------------------------------------------------------------


def test_from_nothing_to_text_and_offline(hub, tmp_path, made):
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


def test_a_pickle_is_read_by_the_converters_rule(hub, tmp_path, made):
    pytest.importorskip("torch", "2.10", reason="torch 2.10 is not installed")
    done = generate(hub.env(tmp_path), "hf:me/tiny-GGUF", "hf:me/pickled/pytorch_model.bin", status=2)
    assert "is a pickle that torch.load refuses" in done.stderr.splitlines()[-1]


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
    keys = {
        fitted._pair(files_of(h), fitted.fingerprint(t)) for h in (head, changed) for t in (target, other)
    }
    assert len(keys) == 4


def test_nothing_stays_of_what_is_broken_off(cache, made, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(self_test, "self_test", stop)
    with pytest.raises(KeyboardInterrupt):
        fit(files_of(made[1]), made[0])
    assert left(cache / "heads") == []


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


# -- auto ---------------------------------------------------------------------------------------------------


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
        assert not llm.native.has_head and tiny_models.take(llm, 4)
    said = capsys.readouterr().err.strip()
    expected = "none beside it; none in the cache; none in the list of published heads"
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
        assert batcher.base.native.has_head
        assert batcher.settings.eagle == str(alone.parent / "eagle3-c.gguf")
    assert "[head for target.gguf: eagle3-c.gguf, beside it]" in capsys.readouterr().err


def test_auto_goes_on_without_a_head_that_does_not_load(alone, capsys):
    """Its sizes fit, its tensors are not there."""
    tiny_models.head(alone.parent / "eagle3-a.gguf", d2t=tiny_models.np.arange(3, dtype="int64"))
    with pytest.warns(RuntimeWarning, match="EagleLlama decodes plainly"):
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
