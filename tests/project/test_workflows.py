""".github/workflows: what they name is there, and they may only read. scripts/lint checks their schema."""

import os
import re
import shlex
import shutil

import pytest
import yaml
from commands import run
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


def test_ci_runs_both_commands_as_a_user_does(tmp_path):
    """They see nothing of what a machine sets for Python, pip and compilers, but Chromium and the cache."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    names = ("demo", "lint", "test")
    for name in names:
        script = tmp_path / "scripts" / name
        script.write_text(f'#!/bin/sh\nenv > {name}.env\necho "$@" > {name}.words\n')
        script.chmod(0o755)
    (tmp_path / "scripts" / "_env.py").write_text("import os; open('_env.env', 'w').write(repr(os.environ))")
    given = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    given |= {"CHROMIUM": "/none/chromium", "EAGLE3_LLAMA_CACHE": "/none/cache"}
    hidden = {"PYTHONDONTWRITEBYTECODE": "1", "PIP_FIND_LINKS": "/none", "OPENBLAS_CORETYPE": "Haswell"}
    run([tmp_path / ".ci" / "run", "-k", "x"], env={**given, **hidden, "CFLAGS": "-O0"})
    for name in names:
        lines = (tmp_path / f"{name}.env").read_text().splitlines()
        seen = dict(line.split("=", 1) for line in lines)
        for of_the_shell in ("PWD", "OLDPWD", "SHLVL", "_"):
            seen.pop(of_the_shell, None)
        assert seen == {**given, "EAGLE3_MAY_SKIP": ""}
    assert "PIP_" not in (tmp_path / "_env.env").read_text()
    assert (tmp_path / "test.words").read_text() == "--all -k x\n"


def test_their_commands_parse():
    found = [shlex.split(line) for path in FILES for line in lines(path) if line.startswith("eagle3-llama ")]
    assert found
    for _, name, *rest in found:
        COMMANDS[name].make_context(name, rest, resilient_parsing=False, **CONTEXT)


def test_the_systems_of_the_platforms_page():
    runners = " ".join(str(job["runs-on"]) + str(job.get("strategy")) for p in FILES for job in jobs(p))
    for system in ("ubuntu-24.04", "ubuntu-24.04-arm", "macos-", "windows-"):
        assert system in runners
