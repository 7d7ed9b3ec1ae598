"""The two tiers: what a quick run leaves out and says of it, and that the rules of CONTRIBUTING hold."""

import re

import pytest
from paths import ROOT
from test_test_command import GOOD, tried
from tiers import NOT_FOR_QUICK, SLOW_FOLDERS, each

MIXED = """import pytest
from tiers import each

@pytest.mark.thorough
def test_slow(): pass

@pytest.mark.parametrize("n", each(range(5), quick=[3]))
def test_each(n): pass
"""


def counts(out):
    return {word: int(n) for n, word in re.findall(r"(\d+) (passed|deselected|failed)", out)}


@pytest.mark.parametrize(
    "more, passed, left",
    [
        ([], 3, 5),
        (["--all"], 8, 0),
        (["test_mixed.py::test_slow"], 1, 0),
        (["test_mixed.py::test_each"], 5, 0),
        (["test_mixed.py"], 1, 5),
    ],
)
def test_what_is_run(tmp_path, more, passed, left):
    """With --all everything; what is named, whatever its tier; otherwise the quick tests, and a last line."""
    folder = tmp_path / "t"
    named = [folder / word if word[0] != "-" else word for word in more]
    out = tried(folder, {"mixed": MIXED, "good": GOOD}, *named, code=0, whole=not named or more == ["--all"])
    assert counts(out)["passed"] == passed, out
    line = f"{left} thorough tests were not run: ./scripts/test --all runs them"
    assert (out.rstrip().splitlines()[-1] == line) == bool(left), out


def test_folders_that_are_not_collected(tmp_path):
    """They are not even imported, and counted as files."""
    folder = tmp_path / "t" / "tests" / SLOW_FOLDERS[-1]
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text("import no_such_module\n")
    out = tried(tmp_path / "t", {"good": GOOD}, code=0)
    assert out.rstrip().endswith("0 thorough tests were not run, nor those of 1 file: ./scripts/test --all runs them")
    assert "no_such_module" in tried(tmp_path / "t", {"good": GOOD}, "--all", code=None)


def test_a_quick_test_that_imports_too_much(tmp_path):
    text = "import sys, types\n\ndef test_it(): sys.modules['torch'] = types.ModuleType('torch')\n"
    out = tried(tmp_path / "t", {"imports": text})
    assert "1 passed" in out and "quick tests must not import torch" in out and "torch" in NOT_FOR_QUICK


def test_values_of_which_none_is_quick():
    with pytest.raises(AssertionError, match="none of them is quick"):
        each([1, 2], quick=[3])
