"""The chat templates that llama.cpp's source has to test with, from the pinned sdist."""

import functools
import os
import sys
import tarfile
import tempfile
from pathlib import Path

from paths import ROOT

sys.path.insert(0, str(ROOT / "native"))

import fetch

_INSIDE = f"llama_cpp_python-{fetch.VERSION}/vendor/llama.cpp/models/templates/"


@functools.cache
def folder() -> Path:
    """A folder with all of them, unpacked once."""
    place = fetch.cache_dir() / "templates" / fetch.SDIST_SHA256[:16]
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as tmp, tarfile.open(fetch.sdist()) as tar:
            fresh = Path(tmp) / "templates"
            fresh.mkdir()
            for member in tar:
                name = member.name.removeprefix(_INSIDE)
                if member.isfile() and name != member.name and "/" not in name and name.endswith(".jinja"):
                    (fresh / name).write_bytes(tar.extractfile(member).read())
            try:
                os.rename(fresh, place)
            except OSError:
                if not place.is_dir():  # otherwise another process has unpacked them in the meantime
                    raise
    return place


def names() -> list[str]:
    return sorted(path.stem for path in folder().glob("*.jinja"))


def text(name: str) -> str:
    return (folder() / f"{name}.jinja").read_text(encoding="utf-8")


def file_of(name):
    """The path of a template for `--chat-template-file`; None for "own", the model's own template."""
    return None if name == "own" else str(folder() / f"{name}.jinja")
