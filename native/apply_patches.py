"""Apply a series of unified diffs exactly: every hunk at its stated line, every context line equal.

No fuzz, no offset, no git and no patch(1) needed. A patch that does not fit the pinned tree to the letter
is an error that names patch, file and hunk; renames, copies and binary diffs are refused.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_REFUSED = (b"rename from ", b"copy from ", b"GIT binary patch", b"Binary files ")


class PatchError(Exception):
    """One line: which patch, file and hunk, and why it does not apply."""


def apply_series(patch_dir: Path, tree: Path) -> list[Path]:
    """Apply patch_dir/*.patch in the order of their names to the files below tree."""
    patches = sorted(patch_dir.glob("*.patch"))
    for patch in patches:
        apply_patch(patch, tree)
    return patches


def apply_patch(patch: Path, tree: Path) -> None:
    lines = patch.read_bytes().splitlines(keepends=True)
    i, n_files = 0, 0
    while i < len(lines):
        if lines[i].startswith(_REFUSED):
            raise PatchError(
                f"{patch.name}: line {i + 1}: renames, copies and binary diffs are not supported"
            )
        if lines[i].startswith(b"--- ") and i + 1 < len(lines) and lines[i + 1].startswith(b"+++ "):
            i = _apply_file(patch, lines, i, tree)
            n_files += 1
        else:
            i += 1
    if n_files == 0:
        raise PatchError(f"{patch.name}: holds no unified diff")


def _apply_file(patch: Path, lines: list[bytes], i: int, tree: Path) -> int:
    """Apply the diff of one file, whose `---` is lines[i]; returns the index after its last hunk."""
    old_name, new_name = _name(lines[i]), _name(lines[i + 1])
    name = old_name if new_name is None else new_name
    if name is None or name.startswith("/") or ".." in name.split("/"):
        raise PatchError(f"{patch.name}: line {i + 1}: refusing the file name {name!r}")
    path = tree / name
    if old_name is None and path.exists():
        raise PatchError(f"{patch.name}: {name}: is created by the patch but exists already")
    if old_name is not None and not path.is_file():
        raise PatchError(f"{patch.name}: {name}: no such file in the tree")
    source = [] if old_name is None else path.read_bytes().splitlines(keepends=True)

    result: list[bytes] = []
    done, hunk, i = 0, 0, i + 2  # done: lines of source already copied
    while i < len(lines) and (match := _HUNK.match(lines[i])):
        hunk += 1
        where = f"{patch.name}: {name}: hunk {hunk}"
        before, after, i = _read_hunk(lines, i, match, where)
        start = int(match[1]) - 1 if before else int(match[1])  # "-3,0" inserts after line 3
        if start < done:
            raise PatchError(f"{where}: overlaps the hunk before it")
        if source[start : start + len(before)] != before:
            raise PatchError(
                f"{where}: does not match the tree at line {start + 1}{_difference(source, start, before)}"
            )
        result += source[done:start] + after
        done = start + len(before)
    if hunk == 0:
        raise PatchError(f"{patch.name}: {name}: no hunk")
    result += source[done:]

    if new_name is None:
        path.unlink()
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(result))
    return i


def _read_hunk(
    lines: list[bytes], i: int, match: re.Match[bytes], where: str
) -> tuple[list[bytes], list[bytes], int]:
    """The lines before and after, by the counts in the hunk's own header."""
    n_before = int(match[2]) if match[2] is not None else 1
    n_after = int(match[4]) if match[4] is not None else 1
    before: list[bytes] = []
    after: list[bytes] = []
    i += 1
    while len(before) < n_before or len(after) < n_after or (i < len(lines) and lines[i].startswith(b"\\")):
        if i == len(lines):
            raise PatchError(f"{where}: ends early")
        kind, text = lines[i][:1], lines[i][1:]
        if kind == b"\\":  # "\ No newline at end of file" belongs to the line above it
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
            raise PatchError(f"{where}: line {i + 1} of the patch is no part of a diff")
        i += 1
    if (len(before), len(after)) != (n_before, n_after):
        raise PatchError(
            f"{where}: its header counts {n_before} and {n_after} lines, found {len(before)} and {len(after)}"
        )
    return before, after, i


def _name(line: bytes) -> str | None:
    """The path of a `---` or `+++` line without its a/ or b/; None for /dev/null."""
    name = line[4:].split(b"\t")[0].strip().decode()
    if name == "/dev/null":
        return None
    return name[2:] if name.startswith(("a/", "b/")) else name


def _difference(source: list[bytes], start: int, before: list[bytes]) -> str:
    for k, line in enumerate(before):
        found = source[start + k] if start + k < len(source) else b"(end of file)"
        if found != line:
            show = [text.decode(errors="replace").strip() for text in (line, found)]
            return f": expected {show[0]!r}, line {start + k + 1} is {show[1]!r}"
    return ""


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: apply_patches.py PATCH_DIR TREE")
    try:
        for applied in apply_series(Path(sys.argv[1]), Path(sys.argv[2])):
            print(applied.name)
    except PatchError as error:
        sys.exit(f"error: {error}")
