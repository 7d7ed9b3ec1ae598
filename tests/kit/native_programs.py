"""Finds and runs the programs of native/tests. With sanitizers, what these find is a failure."""

import os
import subprocess
import sys
from pathlib import Path

from commands import run
from paths import ROOT


def folder(sanitized=False):
    """Where the programs are. scripts/test has built them; without it, the first call does."""
    build = [sys.executable, ROOT / "native" / "build.py", *["--sanitize"] * sanitized, "--tests"]
    return Path(run([*build, "--print-dir"], seconds=3600).stdout.strip())


def program(name):
    """One of native/tests/architectures, which make tiny models as llama.cpp's own test does."""
    return folder() / name


def programs_of(request):
    """`programs` for a quick case; `fast_programs` for a thorough one, as it runs the same code."""
    thorough = request.node.get_closest_marker("thorough")
    return request.getfixturevalue("fast_programs" if thorough else "programs")


def passes(programs, name, *args, leaks=True, or_says="ok"):
    done = subprocess.run(
        [programs / name, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=600,
        env={
            **os.environ,
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
            "ASAN_OPTIONS": f"detect_leaks={int(leaks)}",
        },
    )
    assert done.returncode == 0 and done.stdout.strip() in ("ok", or_says), done.stderr[-3000:]
    assert "runtime error" not in done.stderr and "Sanitizer" not in done.stderr, done.stderr[-3000:]
