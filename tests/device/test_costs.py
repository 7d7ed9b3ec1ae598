"""The planner's costs on a device: nothing is deferred, first decodes are slow, and costs have steps."""

import collections
import time

import pytest
from tiny_models import PROMPT, take

from eagle3_llama import EagleLlama
from eagle3_llama.runtime.costs import Times, measure, measure_in_use
from eagle3_llama.runtime.engine import Engine

STEPS = {1: 10.0, 2: 11.0, 5: 14.0, 9: 20.0, 17: 26.0, 33: 40.0}  # ms from so many rows on
CAPTURE = 0.010  # seconds that each of the first three decodes of a size takes longer


@pytest.mark.thorough
@pytest.mark.parametrize("layers", [99, 3])
def test_the_output_matrix_is_part_of_a_decode(device, files, layers):
    """It is read once for all rows, so nothing is deferred, and the wait for nothing has no cost."""
    with EagleLlama(
        files[0], eagle_path=files[1], n_max=1, n_ctx=128, n_gpu_layers=layers, verbose=False
    ) as llm:
        llm.engine.prefill(PROMPT)
        for n in (1, 3, 8, 64):
            assert llm.engine.measure_target(n) > 0.0
            assert llm.engine.measure_output(n) == 0.0
            assert llm.engine.measure_step(n) >= 0.0


@pytest.mark.thorough
def test_a_load_measures_as_on_a_device(device, files, monkeypatch, tmp_path):
    """Each size four times: CUDA captures its graph in the second decode."""
    monkeypatch.setenv("EAGLE3_LLAMA_COSTS", str(tmp_path))
    sizes, own = [], Engine.measure_target

    def counted(self, n, slot=0):
        sizes.append(n)
        return own(self, n, slot)

    monkeypatch.setattr(Engine, "measure_target", counted)
    with EagleLlama(files[0], eagle_path=files[1], n_ctx=512, n_gpu_layers=99, verbose=False) as llm:
        costs = llm.engine.planner.costs
        take(llm, 20)
    runs = [n for n, m in zip(sizes, sizes[3:]) if n == m]
    assert {2, 4, 5, 8, 9, 16, 17, 24, 32, 33, 64} <= set(runs)
    assert costs.output == [0.0] * 65


class SteppedDevice:
    """Says how long calls take, on a clock of its own; costs rise a little between steps."""

    drafter = "head"

    def __init__(self):
        self.now, self.n, self.seen = 0.0, 0, collections.Counter()

    def took(self, part, n, seconds):
        self.seen[part, n] += 1
        self.now += seconds + CAPTURE * (self.seen[part, n] <= 3)
        return seconds + CAPTURE * (self.seen[part, n] <= 3)

    def rewind(self, n, slot=0):
        self.n = n

    def n_past(self, slot=0):
        return self.n

    def prefill(self, tokens, slot=0):
        self.n += len(tokens)
        self.now += 1e-4 * len(tokens)

    @staticmethod
    def layers(n):
        first = max(step for step in STEPS if step <= n)
        return 1e-3 * (STEPS[first] + 0.1 * (n - first))

    def measure_target(self, n, slot=0):
        return self.took("layers", n, self.layers(n))

    def measure_output(self, n):
        return 0.0

    def measure_head(self, n, slot=0):
        return self.took("head", n, 0.001)

    def measure_step(self, n, slot=0):
        return self.took("step", n, 0.0004)

    def measure_back(self, slot=0):
        return 0.0


@pytest.mark.parametrize("in_use", [False, True])
def test_costs_between_steps(monkeypatch, in_use):
    """Each number of rows costs what it does, and the first decodes of a size do not count."""
    device = SteppedDevice()
    monkeypatch.setattr(time, "perf_counter", lambda: device.now)
    if in_use:
        device.prefill([1] * 100)
        costs = measure_in_use(device, 4096, Times(), large=True, on_device=True)
    else:
        costs = measure(device, 4096, 256, on_device=True)
    for n in range(1, 65):
        assert costs.layers[n] == pytest.approx(device.layers(n), rel=0.001), n
    assert costs.head[1] == costs.head[8] == pytest.approx(0.0004)
    assert costs.first == pytest.approx(0.001 - 0.0004)  # the wait for a draft
    assert device.now < 4.0
