"""Builds libmtmd and libe3chat for an installation made with -DEAGLE3_LATER=ON, and copies them there.

    python native/later.py FOLDER

FOLDER has the installed libraries. Its proof.json says with which options and variables they were built; the
rest is built with the same, so that only what is missing is compiled. eagle3_llama/runtime/library.py runs
this when one of these libraries is first asked for. Standard library only.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import proof
import toolchain
from build import build
from fetch import BuildError, say
from locks import locked


def complete(folder: Path) -> None:
    """Does nothing if another process has completed the folder meanwhile. Raises BuildError."""
    with locked(folder / "later.lock", "waiting for another process that compiles the same libraries"):
        record = _record(folder)
        if "later" not in record:
            return
        say("images and the server need more of llama.cpp, which is compiled now, once")
        for name in toolchain.VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(record["environment"])
        out = build(defines=record["later"])
        made = _record(out)
        if made["sources"] != record["sources"]:
            raise BuildError(
                f"the sources have changed since the libraries in {folder} were installed: install them "
                "again (./scripts/demo does, or pip install -e . in the checkout)"
            )
        for path in out.iterdir():
            if path.stem in ("libmtmd", "libe3chat"):  # over those of an earlier installation too
                _copy(path, folder / path.name)
        _copy(out / proof.RECORD, folder / proof.RECORD)  # last: it says that nothing is missing


def _record(folder: Path) -> dict:
    return json.loads((folder / proof.RECORD).read_text(encoding="utf-8"))


def _copy(source: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".new-") as made:
        os.replace(shutil.copy2(source, made), target)


if __name__ == "__main__":
    try:
        complete(Path(sys.argv[1]))
    except BuildError as error:
        error.exit()
    except OSError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit("interrupted; the next call continues from here")
