"""Comments, docstrings and the headers of patches name files that are there."""

import re

import pytest
from commands import run
from paths import ROOT

NAMED = re.compile(
    r"(?<![\w./<*-])(?:native|eagle3_llama|tests|scripts|patches)/[\w/.-]*\.(?:py|[ch]pp|h|md|patch)\b"
)
MADE_UP = re.compile(
    r"(^|/)(\.?[a-z]|[0-9]+-[a-z]|\.head|test_it|test-[\w-]+)\.\w+$|eagle3_llama/lib/"
)  # by tests, by builds


def texts():
    """(name, text) of what is ours: of a patch its header, of the tests' data nothing."""
    for name in run(["git", "ls-files"], cwd=ROOT).stdout.split():
        if name.endswith((".py", ".cpp", ".hpp", ".h", ".patch", ".toml", ".yml")) and "/data/" not in name:
            text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
            yield name, text.partition("\ndiff --git ")[0] if name.endswith(".patch") else text


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs git's list of files")
def test_named_paths():
    named = [(name, path) for name, text in texts() for path in NAMED.findall(text)]
    assert len(named) > 200
    is_there = lambda path: (ROOT / path).exists() or (ROOT / "tests" / path).exists()
    assert not [(name, path) for name, path in named if not is_there(path) and not MADE_UP.search(path)]
