"""Names of models and heads: what they say, and which files of a repository they mean."""

import re
import sys
from pathlib import Path

import pytest
from hub_tools import made  # noqa: F401 - a fixture

from eagle3_llama import EagleError, EagleLlama, ErrorKind
from eagle3_llama.common import hub as names
from eagle3_llama.common import model_names
from eagle3_llama.heads.hub import fetch_head

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
    with pytest.raises(EagleError, match="^hf: names need huggingface_hub: (pip install|python3) ") as e:
        EagleLlama("hf:me/tiny-GGUF")
    assert e.value.kind is ErrorKind.LIBRARY and re.search(r"\[hub\]|--extra hub", str(e.value))
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
