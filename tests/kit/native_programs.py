"""Runs programs of native/tests that are built with AddressSanitizer and UBSan."""

import os
import subprocess


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
