"""Measurements as data: one JSON a run in scripts/data/measurements, from which pages.py makes tables."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import card

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "scripts" / "data" / "measurements"
# The first commit with figures of today's kernels. Whoever moves a figure by a tenth writes his commit here.
SINCE, SINCE_DATE = "af766c9", "2026-11-27"
MODEL = "SmolLM2-135M-Instruct"
NAMES = ("speeds", "rows", "server", "openvino", "card")
KEYS = {  # what tells two rows of one measurement apart
    "speeds": ("format", "kind"),
    "rows": ("format", "weights"),
    "server": ("format", "clients"),
    "openvino": ("format", "what"),
    "card": ("format", "p"),
}
SPEEDS = {"eagle": "head_and_text", "head": "head", "text": "text", "prompt_lookup": "prompt_lookup"}
CODE = ("eagle3_llama", "native", "patches")  # what decides the figures
SHOWN = ("avx", "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimddp", "i8mm", "sve")
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One run. machine: a short name. conditions: prompts and tokens. data: rows, figures by their names."""

    name: str  # one of NAMES: which tables read it
    machine: str
    cpu: str
    instruction_sets: tuple[str, ...]
    threads: int
    model: str
    conditions: str
    commit: str
    date: str
    command: str
    note: str  # what the command does not say, or nothing
    data: tuple[Row, ...]

    def file(self) -> Path:
        """Where it belongs: a name of its own, as one day may have several runs on a machine."""
        words = re.sub(r"[^a-z0-9]+", "-", f"{self.machine} {self.name}".lower())
        own = hashlib.sha256(json.dumps(dataclasses.astuple(self)).encode()).hexdigest()[:6]
        return FOLDER / f"{self.date}-{words}-{own}.json"

    def write(self) -> Path:
        """Writes the file, a line for each field and for each row of the data. Returns its path."""
        show = lambda value: json.dumps(value, ensure_ascii=False)
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "data"}
        lines = [f" {show(name)}: {show(value)}," for name, value in fields.items()]
        rows = ",\n".join(f"  {show(row)}" for row in self.data)
        text = "\n".join(["{", *lines, ' "data": [', rows, " ]", "}", ""])
        self.file().write_text(text, encoding="utf-8")
        return self.file()


def read() -> list[Measurement]:
    """All measurements, oldest first. Raises ValueError for a file that is none."""
    out = []
    for path in sorted(FOLDER.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        names = {field.name for field in dataclasses.fields(Measurement)}
        if set(found) != names or found["name"] not in NAMES or not found["data"]:
            raise ValueError(
                f"{path} is no measurement: it needs {', '.join(sorted(names))}, and a name of"
                f" {', '.join(NAMES)}"
            )
        found["instruction_sets"], found["data"] = tuple(found["instruction_sets"]), tuple(found["data"])
        out.append(Measurement(**found))
    return out


def too_old(m: Measurement) -> bool:
    """True if it was measured before SINCE. A clone without history knows dates alone."""
    git = lambda *words: subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True).returncode == 0
    if not git("cat-file", "-e", f"{SINCE}^{{commit}}"):
        return m.date < SINCE_DATE
    return not git("merge-base", "--is-ancestor", SINCE, m.commit)


def add(found: Path, command: str | None, machine: str | None, conditions: str | None) -> Path:
    """Makes a measurement of what a measuring command wrote, on the machine and the commit of now.

    Rows of older measurements of the same machine and conditions that it replaces are removed. Raises
    ValueError if the file is of no known command, or if the code has changes that are not committed.
    """
    text = found.read_text(encoding="utf-8")
    parts = text.splitlines() if found.suffix == ".jsonl" else [text]
    lines = [json.loads(part) for part in parts]
    report = lines[0]
    name, data, told = rows_of(report, lines)
    command = command or report.get("command")
    if not command:
        raise ValueError(f"{found} does not say which command wrote it: give it with --command")
    elsewhere = name == "card"  # the file says on which machine and of which commit it is
    where = card.where(lines) if elsewhere else here(report, found)
    new = Measurement(
        name=name,
        machine=machine or where.machine,
        cpu=where.cpu,
        instruction_sets=tuple(name for name in SHOWN if name in where.sets),
        threads=where.threads,
        model=report.get("model", card.MODEL if elsewhere else MODEL),
        conditions=conditions or told,
        commit=where.commit,
        date=where.date,
        command=command,
        note="",
        data=tuple(data),
    )
    replace(new)
    return new.write()


def here(report: Row, found: Path) -> card.Where:
    """A command that was run on this machine, with the commit that is checked out."""
    from eagle3_llama.runtime import machine

    threads = report.get("n_threads", report.get("threads", 2))
    date = datetime.date.fromtimestamp(found.stat().st_mtime).isoformat()
    return card.Where(*processor(), machine.sets(), threads, commit(), date)


def replace(new: Measurement) -> None:
    """Removes the rows that `new` has too from older measurements of its machine and conditions."""
    key = lambda row: tuple(row.get(k) for k in KEYS[new.name])
    fresh = {key(row) for row in new.data}
    for old in read():
        same = (old.name, old.machine, old.conditions) == (new.name, new.machine, new.conditions)
        left = tuple(row for row in old.data if not same or key(row) not in fresh)
        if len(left) == len(old.data):
            continue
        old.file().unlink()
        if left:
            dataclasses.replace(old, data=left).write()


def rows_of(report: Row, lines: Sequence[Row]) -> tuple[str, list[Row], str]:
    """(name, data, conditions) of what a command wrote."""
    if report.get("measurement") in NAMES:  # written for this by the command itself
        return report["measurement"], report["data"], report.get("conditions", "")
    if report.get("what") in (card.RUN, card.REHEARSAL):  # run_on_card.py
        return "card", list(card.rows(lines)), card.CONDITIONS
    if "results" in report:  # eagle3-llama bench --json
        settings = report["settings"]
        told = f"{report['n_prompts']} prompts, {settings['n_predict']} tokens"
        return "speeds", list(bench_rows(report["results"])), told
    if report.get("what") == "settings":  # compare.py --file
        data = list(compared_rows(lines))
        return "speeds", data, f"{report['n_predict']} tokens, the {report['split'] or 'whole'} half"
    if "runs" in report:  # load.py bench
        asked = [f"{report['prompts']} prompts", report.get("kind", "text"), "all busy"]
        told = ", ".join(part for part in asked if part != "text")
        return "server", list(server_rows(report["runs"])), told
    raise ValueError("this file is of no command that measures: see CONTRIBUTING, 'A measurement'")


def bench_rows(results: Sequence[Row]) -> Iterator[Row]:
    """Speeds in units of plain decoding, by format and kind of prompt."""
    cells: dict[tuple[str, str], dict[str, Row]] = {}
    for r in results:
        if "failed" not in r:
            cells.setdefault((r["format"], r["category"]), {}).setdefault(r["kind"], r)
    for (fmt, kind), modes in cells.items():
        row: Row = {"format": fmt} | ({"kind": kind} if kind != "all" else {})
        if "plain" in modes:
            row["plain_tokens_per_second"] = round(modes["plain"]["tok_per_s"], 1)
        row |= {name: round(modes[m]["ratio"], 2) for m, name in SPEEDS.items() if m in modes}
        if {"stock", "eagle"} <= set(modes):
            row["over_stock"] = round(modes["eagle"]["ratio"] / modes["stock"]["ratio"], 2)
        if "upstream" in modes:
            found = modes["upstream"]
            row |= {"upstream": round(found["ratio"], 2), "upstream_drafter": found["mode"]}
        yield row


def compared_rows(records: Sequence[Row]) -> Iterator[Row]:
    """The same from the answers of compare.py --file."""
    from others.bars import ratios

    for (fmt, kind), modes in ratios(records).items():
        row: Row = {"format": fmt, "kind": kind}
        row |= {name: round(modes[m], 2) for m, name in SPEEDS.items() if m in modes}
        upstream = {m: r for m, r in modes.items() if m.startswith("upstream")}
        if upstream:
            best = max(upstream, key=lambda m: upstream[m])
            row |= {"upstream": round(upstream[best], 2), "upstream_drafter": best.partition(":")[2]}
        yield row


def server_rows(runs: dict[str, dict[str, list[Row]]]) -> Iterator[Row]:
    """Tokens a second of all clients, and the median ratios to llama-server if it ran, by format and clients.

    first_over_llama_server: of the times to the first token.
    """
    middle = lambda values: round(statistics.median(values), 2)
    for fmt, by in runs.items():
        for clients, each in by.items():
            row = {
                "format": fmt,
                "clients": int(clients),
                "on": middle(run["on"] for run in each),
                "off": middle(run["off"] for run in each),
            }
            if all("other" in run for run in each):
                row |= {
                    "llama_server": middle(run["other"] for run in each),
                    "over_llama_server": middle(run["on"] / run["other"] for run in each),
                    "off_over_llama_server": middle(run["off"] / run["other"] for run in each),
                }
            if all("first_other" in run for run in each):
                row["first_over_llama_server"] = middle(run["first_on"] / run["first_other"] for run in each)
            yield row


def commit() -> str:
    """The commit of the code that was measured. Raises ValueError if the code differs from it."""
    words = {"status": ("status", "--porcelain", "--", *CODE), "head": ("rev-parse", "--short=7", "HEAD")}
    found = {}
    for name, command in words.items():
        done = subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"git does not know the commit that was measured: {done.stderr.strip()}")
        found[name] = done.stdout.strip()
    if found["status"]:
        raise ValueError(f"commit the changes below {', '.join(CODE)} first: figures need a commit")
    return found["head"]


def processor() -> tuple[str, str]:
    """(short name, full name) of this machine's processor, by lscpu."""
    try:
        done = subprocess.run(["lscpu"], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    except OSError:  # another system than Linux
        return platform.processor() or platform.machine(), platform.processor() or platform.machine()
    found = dict(re.findall(r"^(Model name|CPU family|Model):\s+(.*)$", done.stdout, re.MULTILINE))
    name, labels = found.get("Model name", platform.machine()), {"CPU family": "family", "Model": "model"}
    more = [f"{label} {found[key]}" for key, label in labels.items() if key in found]
    return name, ", ".join([name, *more])
