"""What a load takes of memory beyond plain decoding: with large vocabularies, long texts and long drafts."""

import json
import os
import subprocess
import sys

import pytest
import tiny_models
from cores import THREADS  # noqa: F401
from paths import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")


def measured(**what):
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "kit" / "memory_of_a_load.py", json.dumps(what)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "kit")},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


