"""The message where a module is missing: an extra of pyproject.toml installs it, or this system has none."""

from __future__ import annotations

import sys
from pathlib import Path

from ..errors import EagleError, ErrorKind


def command(extra: str) -> str:
    """The command that installs the extra. No package index has this project, so pip needs its folder.

    A checkout stays installed as it is, in editable mode: pip would replace that by a copy.
    """
    of_venv, of_package = Path(sys.prefix).parent, Path(__file__).resolve().parents[2]
    if Path(sys.prefix).name == ".venv" and (of_venv / "scripts" / "_env.py").is_file():
        return f"python3 scripts/_env.py --extra {extra} in {of_venv}"
    if (of_package / "scripts" / "_env.py").is_file():
        return f"pip install -e '.[{extra}]' in {of_package}"
    return f"pip install '.[{extra}]' in the folder of eagle3-llama"


def missing(what: str, extra: str, error: ModuleNotFoundError) -> EagleError:
    """The error of `what`, which could not be imported. extra: has the packages that it needs.

    Raises `error` itself if a module of this package is missing: no extra has it.
    """
    name = str(error.name).partition(".")[0]
    if name == __name__.partition(".")[0]:
        raise error
    mend = command(extra)
    if name in sys.stdlib_module_names:
        mend = f"Python for {sys.platform} has no such module. It runs on Linux and macOS (docs/platforms.md)"
    return EagleError(ErrorKind.LIBRARY, f"{what} {error.name}: {mend}")
