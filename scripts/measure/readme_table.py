#!/usr/bin/env python3
"""Prints README's table of speeds, as Markdown, from the figures of `eagle3-llama bench --json`.

    scripts/measure/readme_table.py FILE.json [FILE.json ...] [--into README.md]
    scripts/measure/readme_table.py FILE.json --measure BF16,Q8_0,Q4_0 [--limit N] [-n TOKENS] [-t THREADS]

With --measure it runs the bench first, on these formats of SmolLM2, and writes FILE.json: about ten minutes.
The files must have the modes stock, stock_prompt_lookup, plain and eagle. Files from one processor
become one table; each other processor has a table of its own. --into replaces what stands between the two
comments of README that name this script.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BEGIN = "<!-- scripts/measure/readme_table.py writes this -->"
END = "<!-- end of what scripts/measure/readme_table.py writes -->"
TITLES = (
    "format",
    "stock llama-cpp-python",
    "stock with prompt lookup",
    "eagle3-llama, plain",
    "eagle3-llama with the head",
)
MODES = "stock,stock_prompt_lookup,plain,eagle"
PROMPTS = ROOT / "tests" / "data" / "eval_prompts.jsonl"
WIDTH = 110  # of README's lines
Report = dict[str, Any]


def row(results: list[Report], fmt: str) -> str:
    """A format's line: tokens a second of stock, and the speeds of the others in units of it."""
    rows = {r["kind"]: r for r in results if r["format"] == fmt and r["category"] == "all"}
    missing = [kind for kind in ("stock", "stock_prompt_lookup", "plain", "eagle") if kind not in rows]
    if missing:
        raise SystemExit(f"{fmt} lacks the modes {', '.join(missing)}: run bench with them")
    stock = rows["stock"]
    cells = [fmt, stock.get("failed") or f"{stock['tok_per_s']:.1f} tokens/s"]
    for kind in ("stock_prompt_lookup", "plain", "eagle"):
        r = rows[kind]
        if "failed" in r:
            cells.append(r["failed"])
        elif "failed" in stock:
            cells.append(f"{r['tok_per_s']:.1f} tokens/s")
        else:
            cells.append(f"{r['ratio'] / stock['ratio']:.2f} times")
    return f"| {' | '.join(cells)} |"


def conditions(reports: list[Report]) -> str:
    """What the figures were measured on, in one sentence."""
    s, n = reports[0]["settings"], reports[0]["n_prompts"]
    flash = {True: "on", False: "off", None: "as llama.cpp chooses"}[s["flash_attn"]]
    greedy = "greedy" if not s["sampling"]["temp"] else f"at temperature {s['sampling']['temp']}"
    return (
        f"{reports[0]['processor']}, {s['n_threads']} threads; SmolLM2-135M-Instruct, {n} prompts, at most"
        f" {s['n_predict']} tokens each, {greedy}, flash attention {flash}."
    )


def texts(results: list[Report]) -> str:
    """How far the texts are the same."""
    mine = [r for r in results if r["category"] == "all" and r["kind"] == "eagle"]
    theirs = [r for r in results if r["kind"] == "stock" and r["category"] == "all" and "failed" not in r]
    gaps = [gap for r in theirs for gap in r["first_divergence_gaps"]]
    n = sum(r["answers"] for r in theirs)
    out = "The head changes no text." if all(r["identical"] for r in mine) else "**The head changes texts.**"
    if gaps:
        out += (
            f" Of stock's {n} answers {len(gaps)} differ, because it adds in another order: the logits of the"
            f" two best tokens were apart by at most {max(gaps):.2g} there."
        )
    elif n:
        out += f" Stock's {n} answers are the same, too."
    return out


def command(reports: list[Report]) -> str:
    """The command that measures the formats of these reports."""
    s, formats = reports[0]["settings"], ",".join(_formats(reports))
    limit = f" --limit {s['limit']}" if s["limit"] is not None else ""
    sizes = f"{limit} -n {s['n_predict']} -t {s['n_threads']}"
    return f".venv/bin/python scripts/measure/readme_table.py speed.json --measure {formats}{sizes}"


def measure(file: Path, formats: str, limit: int | None, n_predict: int, n_threads: int) -> None:
    """Runs the bench and writes its figures to the file. Raises SystemExit if it fails."""
    from eagle3_llama.models import shipped_head, smollm2  # here, because a table needs no package

    words = [f"--model={smollm2(fmt)}" for fmt in formats.split(",")]
    words += [f"--eagle={shipped_head()}", f"--prompts={PROMPTS}", f"--modes={MODES}", "--flash-attn"]
    words += [f"--limit={limit}"] * (limit is not None) + ["-n", str(n_predict), "-t", str(n_threads)]
    done = subprocess.run([sys.executable, "-m", "eagle3_llama.cli", "bench", *words, f"--json={file}"])
    if done.returncode:
        raise SystemExit(done.returncode)


def _formats(reports: list[Report]) -> list[str]:
    return list(dict.fromkeys(r["format"] for report in reports for r in report["results"]))


def section(reports: list[Report]) -> Iterator[str]:
    """One processor: its table, what it was measured on, the command."""
    results = [r for report in reports for r in report["results"]]
    header = [f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|"]
    yield "\n".join([*header, *(row(results, fmt) for fmt in _formats(reports))])
    yield textwrap.fill(
        f"{conditions(reports)} *Stock* is llama-cpp-python of the same version and compiler flags without"
        " this package, in a process of its own, alternating with ours; *times* is the speed in units of it."
        f" Its prompt lookup has the best of 2, 3, 5 and 10 draft tokens. {texts(results)} Measured by"
        f" `{command(reports)}`.",
        WIDTH,
        break_on_hyphens=False,
    )


def markdown(reports: list[Report]) -> str:
    by = lambda report: report["processor"]
    groups = itertools.groupby(sorted(reports, key=by), key=by)
    return "\n\n".join(part for _, group in groups for part in section(list(group)))


def insert(page: str, text: str) -> str:
    """The page with `text` between the two comments."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise SystemExit(f"the page needs one line {BEGIN!r} and one line {END!r}")
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, help="a page to write the table into")
    parser.add_argument(
        "--measure", metavar="FORMATS", help="measure these formats first, into the only file"
    )
    parser.add_argument("--limit", type=int, help="prompts, spread over their kinds; all if it is left out")
    parser.add_argument("-n", type=int, default=48, metavar="TOKENS", help="most tokens of an answer")
    parser.add_argument("-t", type=int, default=2, metavar="THREADS")
    given = parser.parse_args()
    if given.measure:
        if len(given.files) != 1:
            parser.error("--measure writes one file")
        measure(given.files[0], given.measure, given.limit, given.n, given.t)
    text = markdown([json.loads(file.read_text(encoding="utf-8")) for file in given.files])
    if given.into is None:
        print(text)
        return
    page = insert(given.into.read_text(encoding="utf-8"), text)
    part = given.into.with_name(given.into.name + ".part")
    part.write_text(page, encoding="utf-8")
    part.replace(given.into)


if __name__ == "__main__":
    main()
