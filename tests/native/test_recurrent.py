"""Rollbacks of recurrent and hybrid memories (patch 0016), on all architectures that have them."""

import pytest
from commands import run
from native_programs import passes, program
from tiers import each

ROLLBACK = [
    "bailingmoe3",
    "deepseek4",
    "glm5-next",
    "kimi-k3",
    "lfm2",
    "lfm2moe",
    "nemotron_h",
    "nemotron_h_moe",
    "qwen35",
    "qwen35moe",
    "qwen4exp",
]
# What writes their states, and the kind of their memory, are those of others: no sanitizer for them.
ALIKE = ["lfm2moe", "nemotron_h_moe", "qwen35moe"]
SLOW = ["deepseek4", "qwen4exp"]


@pytest.fixture(scope="module")
def tool():
    return program("architectures")


@pytest.mark.parametrize("arch", each(ROLLBACK, quick=lambda arch: arch not in ALIKE + SLOW))
def test_what_can_be_taken_back(programs, fast_programs, tool, tmp_path, arch):
    """As many tokens as the memory says, with the bits of plain decoding behind them; the rest is refused."""
    run([tool, "save", arch, tmp_path])
    passes(fast_programs if arch in ALIKE else programs, "recurrent_test", next(tmp_path.glob("*.gguf")))
