"""Hooks for conftest: the tests marked `thorough` are run with --all, and the summary says how many were not.

A test is quick unless one of three rules makes it thorough: see CONTRIBUTING.md. What is named on the command
line as file::test is run, whatever its tier.
"""

import itertools
import operator
import sys

import pytest

# Not even collected without --all, as importing them takes seconds: torch, clients' packages.
SLOW_FOLDERS = ["server/clients", "train"]
# What they import. The package `openai` is how tests ask the server.
NOT_FOR_QUICK = {"torch", "ray", "agents", "litellm", "langchain_openai", "anthropic"}


def each(values, quick, ids=None):
    """Values for parametrize: those of `quick` are quick, the others thorough.

    quick: values, or a function that says of a value whether it is. At least one must be.
    """
    is_quick = quick if callable(quick) else lambda value: value in quick
    values, words = list(values), list(ids) if ids else None
    assert any(map(is_quick, values)), "none of them is quick"
    marks = [() if is_quick(value) else pytest.mark.thorough for value in values]
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark,
                     id=words[i] if words else None)
        for i, (value, mark) in enumerate(zip(values, marks))
    ]  # fmt: skip


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run the thorough tests too, with sanitizers")


def crossed(*axes):
    """All combinations of the axes' values, for parametrize. As many are quick as the longest axis has
    values: each is in one. A value that is a tuple is several arguments."""
    axes = [[value if isinstance(value, tuple) else (value,) for value in axis] for axis in axes]
    quick = [tuple(i % len(axis) for axis in axes) for i in range(max(map(len, axes)))]
    return [
        pytest.param(*itertools.chain(*map(operator.getitem, axes, row)),
                     marks=() if row in quick else pytest.mark.thorough)
        for row in itertools.product(*(range(len(axis)) for axis in axes))
    ]  # fmt: skip


class Tiers:
    """The plugin. In a worker process it leaves tests out; in the one that was started it says how many."""

    def __init__(self, config):
        self.config, self.whole = config, config.getoption("all")
        # file::test on the command line, in full or as the start of one
        self.named = [word.partition("::")[2] for word in config.args if "::" in word]
        self.tests, self.files, self.loaded = 0, set(), set()  # left out; what must not have been imported
        self.only_thorough = set()  # files of which a quick run has nothing

    def pytest_ignore_collect(self, collection_path):
        if self.whole or self.named:
            return None
        folders = [collection_path, *collection_path.parents]
        if not any(self.config.rootpath / "tests" / name in folders for name in SLOW_FOLDERS):
            return None
        self.files.update(
            collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
        )
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config, items):
        if self.whole:
            return
        asked = lambda item: any(item.nodeid.partition("::")[2].startswith(name) for name in self.named)
        later = [item for item in items if item.get_closest_marker("thorough") and not asked(item)]
        left = set(later)
        items[:] = [item for item in items if item not in left]
        self.tests = len(later)
        self.only_thorough = {item.path for item in later} - {item.path for item in items}
        if later:
            config.hook.pytest_deselected(items=later)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        if not self.whole and not self.named:
            self.loaded.update(NOT_FOR_QUICK.intersection(sys.modules))
        if hasattr(self.config, "workeroutput"):
            told = {"tests": self.tests, "files": list(map(str, self.files)), "loaded": list(self.loaded)}
            self.config.workeroutput["tiers"] = told
        elif self.loaded and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        told = getattr(node, "workeroutput", {}).get("tiers")
        if told:  # each worker collects all tests
            self.tests = told["tests"]
            self.files.update(told["files"])
            self.loaded.update(told["loaded"])

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self, config):
        """The last line: behind pytest's own summary."""
        if hasattr(config, "workerinput"):
            return
        if self.loaded:
            print(f"quick tests must not import {', '.join(sorted(self.loaded))}: see tests/kit/tiers.py")
        if self.tests or self.files:
            n = len(self.files)
            more = f", nor those of {n} file{'s' * (n > 1)}" * bool(n)
            print(f"{self.tests:,} thorough tests were not run{more}: ./scripts/test --all runs them")
