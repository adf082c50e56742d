"""The SM clock of a GPU under sustained load, which its power cap holds below the clock of a short burst.

An H200 multiplies BF16 matrices at 800 to 825 TFLOP/s for the first tens of milliseconds and at 700 from then on (rows
of gemm.bf16 in profiles/h200_sxm/vllm-0.26.0/kernels below 1 ms and above 6 ms). Kernels are timed in bursts, engines
run for seconds: there, what is bound by SMs is slower by `clock.sustained_efficiency`. What is bound by memory or by
launches is not, nor the fixed part of a GEMM's wave. One factor for all loads; how power divides between kinds of work
is not modelled. (Left off decode
attention, whose own long rows do not slow down, it leaves 3.0% of the fitted engine steps unexplained instead of 2.5%.)
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fp8plan.model.cost import Cost
from fp8plan.model.profile import Profile

SUSTAINED = "clock.sustained_efficiency"
RATES = ("compute_efficiency", "sm_bandwidth")
TIMES = ("decode_tile_seconds", "decode_token_seconds", "prefill_tile_seconds", "prefill_pair_seconds")


def sustained(profile: Profile) -> Profile:
    """`profile` with the coefficients of an engine that has run for a while; its covariance is left out."""
    if SUSTAINED not in profile.coefficients:  # a CPU
        return profile
    clock = profile.coefficients[SUSTAINED]
    scaled = {name: value * clock ** _power(name) for name, value in profile.coefficients.items()}
    return replace(profile, coefficients=scaled, log_covariance={})


def with_clock(cost: Cost, profile: Profile) -> Cost:
    """`cost` by the sustained `profile`, with its derivative by the log of the clock."""
    moved = [_power(name) * partial for name, partial in cost.partials.items() if _power(name)]
    if not moved or SUSTAINED not in profile.coefficients:
        return cost
    return cost.plus_partials({SUSTAINED: np.sum(moved, axis=0)})


def _power(name: str) -> int:
    """Of the clock, in the coefficient: 1 for what an SM does in a second, -1 for the seconds of what it does."""
    return int(name.endswith(RATES)) - int(name.endswith(TIMES))
