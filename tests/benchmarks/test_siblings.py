"""The law for GPUs that share a profile, against single kernels that were timed on both of a pair."""

from __future__ import annotations

import math

from benchmarks.siblings import KERNELS, ratios

NEAR = {"norm": 0.16, "sampling.v2": 0.11}  # 256 rows of a norm stay in the L2 cache; V2 waits for SMs all the time
OTHERS = 0.07


def test_kernels_of_the_h100_are_as_much_slower_as_the_law_says() -> None:
    found = {kernel: medians for kernel, _, medians in ratios()}
    assert found.keys() == KERNELS.keys()
    for kernel, (timed, by_law, by_bandwidth) in found.items():
        assert abs(math.log(by_law / timed)) < NEAR.get(kernel, OTHERS), kernel
        assert abs(math.log(by_law / timed)) < abs(math.log(by_bandwidth / timed)), kernel
    for kernel in ("quantise", "kv_write.bf16", "kv_write.fp8"):  # as if memory bound them
        timed, _, by_bandwidth = found[kernel]
        assert math.log(by_bandwidth / timed) > 0.2, kernel
