"""Tests of other folders once more, in a process whose models are on a device."""

import os
import sys

import pytest
from commands import run
from paths import ROOT

pytestmark = [
    pytest.mark.thorough,  # it needs the library of a device
    pytest.mark.skipif(sys.platform == "win32", reason="as on Linux and macOS"),
]
ALL, HALF = 99, 3  # layers; the output matrix counts as one
# what they test, how many layers are on the device, files and options of pytest: their quick tests, as the
# others differ in values alone
RUNS = {
    "mechanics": (ALL, "runtime/test_mechanics.py", "-k", "not thousands and not threads"),
    "capture": (ALL, "runtime/test_capture.py", "runtime/test_sources.py"),
    "trees": (ALL, "runtime/test_trees.py", "-k", "not measured and not logits"),
    "trees, half of the layers": (HALF, "runtime/test_trees.py", "-k", "logits or need_flash"),
    "trees in other caches": (ALL, "runtime/test_memories.py", "-k", "trees_without or whole_window"),
    "planner": (ALL, "runtime/test_planner.py"),
    "states": (ALL, "llama/test_states.py", "batching/test_batching_states.py"),
    "states, half of the layers": (HALF, "llama/test_states.py", "batching/test_saved_files.py"),
    "slots": (ALL, "batching/test_batching.py", "batching/test_batching_chunks.py"),
    "slots, half of the layers": (HALF, "batching/test_batching.py"),
    "server": (ALL, "server/test_server_answers.py"),
    "drafts from texts": (ALL, "runtime/test_text_memory.py"),
    "capture for training": (ALL, "--all", "train/test_train_data.py", "train/test_train_states.py"),
}


@pytest.mark.parametrize("what", RUNS)
def test_on_the_device(what):
    layers, *words = RUNS[what]
    files = [ROOT / "tests" / word if word.endswith(".py") else word for word in words]
    path = os.pathsep.join([str(ROOT / "tests" / "kit"), os.environ.get("PYTHONPATH", "")])
    settings = {"EAGLE3_TEST_LAYERS": str(layers), "PYTHONPATH": path, "OMP_WAIT_POLICY": "passive"}
    run(
        [sys.executable, "-m", "pytest", "-q", *"-p device_plugin -p no:cacheprovider".split(), *files],
        env={**os.environ, **settings},
        cwd=ROOT,
        seconds=800,
    )
