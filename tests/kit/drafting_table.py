"""What drafts for tiny random models of every architecture, and whether logits have plain decoding's bits.

    python tests/kit/drafting_table.py    # writes the table of docs/architectures.md anew

native/tests/architectures/drafting.cpp runs the rounds, EAGLE3_TEST_ROUNDS for each cell.
"""

import dataclasses
import os
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

from commands import run
from cores import THREADS
from native_programs import program
from paths import ROOT

PAGE = ROOT / "eagle3_llama/docs/architectures.md"
BEGIN = "<!-- tests/kit/drafting_table.py writes this -->\n"
END = "<!-- end of what tests/kit/drafting_table.py writes -->\n"
ROUNDS = int(os.environ.get("EAGLE3_TEST_ROUNDS", "30"))
CELLS = ("text", "chain", "tree", "slots", "saved", "prefix")
MEMORIES = {  # by llama.cpp's name for it
    "none": "none",
    "llama_kv_cache": "cache",
    "llama_kv_cache_iswa": "windows",
    "llama_kv_cache_dsa": "indexer",
    "llama_kv_cache_dsa_iswa": "indexer, windows",
    "llama_kv_cache_msa": "block indexer",
    "llama_kv_cache_dsv4": "compressed",
    "llama_memory_recurrent": "recurrent",
    "llama_memory_hybrid": "hybrid",
    "llama_memory_hybrid_iswa": "hybrid, windows",
    "llama_memory_hybrid_idx": "hybrid, indexer",
}
SMALL = "⁰¹²³⁴⁵⁶⁷⁸⁹"


@dataclasses.dataclass
class Cell:
    """What became of the rounds of a cell. rows stayed, differing have other bits than plain decoding's.

    rejected: drafts by the depth at which they were rejected, from 1; first, those that were accepted whole.
    why: in the library's words, why nothing drafts, or what failed.
    """

    rounds: int = 0
    rows: int = 0
    differing: int = 0
    drafted: int = 0
    accepted: int = 0
    rewinds: int = 0
    refused: int = 0
    rejected: list = dataclasses.field(default_factory=list)
    why: str = ""

    def word(self, name):
        if self.why.startswith("failed"):
            return "fails"
        if self.differing:
            return "differs"
        if self.rounds == 0:
            return "no"
        if name == "prefix" and self.refused:
            return "anew" if self.refused == self.rewinds else "in part"
        return "yes" if self.drafted or name == "prefix" else "plain"


@dataclasses.dataclass
class Row:
    """An architecture's, with the flash attention that its name says."""

    name: str
    memory: str
    rollback: str
    cells: dict  # by name; none if the library refuses the target
    refused: str = ""  # in its words

    def words(self):
        """The row as in the table, but for its name: words, with the reasons in brackets behind them."""
        if not self.cells:
            return [self.memory, "none", *["no"] * len(CELLS)], [self.refused] * len(CELLS)
        words = [self.memory, self.rollback, *(self.cells[c].word(c) for c in CELLS)]
        whys = [self.cells[c].why if self.cells[c].word(c) != "yes" else "" for c in CELLS]
        return words, whys


def kinds_of(tool):
    """{architecture: its kinds} of all that can be made."""
    out = {}
    for line in run([tool, "list"]).stdout.splitlines():
        arch, dense, moe = line.split("\t")
        if arch not in ("eagle3", "dflash", "gemma4-assistant"):  # drafters: no models by themselves
            out[arch] = ["dense"] * int(dense) + ["moe"] * int(moe)
    return out


def run_row(tool, arch, kind, flash, rounds=ROUNDS):
    with tempfile.TemporaryDirectory() as folder:
        done = run([tool, arch, kind, "on" if flash else "off", rounds, folder], code=None)
    assert done.returncode == 0, (
        f"{arch}, {kind}, flash {flash}: {done.returncode}\n{done.stdout}{done.stderr}"
    )
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    about = {line[0]: line[1] for line in lines if len(line) == 2}
    cells = {
        name: Cell(*map(int, numbers.split()), [int(n) for n in rejected.split()], why)
        for name, numbers, rejected, why in (line for line in lines if len(line) == 4)
    }
    assert set(cells) == (set() if "refused" in about else set(CELLS)), done.stdout
    memory, rollback = MEMORIES[about["memory"]], about.get("rollback", "none")
    return Row(arch, memory, rollback, cells, about.get("refused", ""))


def rows_of(tool, arch, kinds, rounds=ROUNDS):
    """An architecture's rows of the table: one, or two if what holds depends on flash attention.

    A tree needs flash attention wherever it is possible at all: that alone makes no second row.
    """
    made = {
        (kind, flash): run_row(tool, arch, kind, flash, rounds) for kind in kinds for flash in (True, False)
    }
    for flash in (True, False):  # a mixture of experts is like the dense model
        assert len({str(made[kind, flash].words()) for kind in kinds}) == 1, made
    on, off = made[kinds[0], True], made[kinds[0], False]
    tree = 2 + CELLS.index("tree")
    same = all(a == b for i, (a, b) in enumerate(zip(on.words()[0], off.words()[0])) if i != tree)
    return [on] if same else [on, dataclasses.replace(off, name=f"{arch}, no flash attention")]


def format_table(rows):
    notes, lines = [], [["architecture", "memory", "rollback", *CELLS]]
    for row in rows:
        words, whys = row.words()
        for i, why in enumerate(whys):
            if why:
                notes += [why] * (why not in notes)
                words[2 + i] += "".join(SMALL[int(d)] for d in str(notes.index(why) + 1))
        lines.append(
            [f"`{row.name}`" if "," not in row.name else "`{}`, {}".format(*row.name.split(", ")), *words]
        )
    lines.insert(1, ["---"] * len(lines[0]))
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return table + "\n" + "".join(f"{i + 1}. {why}\n" for i, why in enumerate(notes))


def rows_of_the_page():
    """{name: the cells} of the table as it is on the page, and its notes by number."""
    text = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    lines = re.findall(r"^\| (`.+?) \|(.+)\|$", text, re.MULTILINE)
    notes = dict(re.findall(r"^(\d+)\. (.+)$", text, re.MULTILINE))
    return {name.replace("`", ""): [c.strip() for c in rest.split("|")] for name, rest in lines}, notes


def with_reasons(cells, notes):
    """A row of the page as Row.words() has it."""
    words, whys = [], []
    for cell in cells:
        word = cell.rstrip(SMALL)
        number = "".join(str(SMALL.index(d)) for d in cell[len(word) :])
        words.append(word)
        whys.append(notes[number] if number else "")
    return words, whys[2:]


def main():
    with ThreadPoolExecutor(THREADS) as pool:
        tool = program("drafting")
        found = pool.map(lambda item: rows_of(tool, *item), sorted(kinds_of(tool).items()))
        table = format_table([row for rows in found for row in rows])
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + table + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
