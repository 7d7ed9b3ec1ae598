"""The page about llama.cpp's tests of its server, made of what the last run of each file found."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llama_server_not_ours import NOT_RUN

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "scripts" / "data" / "llama_server_suite.json"
PAGE = ROOT / "eagle3_llama" / "docs" / "llama_server_suite.md"
HEAD = """# llama.cpp's tests of its own server

llama.cpp tests its server with a suite of its own. We run it against [this server](serve_apis.md), to see
what a client of llama.cpp's server would miss. This command runs it, and writes this page:

```bash
python3 scripts/_env.py --extra server --extra test --extra clients
scripts/measure/llama_server_suite.py --record
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
