"""The worst rollouts of H100s: their steps that wait for the GPU are right."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.worst_cells import LEAST, worst


def test_the_steps_of_the_worst_cells_that_wait_for_the_gpu_are_right() -> None:
    found = worst()
    assert min(abs(error) for _, error, _ in found) > LEAST
    on_gpu = [steps.measured[steps.of_gpu] / steps.predicted[steps.of_gpu] for *_, steps in found]
    medians = [float(np.median(ratios)) for ratios in on_gpu if len(ratios)]
    assert len(medians) > 1
    assert medians == pytest.approx([1.0] * len(medians), abs=0.05)
    record, error, steps = found[0]
    assert (record.fields["model"], error > LEAST) == ("Qwen/Qwen3-1.7B", True)
    assert float(np.median(steps.measured / steps.gpu)) < 1.05  # its host was as fast as the GPU, and its loop was not
