"""The tables of the pages, as Markdown, from measurements."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from measurements import Measurement, Row

WIDTH = 110
FORMATS = ("BF16", "F16", "F32", "Q8_0", "Q6_K", "Q5_K_M", "Q5_0", "Q4_K_M", "Q4_K", "Q4_1", "Q4_0")
BARS = ("plain", "drafts from the text", "drafts from head and text")
FIGURES = {
    "plain_tokens_per_second": "plain, tokens/s",
    "head": "head",
    "head_and_text": "head and text",
    "text": "text alone",
    "least_kind": "head and text, least kind",
    "plain_over_stock": "plain over stock",
    "over_stock": "head and text over stock",
}
SERVED = {  # by figure: its title and its digits
    "on": ("with drafts, tokens/s", 0),
    "off": ("without", 0),
    "llama_server": ("llama-server", 0),
    "over_off": ("with over without", 2),
    "over_llama_server": ("with over llama-server", 2),
    "off_over_llama_server": ("without over llama-server", 2),
    "first_over_llama_server": ("time to the first token over llama-server", 2),
}
Numbers = dict[str, float]


def speeds(all_of: Sequence[Measurement]) -> str:
    """Machines, sets of prompts and ways of decoding, by format."""
    lines, chosen = [], named(all_of, "speeds")
    formats = in_order(row["format"] for m in chosen for row in totals(m))
    for m in chosen:
        at = {row["format"]: row for row in totals(m)}
        for name, label in FIGURES.items():
            digits = 0 if "tokens" in name else 2
            cells = [number(figure(at.get(fmt, {}), name), digits) for fmt in formats]
            if any(cells):
                lines.append([m.machine, m.conditions, label, *cells, m.commit])
    return table(("machine", "prompts", "speed", *formats, "commit"), lines)


def figure(row: Row, name: str) -> float | None:
    """One figure of a row. Plain decoding over stock follows from the other two ratios."""
    if name == "plain_over_stock" and "over_stock" in row:
        return float(row["over_stock"] / row["head_and_text"])
    value: float | None = row.get(name)
    return value


def totals(m: Measurement) -> Iterator[Row]:
    """A row for each format: that of all prompts, or the geometric means of at least four kinds."""
    for fmt in in_order(row["format"] for row in m.data):
        rows = [row for row in m.data if row["format"] == fmt]
        whole = [row for row in rows if "kind" not in row]
        if whole:
            yield whole[0]
        elif len(rows) >= 4:
            figures = {name for row in rows for name, value in row.items() if isinstance(value, float)}
            yield {"format": fmt} | {name: mean([row[name] for row in rows]) for name in figures}


def kinds(all_of: Sequence[Measurement]) -> str:
    """By kind of prompt: the head alone, head and text, and the text alone, for each format."""
    chosen = [m for m in named(all_of, "speeds") if len({row.get("kind") for row in m.data} - {None}) >= 4]
    out = []
    for m in chosen:
        formats = in_order(row["format"] for row in m.data)
        titles = [f"{fmt}{label}" for fmt in formats for label in (" head", " head and text", " text")]
        at = {(row["format"], row.get("kind")): row for row in m.data}
        rows = []
        for kind in dict.fromkeys(row["kind"] for row in m.data if "kind" in row):
            cells = [at.get((fmt, kind), {}) for fmt in formats]
            rows.append([kind, *(number(c.get(n)) for c in cells for n in ("head", "head_and_text", "text"))])
        told = f"Machine: {m.machine}; {m.conditions}; commit {m.commit}."
        out.append(f"{told}\n\n{table(['kind', *titles], rows)}")
    return "\n\n".join(out)


def rows(all_of: Sequence[Measurement]) -> str:
    """The time of a decode of 1, 4, 8 and 16 rows, in units of one row of stock llama.cpp."""
    chosen = named(all_of, "rows")
    formats = in_order(row["format"] for m in chosen for row in m.data)
    lines = []
    for m in chosen:
        at = {row["format"]: row["rows"] for row in m.data}
        cells = [
            ", ".join(number(at[fmt].get(n)) or "?" for n in ("1", "4", "8", "16")) if fmt in at else ""
            for fmt in formats
        ]
        lines.append([m.machine, m.conditions, *cells, m.commit])
    return table(("machine", "model and text", *formats, "commit"), lines)


def others(all_of: Sequence[Measurement]) -> str:
    """Our speed in units of others': geometric means over kinds of prompts, and the least of them."""
    lines = [*drafters(named(all_of, "speeds")), *openvino(named(all_of, "openvino"))]
    formats = in_order(fmt for _, cells, _ in lines for fmt in cells)
    body = [[*head, *(cells.get(fmt, "") for fmt in formats), commit] for head, cells, commit in lines]
    titles = ("machine", "against", "prompts", *formats, "commit")
    return table(titles, body)


def drafters(chosen: Sequence[Measurement]) -> Iterator[tuple[list[str], dict[str, str], str]]:
    labels = {"prompt_lookup": "llama-cpp-python's prompt lookup", "upstream": "llama.cpp's best drafter"}
    for name, label in labels.items():
        for m in chosen:
            cells = {}
            for fmt in in_order(row["format"] for row in m.data):
                of = [row for row in m.data if row["format"] == fmt and {name, "head_and_text"} <= set(row)]
                whole = [row["head_and_text"] / row[name] for row in of if "kind" not in row]
                each = [row["head_and_text"] / row[name] for row in of if "kind" in row]
                if whole or len(each) >= 4:
                    least = f" ({min(each):.2f})" if len(each) >= 4 else ""
                    cells[fmt] = f"{whole[0] if whole else mean(each):.2f}{least}"
            if cells:
                yield [m.machine, label, m.conditions], cells, m.commit


def openvino(chosen: Sequence[Measurement]) -> Iterator[tuple[list[str], dict[str, str], str]]:
    for m in chosen:
        for what in dict.fromkeys(row["what"] for row in m.data):
            of = [row for row in m.data if row["what"] == what]
            cells = {row["format"]: f"{row['ratio']:.2f} ({row['least']:.2f})" for row in of}
            yield [m.machine, f"OpenVINO GenAI, {what}", m.conditions], cells, m.commit


def server(all_of: Sequence[Measurement]) -> str:
    """By format; where there are several numbers of clients, a figure for each."""
    titles = ("machine", "prompts", "format", "clients", *(title for title, _ in SERVED.values()), "commit")
    lines = []
    for m in named(all_of, "server"):
        for fmt in in_order(row["format"] for row in m.data):
            of = sorted((row for row in m.data if row["format"] == fmt), key=lambda row: row["clients"])
            cells = [
                joined(number(served(row, name), digits) for row in of)
                for name, (_, digits) in SERVED.items()
            ]
            clients = joined(str(row["clients"]) for row in of)
            lines.append([m.machine, m.conditions, fmt, clients, *cells, m.commit])
    return table(titles, lines)


def served(row: Row, name: str) -> float | None:
    if name == "over_off" and "on" in row:
        return float(row["on"] / row["off"])
    value: float | None = row.get(name)
    return value


def cards(all_of: Sequence[Measurement]) -> str:
    """Speeds on cards: plain decoding, and the others in units of it."""
    titles = ("card", "format", "right", "plain, tokens/s", "best chain", "best tree", "planner")
    titles += ("llama.cpp's draft-eagle3", "head's share at chain 3", "commit")
    lines = []
    for m in named(all_of, "card"):
        for row in m.data:
            cells = [number(row["plain_tokens_per_second"], 0), *(best(row, k) for k in ("chain", "tree"))]
            cells += [number(row.get("planner")), best(row, "upstream")]
            share = f"{row['head_share']:.0%}" if "head_share" in row else ""
            lines.append([m.machine, row["format"], f"{row['p']:.0%}", *cells, share, m.commit])
    return table(titles, lines) if lines else "Never run on a card."


def best(row: Row, kind: str) -> str:
    return f"{row[kind]:.2f} ({row[f'{kind}_name']})" if kind in row else ""


def losses(all_of: Sequence[Measurement]) -> str:
    """Each case in which drafts were slower than plain decoding."""
    lines = []
    for m in named(all_of, "speeds"):
        for row in m.data:
            slow = {name: row[name] for name in ("head_and_text", "text") if row.get(name, 1.0) < 1.0}
            for name, value in slow.items():
                what = name.replace("_", " ")
                where = f"{row.get('kind', 'all')}; {m.conditions}" if "kind" in row else m.conditions
                lines.append([m.machine, where, row["format"], what, number(value), m.commit])
    for m in named(all_of, "server"):
        overs = [(f"{row['format']} ({row['clients']} clients)", served(row, "over_off")) for row in m.data]
        slow = {where: number(over) for where, over in overs if over is not None and over < 1.0}
        if slow:
            cells = [joined(slow), "head and text", joined(slow.values())]
            lines.append([m.machine, m.conditions, *cells, m.commit])
    titles = ("machine", "where", "format", "drafts from", "over plain", "commit")
    return table(titles, lines) if lines else "No case that was measured is slower than plain decoding."


def readme(all_of: Sequence[Measurement]) -> str:
    """README's table: the newest run that has stock llama-cpp-python in it."""
    m, figures = against_stock(all_of)
    body = [[fmt, *(f"{value:.1f} times" for value in row.values())] for fmt, row in figures.items()]
    told = (
        f"{m.machine}, {m.threads} threads, {m.model}, {m.conditions}, greedy; commit {m.commit}, {m.date}."
        " '3.2 times' means 3.2 times the speed of stock llama-cpp-python of the same version and compiler"
        " flags, which alternates with ours in a process of its own. *Plain* is this package without drafts."
    )
    return f"{table(('format', *BARS), body)}\n\n{wrapped(told)}\n"


def headline(all_of: Sequence[Measurement]) -> str:
    """The one figure that README begins with: the best format of its table."""
    m, figures = against_stock(all_of)
    best = max(figures, key=lambda fmt: figures[fmt][BARS[2]])
    told = f"It was **{figures[best][BARS[2]]:.1f} times as fast as stock llama-cpp-python** with"
    where = f"{m.conditions}; {m.machine}, {m.threads} threads; more below"
    return wrapped(f"{told} {m.model} in {best} ({where}).")


def against_stock(all_of: Sequence[Measurement]) -> tuple[Measurement, dict[str, Numbers]]:
    """(the newest run beside stock, speeds over stock by format)."""
    chosen = [m for m in named(all_of, "speeds") if any("over_stock" in row for row in totals(m))]
    if not chosen:
        raise ValueError("no measurement has stock llama-cpp-python: add a run of bench with its mode stock")
    m = max(chosen, key=lambda m: m.date)
    out = {}
    for row in totals(m):
        if "over_stock" in row:
            plain = row["over_stock"] / row["head_and_text"]
            out[row["format"]] = dict(zip(BARS, (plain, plain * row["text"], row["over_stock"])))
    return m, out


def named(all_of: Sequence[Measurement], name: str) -> list[Measurement]:
    return sorted((m for m in all_of if m.name == name), key=lambda m: (m.machine, m.conditions))


def in_order(formats: Iterable[str]) -> list[str]:
    return sorted(set(formats), key=lambda fmt: (FORMATS.index(fmt) if fmt in FORMATS else len(FORMATS), fmt))


def mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Markdown. Columns in which no line has anything are left out."""
    kept = [i for i in range(len(titles)) if any(line[i] for line in lines)]
    pick = lambda cells: f"| {' | '.join(cells[i] for i in kept)} |"
    return "\n".join([pick(titles), "|---" * len(kept) + "|", *map(pick, lines)])


def runs(all_of: Sequence[Measurement]) -> str:
    """Every run: when, on what, and the command."""
    titles = ("commit", "date", "processor", "threads", "model", "prompts", "command")
    lines = []
    for m in sorted(all_of, key=lambda m: (m.name, m.machine, m.conditions)):
        processor = f"{m.cpu} ({', '.join(m.instruction_sets)})"
        command = f"`{m.command}`{f', {m.note}' if m.note else ''}"
        lines.append([m.commit, m.date, processor, str(m.threads), m.model, m.conditions, command])
    return table(titles, lines)


def joined(cells: Iterable[str]) -> str:
    return ", ".join(filter(None, cells))


def wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_on_hyphens=False, break_long_words=False)


TABLES = {
    "speeds": speeds,
    "kinds": kinds,
    "rows": rows,
    "others": others,
    "server": server,
    "cards": cards,
    "losses": losses,
    "runs": runs,
    "headline": headline,
    "readme": readme,
}
