"""A check that a schedule in runs of steps adds up to the same schedule in single steps."""

from __future__ import annotations

import numpy as np

from fp8plan.model.cost.base import IntArray
from fp8plan.model.schedule.scheduler import Schedule


def total(plan: Schedule, column: str) -> int:
    return int((plan.steps * getattr(plan, column)).sum())


def assert_runs_add_up(runs: Schedule, single: Schedule) -> IntArray:
    """Check the runs against the single steps. Returns the single step that begins each run."""
    last = np.cumsum(runs.steps) - 1  # the single step that ends each row
    first: IntArray = last - runs.steps + 1
    np.testing.assert_array_equal(runs.used_blocks, single.used_blocks[last])
    np.testing.assert_array_equal(runs.decode_requests, single.decode_requests[first])
    np.testing.assert_array_equal(runs.decode_kv_tokens, single.decode_kv_tokens[first])
    for column in ("prefill_tokens", "prefill_pairs", "decode_requests", "sampled_requests"):
        assert total(runs, column) == total(single, column)
    assert runs.num_preemptions == single.num_preemptions
    return first
