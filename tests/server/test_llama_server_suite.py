"""scripts/measure/llama_server.py: its launcher, its changes to llama.cpp's tests, the page."""

import fnmatch
import importlib
import json
import re

import pytest
from paths import ROOT


@pytest.fixture(scope="module")
def suite():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts" / "measure")
        yield importlib.import_module("llama_server")


def test_options_are_ours(suite):
    given = "--port 1 --temp 0.8 --hf-repo x --no-slots --ctx-size 512 --parallel 2 --reasoning off"
    file = ["--chat-template-file", "a b"]
    assert suite.translated([*given.split(), *file]) == [
        *"--port 1 --temp 0.8 --chat-template-kwargs".split(),
        json.dumps({"enable_thinking": False}),
        *file,
        *"--n-parallel 2 --n-ctx 256".split(),
    ]
    shared = suite.translated("--kv-unified --ctx-size 512 --parallel 2".split())
    assert shared == "--n-parallel 2 --n-ctx 512".split()  # one of the slots may have all of it
    for odd in (["--lora", "x"], ["--chat-template", "llama3"]):
        with pytest.raises(SystemExit, match=f"no option {' '.join(odd)}"):
            suite.translated(odd)
    (_, name, *_) = suite.translated(["--chat-template", "This is one"])
    with open(name, encoding="utf-8") as text:
        assert text.read() == "This is one"


def test_the_suite_is_the_one_that_is_adapted(suite, tmp_path):
    """Each change and each line of NOT_OURS still meets a test of the pinned tree."""
    folder = suite.copy_of_suite(tmp_path)
    changed = {name: (folder / "unit" / f"test_{name}.py").read_text() for name in suite.FILES}
    for pattern, _ in suite.ADAPTED:
        assert not any(re.search(pattern, text) for text in changed.values()), pattern
    assert any('["prompt_tokens"] > 0' in text for text in changed.values())
    names = {file: re.findall(r"def (test_\w+)", text) for file, text in changed.items()}
    tests = {f"{file}::{test}" for file, of_file in names.items() for test in of_file}
    for pattern in suite.NOT_OURS:
        assert fnmatch.filter(tests, pattern), pattern


@pytest.mark.thorough
def test_a_file_of_the_suite_runs(suite, tmp_path):
    for needed in ("requests", "filelock"):
        pytest.importorskip(needed, reason=f"needs {needed}, of the extra `clients`")
    folder = suite.copy_of_suite(tmp_path)
    found = {r.name: r.outcome for r in suite.results_of(folder, ["tokenize"])}
    assert found["tokenize::test_tokenize_detokenize"] == "passed", found
    assert found["tokenize::test_tokenize_with_bos"] == "not applicable", found


def test_each_file_of_the_suite_is_run_or_not_for_a_reason(suite, tmp_path):
    there = {
        path.stem.removeprefix("test_") for path in (suite.copy_of_suite(tmp_path) / "unit").glob("test_*.py")
    }
    assert there == {*suite.FILES, *suite.NOT_RUN} and not set(suite.FILES) & set(suite.NOT_RUN)


def test_the_page_is_what_the_data_says(suite):
    """Of each file that is run, without a failure, with reasons of NOT_OURS or of the suite itself."""
    data = json.loads(suite.DATA.read_text())
    assert suite.PAGE.read_text() == suite.page(data)
    assert set(data["files"]) == set(suite.FILES) and data["tree"] == suite.fetch.COMMIT
    skipped = "This test fails on linux, need to be fixed"
    for name, file in data["files"].items():
        assert not file["failed"], name
        assert file["not applicable"].keys() <= {*suite.NOT_OURS.values(), skipped}, name


def test_results_become_rows(suite, tmp_path, monkeypatch):
    for name in ("DATA", "PAGE"):
        monkeypatch.setattr(suite, name, tmp_path / name)
    made = [("a::one", "passed", ""), ("a::two", "not applicable", "why"), ("b::x", "failed", "it broke")]
    results = [suite.Result(*one) for one in made]
    suite.record(results, ["a", "b"], "abc")
    suite.record([suite.Result("a::one", "passed", "")], ["a"], "abc")  # one file again
    text = (tmp_path / "PAGE").read_text()
    for row in ("| a | 1 | 0 | 0 |", "| b | 0 | 0 | 1 |", "| all | 1 | 0 | 1 |", "- `b::x`: it broke"):
        assert row in text, row
