"""Apply a series of unified diffs exactly: each hunk at the line it names, each context line equal.

There is no fuzz and no offset, and neither git nor patch(1) is needed. A patch that does not match the tree
exactly is an error that names the patch, the file and the hunk. Renames, copies and binary diffs are refused.
scripts/release/upgrade_check.py shows what a series does on another tree.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@ ?(.*)")
_REFUSED = (b"rename from ", b"copy from ", b"GIT binary patch", b"Binary files ")


class PatchError(Exception):
    """One line: which patch, which file and which hunk, and why it does not apply."""


@dataclass(frozen=True)
class Hunk:
    """One hunk of a file's diff; lines keep their line ends."""

    number: int  # of this file's hunks, from 1
    start: int  # index in the old file of the first line of `before`
    before: list[bytes]  # context and removed lines
    after: list[bytes]  # context and added lines
    section: str  # what follows the second @@: usually the function
    header: int  # index of the @@ line in the patch


@dataclass(frozen=True)
class FileDiff:
    """What a patch does to one file. old is None for a new file, new is None for a deleted one."""

    old: str | None
    new: str | None
    hunks: list[Hunk] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.new or self.old or ""


def apply_series(patch_dir: Path, tree: Path) -> list[Path]:
    """Apply patch_dir/*.patch to the files below tree, in the order of their names."""
    patches = sorted(patch_dir.glob("*.patch"))
    for patch in patches:
        apply_patch(patch, tree)
    return patches


def apply_patch(patch: Path, tree: Path) -> None:
    for diff in read_patch(patch):
        _apply_file(patch.name, diff, tree)


def read_patch(patch: Path) -> list[FileDiff]:
    """The diffs of a patch, one for each file. Raises PatchError for what is no unified diff."""
    lines = patch.read_bytes().splitlines(keepends=True)
    diffs: list[FileDiff] = []
    i = 0
    while i < len(lines):
        if lines[i].startswith(_REFUSED):
            raise PatchError(
                f"{patch.name}: line {i + 1}: renames, copies and binary diffs are not supported"
            )
        if lines[i].startswith(b"--- ") and i + 1 < len(lines) and lines[i + 1].startswith(b"+++ "):
            i = _read_file(patch.name, lines, i, diffs)
        else:
            i += 1
    if not diffs:
        raise PatchError(f"{patch.name}: contains no unified diff")
    return diffs


def _read_file(patch: str, lines: list[bytes], i: int, diffs: list[FileDiff]) -> int:
    """Read the diff of one file, whose `---` is lines[i]; returns the index after its last hunk."""
    diff = FileDiff(_name(lines[i]), _name(lines[i + 1]))
    for name in (diff.old, diff.new):
        if name is not None and (not name or name.startswith("/") or ".." in name.split("/")):
            raise PatchError(f"{patch}: line {i + 1}: refusing the file name {name!r}")
    if not diff.name:
        raise PatchError(f"{patch}: line {i + 1}: names no file")
    i += 2
    while i < len(lines) and (match := _HUNK.match(lines[i])):
        hunk, i = _read_hunk(lines, i, match, len(diff.hunks) + 1, f"{patch}: {diff.name}")
        diff.hunks.append(hunk)
    if not diff.hunks:
        raise PatchError(f"{patch}: {diff.name}: no hunk")
    diffs.append(diff)
    return i


def _read_hunk(
    lines: list[bytes], i: int, match: re.Match[bytes], number: int, where: str
) -> tuple[Hunk, int]:
    """The hunk whose @@ line is lines[i], and the index after it. The counts in its header must be right."""
    where = f"{where}: hunk {number}"
    header = i
    n_before = int(match[2]) if match[2] is not None else 1
    n_after = int(match[4]) if match[4] is not None else 1
    before: list[bytes] = []
    after: list[bytes] = []
    i += 1
    while len(before) < n_before or len(after) < n_after or (i < len(lines) and lines[i].startswith(b"\\")):
        if i == len(lines):
            raise PatchError(f"{where}: ends early")
        kind, text = lines[i][:1], lines[i][1:]
        if kind == b"\\":  # "\ No newline at end of file" applies to the line above it
            last = lines[i - 1][:1]
            if last in b" -" and before:
                before[-1] = before[-1].rstrip(b"\n")
            if last in b" +" and after:
                after[-1] = after[-1].rstrip(b"\n")
        elif kind in (b" ", b"\n"):  # some mailers strip the space of an empty context line
            before.append(text if kind == b" " else b"\n")
            after.append(before[-1])
        elif kind == b"-":
            before.append(text)
        elif kind == b"+":
            after.append(text)
        else:
            raise PatchError(f"{where}: line {i + 1} of the patch is not part of a diff")
        i += 1
    if (len(before), len(after)) != (n_before, n_after):
        raise PatchError(
            f"{where}: its header counts {n_before} and {n_after} lines, found {len(before)} and {len(after)}"
        )
    start = int(match[1]) - 1 if before else int(match[1])  # "-3,0" inserts after line 3
    return Hunk(number, start, before, after, match[5].strip().decode(errors="replace"), header), i


def _apply_file(patch: str, diff: FileDiff, tree: Path) -> None:
    path = tree / diff.name
    if diff.old is None and path.exists():
        raise PatchError(f"{patch}: {diff.name}: the patch creates it, but it exists already")
    if diff.old is not None and not path.is_file():
        raise PatchError(f"{patch}: {diff.name}: no such file in the tree")
    source = [] if diff.old is None else path.read_bytes().splitlines(keepends=True)

    result: list[bytes] = []
    done = 0  # lines of source already copied
    for hunk in diff.hunks:
        where = f"{patch}: {diff.name}: hunk {hunk.number}"
        if hunk.start < done:
            raise PatchError(f"{where}: overlaps the hunk before it")
        if source[hunk.start : hunk.start + len(hunk.before)] != hunk.before:
            difference = _difference(source, hunk)
            raise PatchError(f"{where}: does not match the tree at line {hunk.start + 1}{difference}")
        result += source[done : hunk.start] + hunk.after
        done = hunk.start + len(hunk.before)
    result += source[done:]

    if diff.new is None:
        path.unlink()
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(result))


def _name(line: bytes) -> str | None:
    """The path in a `---` or `+++` line without its a/ or b/; None for /dev/null."""
    name = line[4:].split(b"\t")[0].strip().decode()
    if name == "/dev/null":
        return None
    return name[2:] if name.startswith(("a/", "b/")) else name


def _difference(source: list[bytes], hunk: Hunk) -> str:
    for k, line in enumerate(hunk.before):
        at = hunk.start + k
        found = source[at] if at < len(source) else b"(end of file)"
        if found != line:
            expected, is_there = (text.decode(errors="replace").strip() for text in (line, found))
            return f": expected {expected!r}, line {at + 1} is {is_there!r}"
    return ""


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: apply_patches.py PATCH_DIR TREE")
    try:
        for applied in apply_series(Path(sys.argv[1]), Path(sys.argv[2])):
            print(applied.name)
    except PatchError as error:
        sys.exit(f"error: {error}")
