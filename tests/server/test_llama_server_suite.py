"""scripts/measure/llama_server_suite.py: its launcher, its changes to llama.cpp's tests, the page."""

import fnmatch
import importlib
import json
import re

import pytest
from paths import ROOT


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts" / "measure")
        yield [importlib.import_module(f"llama_server_{name}") for name in ("suite", "launcher", "not_ours")]


def test_options_are_ours(scripts):
    launcher = scripts[1]
    given = "--port 1 --temp 0.8 --hf-repo x --no-slots --ctx-size 512 --parallel 2 --reasoning off"
    file = ["--chat-template-file", "a b"]
    assert launcher.translated([*given.split(), *file]) == [
        *"--port 1 --temp 0.8 --chat-template-kwargs".split(),
        json.dumps({"enable_thinking": False}),
        *file,
        *"--n-parallel 2 --n-ctx 256".split(),
    ]
    shared = launcher.translated("--kv-unified --ctx-size 512 --parallel 2".split())
    assert shared == "--n-parallel 2 --n-ctx 512".split()  # one of the slots may have all of it
    for odd in (["--lora", "x"], ["--chat-template", "llama3"]):
        with pytest.raises(SystemExit, match=f"no option {' '.join(odd)}"):
            launcher.translated(odd)
    (_, name, *_) = launcher.translated(["--chat-template", "This is one"])
    with open(name, encoding="utf-8") as text:
        assert text.read() == "This is one"


def test_the_suite_is_the_one_that_is_adapted(scripts, tmp_path):
    """Each change and each line of NOT_OURS still meets a test of the pinned tree."""
    suite, _, not_ours = scripts
    folder = suite.copy_of_suite(tmp_path)
    changed = {name: (folder / "unit" / f"test_{name}.py").read_text() for name in suite.FILES}
    for pattern, _ in suite.ADAPTED:
        assert not any(re.search(pattern, text) for text in changed.values()), pattern
    assert any('["prompt_tokens"] > 0' in text for text in changed.values())
    names = {file: re.findall(r"def (test_\w+)", text) for file, text in changed.items()}
    tests = {f"{file}::{test}" for file, of_file in names.items() for test in of_file}
    for pattern in not_ours.NOT_OURS:
        assert fnmatch.filter(tests, pattern), pattern


@pytest.mark.thorough
def test_a_file_of_the_suite_runs(scripts, tmp_path):
    suite = scripts[0]
    for needed in ("requests", "filelock"):
        pytest.importorskip(needed, reason=f"needs {needed}, of the extra `clients`")
    folder = suite.copy_of_suite(tmp_path)
    found = {r.name: r.outcome for r in suite.results_of(folder, ["tokenize"])}
    assert found["tokenize::test_tokenize_detokenize"] == "passed", found
    assert found["tokenize::test_tokenize_with_bos"] == "not applicable", found


def test_each_file_of_the_suite_is_run_or_not_for_a_reason(scripts, tmp_path):
    suite, _, not_ours = scripts
    there = {
        path.stem.removeprefix("test_") for path in (suite.copy_of_suite(tmp_path) / "unit").glob("test_*.py")
    }
    assert there == {*suite.FILES, *not_ours.NOT_RUN} and not set(suite.FILES) & set(not_ours.NOT_RUN)


def test_the_page_is_what_the_data_says(scripts):
    """Of each file that is run, without a failure, with reasons of NOT_OURS or of the suite itself."""
    suite, _, not_ours = scripts
    of_page = suite.llama_server_page
    data = json.loads(of_page.DATA.read_text())
    assert of_page.PAGE.read_text() == of_page.page(data)
    assert set(data["files"]) == set(suite.FILES) and data["tree"] == suite.fetch.COMMIT
    skipped = "This test fails on linux, need to be fixed"
    for name, file in data["files"].items():
        assert not file["failed"], name
        assert file["not applicable"].keys() <= {*not_ours.NOT_OURS.values(), skipped}, name


def test_results_become_rows(scripts, tmp_path, monkeypatch):
    suite = scripts[0]
    of_page = suite.llama_server_page
    for name in ("DATA", "PAGE"):
        monkeypatch.setattr(of_page, name, tmp_path / name)
    made = [("a::one", "passed", ""), ("a::two", "not applicable", "why"), ("b::x", "failed", "it broke")]
    results = [suite.Result(*one) for one in made]
    of_page.record(results, ["a", "b"], "abc")
    of_page.record([suite.Result("a::one", "passed", "")], ["a"], "abc")  # one file again
    text = (tmp_path / "PAGE").read_text()
    for row in ("| a | 1 | 0 | 0 |", "| b | 0 | 0 | 1 |", "| all | 1 | 0 | 1 |", "- `b::x`: it broke"):
        assert row in text, row
