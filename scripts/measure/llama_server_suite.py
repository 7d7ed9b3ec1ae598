#!/usr/bin/env python3
"""llama.cpp's tests of its own server, run against this one: which pass, which do not apply, which fail.

    scripts/measure/llama_server_suite.py                         # all of FILES, about ten minutes
    scripts/measure/llama_server_suite.py completion tokenize -v  # two of them, with each test
    scripts/measure/llama_server_suite.py --record                # and writes docs/llama_server_suite.md

The tests are those of the pinned llama.cpp. They start a server for each test, by llama_server_launcher.py,
with the demo's model instead of stories260K. So the words and counts of that model are not asserted:
ADAPTED has what is changed in the copy that is run. NOT_OURS has the tests that ask for what this server does
not have, and why. The tests import packages of the extra `clients`. It ends with status 1 if one fails.
"""

from __future__ import annotations

import collections
import fnmatch
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Annotated, NamedTuple

import llama_server_page
import typer
from llama_server_not_ours import NOT_OURS
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "native"))
sys.path.insert(0, str(ROOT / "tests" / "kit"))
import fetch  # noqa: E402 - in a folder that sys.path has now
import templates  # noqa: E402

FILES = (
    "basic chat_completion compat_anthropic compat_oai_responses completion embedding security slot_save "
    "template tokenize tool_call ctx_shift ignore_eos"
).split()
# (regular expression, what it becomes): counts of tokens and the BOS of stories260K, which ends no text
# early, and llama.cpp's build number
ADAPTED = [
    (r'(life is)"\*32', r'\1"*64'),
    (r"(n_prompt = \(40 \+ r\))\*5 \+ 2", r"\1*3"),
    (r'"<s> " \+ prompt', "prompt"),
    (r'\["stop_type"\] == "limit"', '["stop_type"] in ("limit", "eos")'),
    (
        r'("prompt": "(?:What is the capital of France.|Hi how are you|Once)",)(?! "ignore)',
        r'\1 "ignore_eos": True,',
    ),
    (r"\(-1, 248, True\)", "(-1, 253, True)"),
    (r"""("max_tokens": 100,)(\s+"messages": \[\s+.*"What's the weather\?"})""", r'\1 "temperature": 0,\2'),
    (r'(\["prompt_n"\]) == 21\b', r"\1 == 7"),
    (r'(\["prompt_n"\]) == 6\b', r"\1 == 2"),
    (r'(\["n_(?:saved|restored)"\]) == 84\b', r"\1 == 70"),
    (r"(n_tokens) == 84\b", r"\1 == 70"),
    (r'(\["(?:prompt|completion)_tokens"\]) == n_(?:prompt|predicted)\b', r"\1 > 0"),
    (r'(\["(?:prompt|predicted)_n"\]) == n_(?:prompt|predicted)\b', r"\1 > 0"),
    (r'(\["cached_tokens"\]) == n_cache\b', r"\1 >= 0"),
    (r'(\["system_fingerprint"\])\.startswith\("b"\)', r"\1"),
    (r'(system_fingerprint)\.startswith\("b"\)', r"\1"),
]
# No model is loaded before the tests, nothing is downloaded, and the words of stories260K are not asserted.
PLUGIN = """
import utils

utils.ServerPreset.load_all = staticmethod(lambda: None)
utils.match_regex = lambda pattern, text: isinstance(text, str)
"""
NO_DOWNLOADS = """
def download(url, out=None):
    raise RuntimeError(f"{url} is not downloaded")
"""


class Result(NamedTuple):
    """A test's name, as file::test[case], what became of it, and why."""

    name: str
    outcome: str
    reason: str


def copy_of_suite(place: Path) -> Path:
    """The folder of the tests in a copy of the parts of the tree that they read."""
    tree, _ = fetch.patched_tree()
    folder = place / "tools" / "server" / "tests"
    shutil.copytree(tree / "tools" / "server" / "tests", folder)
    for file in (folder / "unit").glob("*.py"):
        text = file.read_text(encoding="utf-8")
        for pattern, other in ADAPTED:
            text = re.sub(pattern, other, text)
        file.write_text(text, encoding="utf-8")
    (place / "models").mkdir()
    (place / "models" / "templates").symlink_to(templates.folder())
    (folder / "adapted.py").write_text(PLUGIN)
    (folder / "wget.py").write_text(NO_DOWNLOADS)
    launcher = folder / "llama-server"
    own = Path(__file__).with_name("llama_server_launcher.py")
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{own}" "$@"\n')
    launcher.chmod(0o755)
    return folder


def results_of(folder: Path, files: list[str]) -> list[Result]:
    """Runs the tests of these files."""
    report = folder / "report.xml"
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "LLAMA_SERVER_BIN_PATH": str(folder / "llama-server"), "PYTHONPATH": paths}
    with socket.socket() as s:  # a port that no other server has
        s.bind(("127.0.0.1", 0))
        env["PORT"] = str(s.getsockname()[1])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "adapted", "-p", "no:cacheprovider"]
    command += ["-m", "not slow", f"--junitxml={report}", *[f"unit/test_{name}.py" for name in files]]
    done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True)
    if not report.is_file():
        sys.exit(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return [result_of(case) for case in ElementTree.parse(report).iter("testcase")]


def result_of(case: ElementTree.Element) -> Result:
    name = f"{case.get('classname', '').rpartition('.')[2].removeprefix('test_')}::{case.get('name')}"
    reason = next((why for pattern, why in NOT_OURS.items() if fnmatch.fnmatchcase(name, pattern)), "")
    wrong = [part for part in case if part.tag in ("failure", "error")]
    if not wrong:
        skipped = case.find("skipped")
        if skipped is not None:
            return Result(name, "not applicable", skipped.get("message", ""))
        return Result(name, "passed", f"listed as not ours: {reason}" if reason else "")
    if reason:
        return Result(name, "not applicable", reason)
    lines = [line for line in (wrong[0].get("message") or "").splitlines() if line]
    return Result(name, "failed", " ".join(lines)[:300])


def main(
    files: Annotated[list[str] | None, typer.Argument(help="completion for unit/test_completion.py")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="each test")] = False,
    keep: Annotated[
        bool, typer.Option("--record", help="write the results of these files to the page")
    ] = False,
) -> None:
    """Run llama.cpp's tests of its server against this one."""
    chosen, console = files or FILES, Console(highlight=False)
    with tempfile.TemporaryDirectory() as place:
        results = results_of(copy_of_suite(Path(place)), chosen)
    if keep:
        llama_server_page.record(results, chosen, fetch.COMMIT)
    table = Table("file", "passed", "not applicable", "failed")
    counts = collections.Counter((r.name.partition("::")[0], r.outcome) for r in results)
    for name in [*chosen, "all"]:
        own = {key: n for key, n in counts.items() if name in (key[0], "all")}
        of = lambda outcome, own=own: str(sum(n for (_, o), n in own.items() if o == outcome))
        table.add_row(name, *map(of, ("passed", "not applicable", "failed")))
    for r in results:
        if verbose or r.outcome == "failed":
            console.print(f"{r.outcome}: {r.name}{': ' if r.reason else ''}{r.reason}", markup=False)
    for reason, n in collections.Counter(r.reason for r in results if r.outcome == "not applicable").items():
        console.print(f"{n} not applicable: {reason}", markup=False)
    console.print(table)
    sys.exit(any(r.outcome == "failed" for r in results))


if __name__ == "__main__":
    typer.run(main)
