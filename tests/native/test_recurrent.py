"""Rollbacks of recurrent and hybrid memories (patch 0016), on all architectures that have them."""

import pytest
from commands import run
from native_programs import passes, program, programs_of
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
# Their states are written by the code of another one, and kept in the same kind of memory.
ALIKE = ["lfm2moe", "nemotron_h_moe", "qwen35moe"]


@pytest.fixture(scope="module")
def tool():
    return program("architectures")


@pytest.mark.parametrize("arch", each(ROLLBACK, quick=lambda arch: arch not in ALIKE))
def test_what_can_be_taken_back(request, tool, tmp_path, arch):
    """As many tokens as the memory says, with the bits of plain decoding behind them; the rest is refused."""
    run([tool, "save", arch, tmp_path])
    passes(programs_of(request), "recurrent_test", next(tmp_path.glob("*.gguf")))
