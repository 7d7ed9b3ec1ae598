"""What a load test writes with --json."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any


def write(file: Path | None, **figures: Any) -> None:
    """Writes the figures and the command to the file, if there is one."""
    if file is not None:
        file.write_text(json.dumps({"command": shlex.join(sys.argv), **figures}) + "\n", encoding="utf-8")
