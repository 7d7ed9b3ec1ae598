"""scripts/measure/llama_server_suite.py: its launcher, what it changes in llama.cpp's tests, and one file."""

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
    given = "--port 1 --temp 0.8 --seed 42 --hf-repo x --no-slots --ctx-size 512 --parallel 2 --reasoning off"
    file = ["--chat-template-file", "a b"]
    assert launcher.translated([*given.split(), *file]) == [
        *"--port 1 --chat-template-kwargs".split(),
        json.dumps({"enable_thinking": False}),
        *file,
        *"--n-parallel 2 --n-ctx 256".split(),
    ]
    for odd in (["--lora", "x"], ["--chat-template", "llama3"]):
        with pytest.raises(SystemExit, match=f"no option {' '.join(odd)}"):
            launcher.translated(odd)
    (_, name, *_) = launcher.translated(["--chat-template", "This is one"])
    with open(name, encoding="utf-8") as text:
        assert text.read() == "This is one"


def test_the_suite_is_the_one_that_is_adapted(scripts, tmp_path):
    """Each change and each line of NOT_OURS still meets a test of the pinned tree, and one file runs."""
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
    for needed in ("requests", "filelock"):
        pytest.importorskip(needed, reason=f"needs {needed}, of the extra `clients`")
    found = {r.name: r.outcome for r in suite.results_of(folder, ["tokenize"])}
    assert found["tokenize::test_tokenize_detokenize"] == "passed", found
    assert found["tokenize::test_tokenize_with_bos"] == "not applicable", found
