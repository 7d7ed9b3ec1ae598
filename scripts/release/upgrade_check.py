#!/usr/bin/env python3
"""What does the next llama-cpp-python need? Apply patches/ to the llama.cpp of another version and report.

    python scripts/release/upgrade_check.py VERSION [--write FOLDER]

For each patch the report says what its header relies on and the tree no longer has. It also says that the
patch applies, that it applies with an offset, or which hunks do not match.
For each of these it shows the file, the function, and how the lines that are there now differ from those that
the patch expects. --write FOLDER writes the series with the line numbers of that version; a hunk that does
not match is written as it is. Exit status: 0 if every hunk applies and all is there that the headers rely on,
1 if not, 2 if the check cannot run.

The sdist is downloaded with pip and kept in the cache of native/fetch.py. Nothing else is left behind.
"""

from __future__ import annotations

import argparse
import collections
import difflib
import os
import re
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "native"))
import fetch
from apply_patches import FileDiff, Hunk, PatchError, read_patch

_FUNCTION = re.compile(
    rb"^(?!(?:public|private|protected|default)\b)[A-Za-z_]"
)  # what git takes for one, too
_RELIES = re.compile(r"^  (\S+) has `(.+)`$", re.MULTILINE)  # a line of a header, under "Relies on:"
_MAX_SHOWN = 40  # lines of a difference


@dataclass
class Result:
    """Where a hunk went. at: index of its first line. offset: lines from its place in the series, or None."""

    diff: FileDiff
    hunk: Hunk
    at: int
    offset: int | None
    now: list[bytes] = field(default_factory=list)  # if it does not match: the lines that are there
    function: str = ""  # and the function they are in
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.offset is not None


class Checker:
    """Applies patch after patch to files in memory. A hunk that does not match is left out."""

    def __init__(self, files: dict[str, list[bytes]], names: set[str]) -> None:
        self.files, self.names = files, names
        self.missing: dict[
            str, dict[bytes, str]
        ] = {}  # of each file: lines that left-out hunks would have added

    def patch(self, path: Path) -> list[Result]:
        return [result for diff in read_patch(path) for result in self._file(path.name, diff)]

    def _file(self, patch: str, diff: FileDiff) -> list[Result]:
        if diff.old is None:
            if diff.name in self.names:
                return [
                    self._nowhere(diff, hunk, "upstream has a file of this name now") for hunk in diff.hunks
                ]
            self.files[diff.name] = list(diff.hunks[0].after)
            self.names.add(diff.name)
            return [Result(diff, diff.hunks[0], 0, 0)]
        if diff.name not in self.files:
            note = "the file is gone"
            base = diff.name.rpartition("/")[2]
            if same := sorted(name for name in self.names if name.rpartition("/")[2] == base):
                note += f"; of the same name: {', '.join(same)}"
            return [self._nowhere(diff, hunk, note) for hunk in diff.hunks]

        old, new, done = self.files[diff.name], [], 0
        results, shift = [], 0  # shift: how far the hunk before was from its place
        for hunk in diff.hunks:
            at = find(old, hunk.before, hunk.start + shift, done)
            if at is None:
                results.append(self._no_match(patch, diff, hunk, old, hunk.start + shift))
                continue
            shift = at - hunk.start
            results.append(Result(diff, hunk, at, shift))
            new += old[done:at] + hunk.after
            done = at + len(hunk.before)
        self.files[diff.name] = new + old[done:]
        if diff.new is None:
            del self.files[diff.name]
            self.names.discard(diff.name)
        return results

    def _nowhere(self, diff: FileDiff, hunk: Hunk, note: str) -> Result:
        return Result(diff, hunk, hunk.start, None, function=hunk.section.rstrip("{ "), note=note)

    def _no_match(self, patch: str, diff: FileDiff, hunk: Hunk, old: list[bytes], near: int) -> Result:
        missing = self.missing.setdefault(diff.name, {})
        expected = [line for line in hunk.before if line.strip()]
        cause = next((missing[line] for line in expected if line in missing and line not in old), None)
        for line in set(hunk.after) - set(hunk.before):
            if line.strip():
                missing.setdefault(line, f"{patch}, hunk {hunk.number}")
        note = f"it builds on {cause}, which does not match" if cause else ""
        if hunk.after and find(old, hunk.after, near, 0) is not None:
            note = "the tree has the result already"
        at = closest(old, hunk.before, near)
        now = old[at : at + len(hunk.before)]
        return Result(diff, hunk, at, None, now, function_at(old, at + _changed_from(hunk)), note)


def find(source: list[bytes], lines: list[bytes], near: int, start: int) -> int | None:
    """The index nearest to `near`, from start on, at which source has exactly these lines."""
    if not lines:
        return near if start <= near <= len(source) else None
    places = [
        i
        for i in range(start, len(source) - len(lines) + 1)
        if source[i] == lines[0] and source[i : i + len(lines)] == lines
    ]
    return min(places, key=lambda i: abs(i - near), default=None)


def closest(source: list[bytes], lines: list[bytes], near: int) -> int:
    """The index at which source is most like these lines. Each line votes; rare ones count more."""
    places = collections.defaultdict(list)
    for i, line in enumerate(source):
        places[line].append(i)
    votes: collections.Counter[int] = collections.Counter()
    for k, line in enumerate(lines):
        for i in places[line] if line.strip() else ():
            votes[max(i - k, 0)] += 1 / len(places[line])
    best = max(votes, key=lambda i: (round(votes[i], 6), -abs(i - near)), default=near)
    return max(0, min(best, len(source) - 1))


def function_at(source: list[bytes], i: int) -> str:
    """The function, struct or macro that line i is in: the last line above that begins in column 1."""
    for line in reversed(source[: i + 1]):
        if _FUNCTION.match(line) and not line.rstrip().endswith(b":"):
            return line.decode(errors="replace").strip().rstrip("{").strip()[:110]
    return ""


def _changed_from(hunk: Hunk) -> int:
    """How many lines of context come before the hunk's first change."""
    same = 0
    while same < min(len(hunk.before), len(hunk.after)) and hunk.before[same] == hunk.after[same]:
        same += 1
    return min(same, max(len(hunk.before) - 1, 0))


def summary(results: list[Result]) -> str:
    failed = [r for r in results if not r.ok]
    if failed:
        return f"{len(failed)} of {len(results)} hunks do not match"
    offsets = sorted({r.offset for r in results} - {0, None})
    if not offsets:
        return "applies"
    moved = f"{offsets[0]:+d}" if len(offsets) == 1 else f"{offsets[0]:+d} to {offsets[-1]:+d}"
    return f"applies with an offset of {moved} lines"


def details(result: Result) -> str:
    """File, hunk, function and what is there now, of a hunk that does not match."""
    diff, hunk = result.diff, result.hunk
    text = f"  {diff.name}, hunk {hunk.number} of {len(diff.hunks)}, in {result.function or '?'}\n"
    if result.note:
        text += f"    note: {result.note}\n"
    if result.now:
        text += f"    line {result.at + 1} now; -: expected by the patch, +: what is there\n"
        text += "".join(f"      {line}\n" for line in _difference(hunk.before, result.now))
    return text


def _difference(expected: list[bytes], now: list[bytes]) -> list[str]:
    old, new = ([line.decode(errors="replace").rstrip() for line in lines] for lines in (expected, now))
    lines = list(difflib.unified_diff(old, new, lineterm="", n=1))[2:]
    shown = [line for line in lines if not line.startswith("@@")]
    shown = _trimmed(_trimmed(shown)[::-1])[::-1]
    return shown[:_MAX_SHOWN] + ["..."] * (len(shown) > _MAX_SHOWN)


def _trimmed(lines: list[str]) -> list[str]:
    """Without leading lines that the patch does not contain: both sides have the same number of lines."""
    first = next((i for i, line in enumerate(lines) if line[0] != "+"), 0)
    return lines[first:] if lines and lines[first][0] == " " else lines


def relied_on(path: Path) -> list[tuple[str, str]]:
    """(file, code) of each line of a patch's header that says what the patch relies on."""
    header = path.read_text(encoding="utf-8").partition("diff --git")[0]
    return _RELIES.findall(header)


def broken(path: Path, files: dict[str, list[bytes]]) -> list[str]:
    """What a patch relies on and the tree does not have, a line each. files: those before the series."""
    texts = {name: b"".join(lines).decode(errors="replace") for name, lines in files.items()}
    return [
        f"  relies on `{code}` in {name}, which "
        + ("is gone: read the patch's header\n" if name in texts else "has no such file\n")
        for name, code in relied_on(path)
        if code not in texts.get(name, "")
    ]


def refreshed(path: Path, results: list[Result]) -> bytes:
    """The patch with the line numbers at which its hunks apply."""
    lines = path.read_bytes().splitlines(keepends=True)
    grown: collections.Counter[str] = collections.Counter()  # lines that earlier hunks add to a file
    for r in results:
        hunk, name = r.hunk, r.diff.name
        if r.ok and hunk.before:
            start = r.at + 1
            counts = [len(hunk.before), len(hunk.after)]
            tail = lines[hunk.header].split(b"@@", 2)[2]
            ranges = [
                f"{sign}{first}" + (f",{n}" if n != 1 else "")
                for sign, first, n in zip("-+", (start, start + grown[name]), counts)
            ]
            lines[hunk.header] = f"@@ {' '.join(ranges)} @@".encode() + tail
            grown[name] += len(hunk.after) - len(hunk.before)
    return b"".join(lines)


def get_sdist(version: str) -> Path:
    """The sdist in the cache, downloaded if it is not there. Only the pinned version's hash is known."""
    if version == fetch.VERSION:
        return fetch.sdist()
    if not re.fullmatch(r"\d+(\.\w+)+", version):
        raise fetch.BuildError(f"{version!r} is not a version; one looks like {fetch.VERSION}")
    path = fetch.cache_dir() / "downloads" / f"llama_cpp_python-{version}.tar.gz"
    if not path.is_file():
        fetch.say(f"downloading {fetch.PACKAGE}=={version} (about 77 MB)")
        with fetch.download(version) as got:
            os.replace(got, path)
    return path


def read_tree(sdist: Path, wanted: set[str]) -> tuple[dict[str, list[bytes]], set[str], str]:
    """Of vendor/llama.cpp: lines of the wanted files, names of all files, and the commit ("" if unknown)."""
    files, names, commit = {}, set(), ""
    try:
        with tarfile.open(sdist) as tar:
            for member in tar:
                inside = member.name.partition("/")[2]
                if inside == ".git/modules/vendor/llama.cpp/HEAD":
                    commit = tar.extractfile(member).read().decode().strip()
                name = inside.removeprefix("vendor/llama.cpp/")
                if name == inside or not member.isfile():
                    continue
                names.add(name)
                if name in wanted:
                    files[name] = tar.extractfile(member).read().splitlines(keepends=True)
    except (tarfile.TarError, EOFError, OSError) as e:
        why = str(e).partition("\n")[0]
        raise fetch.BuildError(f"cannot read {sdist} ({why}): delete it to download it again") from None
    if not names:
        raise fetch.BuildError(f"{sdist.name} contains no vendor/llama.cpp")
    return files, names, commit


def check(series: Path, files: dict[str, list[bytes]], names: set[str], write: Path | None = None) -> bool:
    """Print the report; True if every hunk applies and all is there that the headers rely on."""
    patches = sorted(series.glob("*.patch"))
    lost = {path: broken(path, files) for path in patches}  # before the series changes the files
    checker, n_patches, n_failed = Checker(files, names), 0, 0
    width = max((len(p.stem) for p in patches), default=0)
    for path in patches:
        results = checker.patch(path)
        failed = [r for r in results if not r.ok]
        print(f"{path.stem:{width}}  {summary(results)}")
        print("".join(lost[path]), end="")
        print("".join(map(details, failed)), end="", flush=True)
        n_patches += bool(failed)
        n_failed += len(failed)
        if write:
            write.mkdir(parents=True, exist_ok=True)
            (write / path.name).write_bytes(refreshed(path, results))
    if n_lost := sum(map(len, lost.values())):
        print(f"{n_lost} things that patches rely on are gone")
    if n_failed:
        print(f"{n_failed} hunks in {n_patches} of {len(patches)} patches need work")
    else:
        print(f"all {len(patches)} patches apply")
    return not n_failed and not n_lost


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0] if __doc__ else None,
        epilog="See eagle3_llama/docs/upgrading.md for the steps of an upgrade.",
    )
    parser.add_argument("version", help=f"of llama-cpp-python, for instance {fetch.VERSION}")
    parser.add_argument("--patches", type=Path, default=fetch.PATCHES, help="the series (default: patches/)")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the series with new line numbers")
    arguments = parser.parse_args()
    try:
        patches = sorted(arguments.patches.glob("*.patch"))
        diffs = [diff for path in patches for diff in read_patch(path)]
        others = {name for path in patches for name, _ in relied_on(path)}
        if not diffs:
            raise fetch.BuildError(f"no patches in {arguments.patches}")
        sdist = get_sdist(arguments.version)
        fetch.say(f"reading {sdist.name}")
        files, names, commit = read_tree(sdist, others | {diff.name for diff in diffs})
        print(f"{fetch.PACKAGE} {arguments.version}, llama.cpp {commit[:9] or '(commit unknown)'}")
        print(f"sha256 {fetch.sha256_file(sdist)}")
        return 0 if check(arguments.patches, files, names, arguments.write) else 1
    except (fetch.BuildError, PatchError) as e:
        if isinstance(e, fetch.BuildError) and e.log:
            print(e.log, file=sys.stderr)
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
