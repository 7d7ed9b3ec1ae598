"""scripts/release/Containerfile: its commands work. No image is built here."""

import json
import re
import subprocess
import sys

import typer
from paths import ROOT
from server_tools import running, settings

from eagle3_llama.server import cli

TEXT = (ROOT / "scripts/release/Containerfile").read_text(encoding="utf-8")
LINES = re.sub(r"\\\n\s*", "", "\n".join(x for x in TEXT.splitlines() if not x.startswith("#"))).splitlines()


def instruction(name):
    """The arguments of the only instruction of this name."""
    (line,) = (line for line in LINES if line.startswith(f"{name} "))
    return line.removeprefix(f"{name} ")


def test_the_health_check(files):
    """It ends with 0 for a server that lives, and with another status for one that does not."""
    python, *args = json.loads(instruction("HEALTHCHECK").partition("CMD ")[2])
    assert python == "python" and ":8000/health" in args[1]

    def check(url):
        here = [args[0], args[1].replace("http://127.0.0.1:8000", url)]
        return subprocess.run([sys.executable, *here], capture_output=True, timeout=60).returncode

    with running(settings(model=files[0], eagle=None, n_ctx=256, n_parallel=1, threads=1)) as s:
        assert check(s.url) == 0
    assert check(s.url) != 0


def test_the_command():
    program, command, *options = json.loads(instruction("ENTRYPOINT"))
    app = typer.Typer()
    app.command()(cli.serve)
    known = {o for p in typer.main.get_command(app).params for o in p.opts}
    assert (program, command) == ("eagle3-llama", "serve") and options[0] in known
    used = re.findall(r" (--(?:model|eagle)) /models", TEXT)
    assert used == ["--model", "--eagle"] and set(used) <= known


def test_what_is_installed():
    """The extras are ours, and pip compiles neither this package nor llama-cpp-python."""
    (run,) = (line for line in LINES if "pip install" in line)
    (extras,) = re.findall(r"eagle3-llama\[([\w,]+)\]", run)
    declared = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    names = re.findall(r"^(\w+) = ", declared.partition("\n[project.scripts]")[0], re.MULTILINE)
    assert set(extras.split(",")) <= set(names) and "server" in extras
    assert "--only-binary eagle3-llama,llama-cpp-python" in run and "--find-links /wheels" in run
