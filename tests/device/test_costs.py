"""The planner's costs on a device."""

import pytest
from tiny_models import PROMPT

from eagle3_llama import EagleLlama


@pytest.mark.parametrize("layers", [99, 3])
def test_the_output_matrix_is_part_of_a_decode(device, files, layers):
    """It is read once for all rows, so nothing is deferred, and the wait for nothing has no cost."""
    with EagleLlama(files[0], eagle_path=files[1], n_max=1, n_ctx=128, n_gpu_layers=layers, verbose=False) as llm:
        llm.engine.prefill(PROMPT)
        for n in (1, 3, 8, 64):
            assert llm.engine.measure_target(n) > 0.0
            assert llm.engine.measure_output(n) == 0.0
