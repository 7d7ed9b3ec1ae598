"""Sending a case to a server whose templates hurt."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .cases import PREFIX, Case
from .client import never, send

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests" / "kit"))
import templates

HANG = 60.0  # seconds without an answer; the server's --timeout ends a request before
OPTIONS = "--timeout 40 --prompt-cache 64M --response-store 4M --max-tokens-cap 64".split()


@contextlib.contextmanager
def template_file(name: str) -> Iterator[list[str]]:
    """The option for a file with a template of llama.cpp's that hurts by variables of the request."""
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as file:
        file.write(PREFIX + templates.text(name))
        file.flush()
        yield ["--chat-template-file", file.name]


def post(port: int, made: Case, key: str = "") -> tuple[int, bytearray]:
    """(status, the answer's bytes). Raises OSError if there is none within HANG seconds."""
    leaves = never if made.leaves is None else lambda data: len(data) >= made.leaves
    return send(port, made.path, made.body, key=key, seconds=HANG, leaves=leaves)
