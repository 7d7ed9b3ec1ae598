"""scripts/test_gpu, as far as no Vulkan is needed: what is missing is named, and a fault is a line.

The run itself takes Mesa's drivers and half an hour of compiling: it is made by hand before a release.
"""

import sys

import pytest
from commands import run
from paths import ROOT

sys.path.insert(0, str(ROOT / "native"))
sys.path.insert(0, str(ROOT / "scripts" / "device"))
import run_on_card
import vulkan
from fetch import BuildError


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(vulkan, "_DRIVERS", (str(tmp_path),))
    with pytest.raises(BuildError, match="apt-get install glslc spirv-headers libvulkan-dev mesa-vulkan"):
        vulkan.lavapipe()


def test_headers_that_are_too_old_are_known(tmp_path):
    header = tmp_path / "vulkan_core.h"
    header.write_text("#define VK_HEADER_VERSION_COMPLETE 1\n#define VK_HEADER_VERSION 239\n")
    assert vulkan.version(header) == 239 < vulkan.NEWEST and vulkan.version(tmp_path / "none") == 0


def test_lavapipe_is_the_only_device(tmp_path):
    """ggml leaves out a device that is a processor, unless its number is named."""
    env = vulkan.environment(tmp_path, "/icd/lvp.json")
    assert env["EAGLE3_LLAMA_LIB_DIR"] == str(tmp_path) and env["VK_DRIVER_FILES"] == "/icd/lvp.json"
    assert env["VK_ICD_FILENAMES"] == "/icd/lvp.json" and env["GGML_VK_VISIBLE_DEVICES"] == "0"
    assert "VK_DRIVER_FILES" not in vulkan.environment(tmp_path, None)


def test_its_steps_are_those_of_a_run_on_a_card():
    assert set(vulkan.STEPS.split(",")) <= {step.name for step in run_on_card.STEPS}


def test_a_fault_is_a_line():
    lines = [
        {"what": "a rehearsal"},
        {"step": "machine", "ended": "done",
         "rows": [{"what": "device", "name": "Vulkan0", "description": "llvmpipe"}]},
        {"step": "texts", "ended": "failed", "message": "AssertionError: the text",
         "rows": [{"same": True}, {"same": False}]},
        {"step": "ties", "ended": "done", "rows": [{"texts": 6, "differ": 1, "gaps": [0.001]}]},
    ]  # fmt: skip
    assert list(vulkan.summary(lines)) == [
        "device: Vulkan0, llvmpipe",
        "machine: done",
        "texts: failed, 1 of 2 texts right",
        "  AssertionError: the text",
        "ties: done, 1 of 6 texts differ, at near ties",
    ]


def test_the_command_has_a_help():
    done = run([sys.executable, ROOT / "scripts" / "device" / "vulkan.py", "--help"])
    assert "apt-get install glslc" in done.stdout
    assert "scripts/device/vulkan.py" in (ROOT / "scripts" / "test_gpu").read_text()
