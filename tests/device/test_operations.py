"""scripts/device/operations.py: what a device computes of our graphs, and a line where there is none."""

import os
import sys

import pytest
from commands import run
from paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "device"))
import operations

from eagle3_llama.runtime import devices
from eagle3_llama.runtime.library import find_lib_dir


@pytest.mark.thorough
def test_a_device_is_named_with_what_it_computes(device, capsys):
    """The RPC device accepts every operation."""
    assert operations.main() == 0
    told = capsys.readouterr().out
    assert told.startswith(f"RPC0 (GPU): {device.endpoint}, ") and "GiB free" in told
    assert "MUL_MAT Q4_K" in told and "does not compute nothing" in told and "alone" not in told
    assert [line.split()[0] for line in devices.beside_the_processor(find_lib_dir())] == ["RPC0"]


def test_a_run_without_a_device_says_so():
    """On GitHub as a warning, which the page of the run shows."""
    script = [sys.executable, ROOT / "scripts" / "device" / "operations.py"]
    env = {name: value for name, value in os.environ.items() if name != "GITHUB_ACTIONS"}
    if devices.beside_the_processor(find_lib_dir()):  # a machine with a GPU
        return
    words = "no device computed a product: this run tested the processor alone\n"
    assert run(script, env=env).stdout == words
    assert run(script, env={**env, "GITHUB_ACTIONS": "true"}).stdout == f"::warning::{words}"
