#!/usr/bin/env python3
"""llama.cpp's tests of its own server, run against this one: which pass, which do not apply, which fail.

    scripts/measure/llama_server.py                         # all of FILES, about ten minutes
    scripts/measure/llama_server.py completion tokenize -v  # two of them, with each test
    scripts/measure/llama_server.py --record                # and writes docs/llama_server_suite.md
    scripts/measure/llama_server.py launch --port 8080 --ctx-size 512 --parallel 2 ...

The tests are those of the pinned llama.cpp. They start a server for each test, by `launch`, which takes
llama.cpp's options and gives this server's the demo's model instead of stories260K. An option that would
change what the tests see, and that this server does not have, ends it. The words and counts of stories260K
are not asserted: ADAPTED has what is changed in the copy that is run. scripts/data/llama_server_not_ours.json
has the tests that ask for what this server does not have, and why, as patterns of fnmatch for
file::test[case]; one that passes all the same counts as passed. The tests import packages of the extra
`clients`. It ends with status 1 if one fails.
"""

from __future__ import annotations

import collections
import fnmatch
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "native"))
sys.path.insert(0, str(ROOT / "tests" / "kit"))
import fetch  # noqa: E402 - in a folder that sys.path has now
import templates  # noqa: E402

from eagle3_llama.models import shipped_head, smollm2  # noqa: E402

DATA = ROOT / "scripts" / "data" / "llama_server_suite.json"  # what the last run of each file found
PAGE = ROOT / "eagle3_llama" / "docs" / "llama_server_suite.md"
_NOT = json.loads(DATA.with_name("llama_server_not_ours.json").read_text(encoding="utf-8"))
NOT_OURS = {pattern: why for why, patterns in _NOT["tests"].items() for pattern in patterns}
NOT_RUN = _NOT["files"]  # files of which all tests ask for something else

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


# -- launch: this server with llama.cpp's options -----------------------------------------------------------

# ours with the same value
SAME = {
    "--port": "--port",
    "--host": "--host",
    "--alias": "--model-alias",
    "--threads": "--threads",
    "--temp": "--temp",
    "--seed": "--seed",
    "--n-predict": "--n-predict",
    "--slot-save-path": "--slot-save-path",
    "--api-key": "--api-key",
    "--chat-template-file": "--chat-template-file",
}
# without effect here: what the model is, what every server of ours does, and sizes that only cost speed
IGNORED = set(
    "--offline --slots --no-slots --jinja --no-jinja --metrics --cont-batching --swa-full --verbose "
    "--backend_sampling".split()
)
IGNORED_VALUES = set("--hf-repo --hf-file --batch-size --ubatch-size -fa".split())
REASONING = {"on": {"enable_thinking": True}, "off": {"enable_thinking": False}, "auto": {}}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def translated(given: list[str]) -> list[str]:
    """The options of this server. Raises SystemExit for one that it lacks."""
    out: list[str] = []
    context, slots, words = 4096, 1, iter(given)
    shared = "--kv-unified" in given  # the slots share the context, of which one may have all
    for word in words:
        if word in IGNORED or word == "--kv-unified":
            continue
        value = next(words, "")
        if word in SAME:
            out += [SAME[word], value]
        elif word == "--ctx-size":
            context = int(value)
        elif word == "--parallel":
            slots = int(value)
        elif word == "--reasoning" and value in REASONING:
            out += ["--chat-template-kwargs", json.dumps(REASONING[value])]
        elif word == "--chat-template" and (value == "chatml" or " " in value):
            out += ["--chat-template-file", template_file(CHATML if value == "chatml" else value)]
        elif word not in IGNORED_VALUES:
            raise SystemExit(f"this server has no option {word} {value}")
    own = context if shared else max(context // slots, 64)
    return [*out, "--n-parallel", str(slots), "--n-ctx", str(own)]


def template_file(text: str) -> str:
    """A file with the text of a template, which the process that is started reads."""
    with tempfile.NamedTemporaryFile("w", suffix=".jinja", delete=False) as file:
        file.write(text)
    return file.name


def launch(given: list[str]) -> None:
    """Becomes the process of this server, with the demo's model and head whatever model is asked for."""
    files = ["--model", str(smollm2("Q8_0")), "--eagle", str(shipped_head())]
    options = ["--template-timeout", "20", *translated(given)]
    os.execv(sys.executable, [sys.executable, "-m", "eagle3_llama.server", *files, *options])


# -- the tests ----------------------------------------------------------------------------------------------


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
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" launch "$@"\n')
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


# -- the page -----------------------------------------------------------------------------------------------

HEAD = """# llama.cpp's tests of its own server

llama.cpp tests its server with a suite of its own. We run it against [this server](serve_apis.md), to see
what a client of llama.cpp's server would miss. This command runs it, and writes this page:

```bash
python3 scripts/_env.py --extra server --extra test --extra clients
scripts/measure/llama_server.py --record
```

The tests are those of llama.cpp {tree}. Their servers have the demo's model instead of stories260K. So the
words and the numbers of tokens of that model are not asserted, or are SmolLM2's. Some requests get
`ignore_eos` or the temperature 0, and where a test asserts the `stop_type` "limit", "eos" will do: SmolLM2
ends its answers, as stories260K does not. `ADAPTED` in the script has each change. A test that needs a larger
model is not among them, as in llama.cpp's own runs. "This test fails on linux" are llama.cpp's words, which
skips the test too.

| file | passed | not applicable | failed |
|---|---|---|---|
"""


def record(results: Iterable[Any], files: Iterable[str], tree: str) -> None:
    """Puts results of these files into the data, and writes the page."""
    data = json.loads(DATA.read_text(encoding="utf-8")) if DATA.is_file() else {"files": {}}
    data["tree"] = tree
    for file in files:
        own = [r for r in results if r.name.partition("::")[0] == file]
        why = collections.Counter(r.reason for r in own if r.outcome == "not applicable")
        data["files"][file] = {
            "passed": sum(r.outcome == "passed" for r in own),
            "not applicable": dict(sorted(why.items())),
            "failed": {r.name: r.reason for r in own if r.outcome == "failed"},
        }
    DATA.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(page(data), encoding="utf-8")


def page(data: dict[str, Any]) -> str:
    """The page's text."""
    files = sorted(data["files"].items())
    rows = [(name, f["passed"], sum(f["not applicable"].values()), len(f["failed"])) for name, f in files]
    rows.append(("all", *(sum(row[i] for row in rows) for i in (1, 2, 3))))
    out = HEAD.format(tree=data["tree"]) + "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)
    if failed := [(name, why) for _, f in files for name, why in f["failed"].items()]:
        out += "\n## What fails\n\n" + "".join(f"- `{name}`: {why}\n" for name, why in failed)
    out += "\n## What is not applicable\n\n| file | tests | why |\n|---|---|---|\n"
    for name, f in files:
        out += "".join(f"| {name} | {n} | {why} |\n" for why, n in f["not applicable"].items())
    out += "\nThese files are not run, because all of their tests ask for something else:\n\n"
    out += "| file | what it asks for |\n|---|---|\n"
    return out + "".join(f"| {name} | {why} |\n" for name, why in sorted(NOT_RUN.items()))


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
        record(results, chosen, fetch.COMMIT)
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
    if sys.argv[1:2] == ["launch"]:
        launch(sys.argv[2:])
    typer.run(main)
