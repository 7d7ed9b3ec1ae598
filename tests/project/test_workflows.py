""".github/workflows: what they name is there, and they may only read. scripts/lint checks their schema."""

import re
import shlex

import pytest
import yaml
from paths import ROOT
from test_documents import COMMANDS, CONTEXT

FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()


def lines(path):
    """Each line that a job runs."""
    return [line for job in jobs(path) for step in job["steps"] for line in step.get("run", "").splitlines()]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_what_they_call_is_there(path):
    words = re.findall(r"[\w./-]+", "\n".join(lines(path)))
    files = [w for w in words if re.match(r"(\./)?(scripts|native|\.ci)/", w)]
    assert all((ROOT / name).is_file() for name in files), files
    assert files or path.name == "wheels.yml"
    for name in re.findall(r"\b\w+_test\b", "\n".join(lines(path))):
        assert (ROOT / "native" / "tests" / f"{name}.cpp").is_file(), name


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_what_they_may_do(path):
    """They only read the repository, every job ends, and each action is GitHub's own."""
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["permissions"] == {"contents": "read"}
    for job in jobs(path):
        assert 0 < job["timeout-minutes"] <= 180
        for step in job["steps"]:
            assert re.fullmatch(r"actions/[a-z-]+@v\d+", step.get("uses", "actions/none@v1"))


def test_their_commands_parse():
    found = [shlex.split(line) for path in FILES for line in lines(path) if line.startswith("eagle3-llama ")]
    assert found
    for _, name, *rest in found:
        COMMANDS[name].make_context(name, rest, resilient_parsing=False, **CONTEXT)


def test_the_systems_of_the_platforms_page():
    runners = " ".join(str(job["runs-on"]) + str(job.get("strategy")) for p in FILES for job in jobs(p))
    for system in ("ubuntu-24.04", "ubuntu-24.04-arm", "macos-", "windows-"):
        assert system in runners
