"""The patched llama.cpp tree: downloaded once by name and version, checked by hash, patched, and cached.

The cache is $EAGLE3_LLAMA_CACHE, or ~/.cache/eagle3-llama:
    downloads/            the sdist of llama-cpp-python, as pip downloaded it
    llama.cpp/<hash>/     its vendor/llama.cpp with patches/*.patch applied; the hash covers both
$EAGLE3_LLAMA_CPP_DIR names an unpatched tree of the same commit to copy and patch instead of the sdist's.
This file uses the standard library only, because it runs before anything is installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from apply_patches import PatchError, apply_series
from locks import locked, take

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
SDIST = f"llama_cpp_python-{VERSION}.tar.gz"
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
COMMIT = "0c1e57098"  # of llama.cpp in that sdist

ROOT = Path(__file__).resolve().parent.parent
PATCHES = ROOT / "patches"

_INSIDE = f"llama_cpp_python-{VERSION}/vendor/llama.cpp/"
# not compiled, and two thirds of the bytes
_LEFT_OUT = (".git", "build", "docs", "media", "models")
_KEEP_TREES = 4


class BuildError(Exception):
    """One line for the user: what failed and how to fix it. log: the end of a tool's output, shown above."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = "\n".join(log.rstrip().splitlines()[-40:])

    def exit(self) -> NoReturn:
        if self.log:
            print(self.log, file=sys.stderr)
        sys.exit(f"error: {self}")


def cache_dir() -> Path:
    return (
        Path(os.environ.get("EAGLE3_LLAMA_CACHE") or Path.home() / ".cache" / "eagle3-llama")
        .expanduser()
        .absolute()
    )


def say(text: str) -> None:
    print(f"eagle3-llama: {text}", file=sys.stderr, flush=True)


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def hash_files(root: Path, paths: list[Path]) -> str:
    """A hash of names (relative to root) and contents, which is the same in every checkout."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def sdist() -> Path:
    """The path of the pinned sdist in the cache. pip downloads it if it is not there yet."""
    path = cache_dir() / "downloads" / SDIST
    if path.is_file() and sha256_file(path) == SDIST_SHA256:
        return path
    say(f"downloading {PACKAGE}=={VERSION} (77 MB)")
    with download(VERSION) as got:
        found = sha256_file(got)
        if found != SDIST_SHA256:
            raise BuildError(
                f"{SDIST} has sha256 {found}, expected {SDIST_SHA256}: the package index served another "
                "file. It was not kept."
            )
        os.replace(got, path)
    return path


@contextlib.contextmanager
def download(version: str) -> Iterator[Path]:
    """The sdist of this version, downloaded by pip into a temporary folder beside the cached downloads."""
    folder = cache_dir() / "downloads"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"llama_cpp_python-{version}.tar.gz"
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as tmp:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE]
        command += ["--disable-pip-version-check", "--progress-bar", "off", "-d", tmp]
        command += [f"{PACKAGE}=={version}"]
        # pip prepares the package's metadata: variables that are meant for our build must not reach it
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SKBUILD_", "CMAKE_"))}
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        got = Path(tmp) / name
        if done.returncode != 0 or not got.is_file():
            if versions := re.search(r"\(from versions: (.*\d.*)\)", done.stdout):
                newest = ", ".join(versions[1].split(", ")[-5:])
                raise BuildError(f"{PACKAGE} has no version {version}; the newest ones are {newest}")
            raise BuildError(
                f"pip cannot download {PACKAGE}=={version} (see above): check the network or pip's index "
                f"settings, or put {name} into {folder}",
                done.stdout,
            )
        yield got


def patched_tree(source: str | None = None, patched: bool = True) -> tuple[Path, str]:
    """The tree, patched or not, and its hash. source: an unpatched tree to use instead of the sdist's."""
    with using_tree(source, patched) as found:
        return found


@contextlib.contextmanager
def using_tree(source: str | None = None, patched: bool = True) -> Iterator[tuple[Path, str]]:
    """The same, for as long as nobody deletes it: other trees may push it out of the cache."""
    series = hash_files(ROOT, list(PATCHES.glob("*.patch"))) if patched else ""
    origin = _hash_tree(source) if source else SDIST_SHA256
    key = hashlib.sha256(f"{origin} {series} {_LEFT_OUT}".encode()).hexdigest()[:16]
    tree = cache_dir() / "llama.cpp" / key
    tree.parent.mkdir(parents=True, exist_ok=True)
    with locked(_lock_of(tree)):
        if not tree.is_dir():
            _make_tree(tree, source, patched)
            _prune(tree.parent, _KEEP_TREES)
        os.utime(tree)
        yield tree, key


def _make_tree(tree: Path, source: str | None, patched: bool) -> None:
    archive = None if source else sdist()
    tree.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tree.parent, prefix=".tree-") as tmp:
        fresh = Path(tmp) / "llama.cpp"
        if archive:
            _extract(archive, fresh)
        else:
            shutil.copytree(source, fresh, symlinks=True, ignore=_ignore_at(Path(source)))
        try:
            n = len(apply_series(PATCHES, fresh)) if patched else 0
        except PatchError as error:
            raise BuildError(f"a patch does not apply to {source or SDIST}: {error}") from None
        say(f"llama.cpp {COMMIT} with {n or 'no'} patches")
        try:
            os.rename(fresh, tree)
        except OSError:
            if not tree.is_dir():  # otherwise another process has made the same tree in the meantime
                raise


def _extract(archive: Path, target: Path) -> None:
    """Extract the regular files below vendor/llama.cpp. Names that would leave target are refused."""
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            if not member.isfile() or not member.name.startswith(_INSIDE):
                continue
            parts = member.name[len(_INSIDE) :].split("/")
            if parts[0] in _LEFT_OUT:
                continue
            if any(part in ("", ".", "..") for part in parts):
                raise BuildError(f"{archive.name} contains a file with the unsafe name {member.name!r}")
            path = target.joinpath(*parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            with tar.extractfile(member) as data, path.open("wb") as out:
                shutil.copyfileobj(data, out)
            path.chmod(0o755 if member.mode & 0o100 else 0o644)


def _ignore_at(top: Path):
    out = lambda folder, name: name == "__pycache__" or folder == top and name in _LEFT_OUT
    return lambda folder, names: [name for name in names if out(Path(folder), name)]


def _hash_tree(source: str) -> str:
    top = Path(source)
    if not (top / "ggml" / "CMakeLists.txt").is_file():
        raise BuildError(
            f"EAGLE3_LLAMA_CPP_DIR is {source!r}, which is no llama.cpp tree (it has no ggml/CMakeLists.txt)"
        )
    paths = [
        path for child in top.iterdir() if child.name not in _LEFT_OUT for path in [child, *child.rglob("*")]
    ]
    return hash_files(top, [path for path in paths if path.is_file() and "__pycache__" not in path.parts])


def _prune(folder: Path, keep: int) -> None:
    """Delete all but the `keep` most recently used entries of a cache folder, and none that is in use."""
    entries = [path for path in folder.iterdir() if not path.name.startswith(".")]
    for old in sorted(entries, key=lambda path: path.stat().st_mtime, reverse=True)[keep:]:
        with _lock_of(old).open("w") as file:
            if take(file):
                shutil.rmtree(old, ignore_errors=True)


def _lock_of(entry: Path) -> Path:
    """The file that whoever uses an entry of a cache folder locks."""
    return entry.parent / f".{entry.name}.lock"


if __name__ == "__main__":
    try:
        if sys.argv[1:] == ["--sdist"]:
            print(sdist())
        elif not sys.argv[1:]:
            print(patched_tree(os.environ.get("EAGLE3_LLAMA_CPP_DIR"))[0])
        else:
            sys.exit("usage: fetch.py [--sdist]\nPrints the path of the patched tree, or of the sdist.")
    except BuildError as error:
        error.exit()
