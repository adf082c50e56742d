"""The share of the GPU that an engine running for seconds gets, against kernels timed alone: SM clock and memory.

The clock: the power cap holds it below that of a short burst. An H200 multiplies BF16 matrices at 800 to 825 TFLOP/s
for the first tens of milliseconds and at 700 from then on (rows of gemm.bf16 in profiles/h200_sxm/vllm-0.26.0/kernels
below 1 ms and above 6 ms), so that in engines what is bound by SMs is slower by `clock.sustained_efficiency`. What is
bound by launches is not, nor the fixed part of a GEMM's wave. One factor for all loads, unless a profile knows what
kernels draw: then the power limit is that of each step (fp8plan.model.cost.power), and this factor is only that of
kernels timed for long.

The memory: engine steps find `memory.sustained_efficiency` of the bandwidth that kernels found, 2.5% less on H200s.
Hot memory refreshes more often, and cards of one model differ by as much (one cell on five cards: 2.96 to 3.06 s);
kernels and steps were measured on different cards, so that the two cannot be told apart. With it, engines that the fit
has not seen are predicted within 3.3% instead of 3.5%.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import cache

import numpy as np

from fp8plan.model.cost.base import Cost
from fp8plan.model.profile.profile import Profile

CLOCK, MEMORY = "clock.sustained_efficiency", "memory.sustained_efficiency"
POWER = "power.running.kernel_watts"  # a profile that has it knows fp8plan.model.cost.power
SM_RATES = ("compute_efficiency", "sm_bandwidth")
SM_TIMES = ("decode_tile_seconds", "decode_token_seconds", "prefill_tile_seconds", "prefill_pair_seconds")


def sustained(profile: Profile, only: str | None = None) -> Profile:
    """A copy of `profile` with the coefficients of an engine that has run for a while. Its covariance is left out.

    only: the one factor that counts, where it is not an engine that runs
    """
    factors = _factors(profile, only)
    if not factors:  # a CPU
        return profile
    scaled = dict(profile.coefficients)
    for factor, power in factors.items():
        scaled = {name: value * profile.coefficients[factor] ** power(name) for name, value in scaled.items()}
    found = copy(profile)  # not dataclasses.replace, which would check thousands of values again that are the same
    object.__setattr__(found, "coefficients", scaled)
    object.__setattr__(found, "log_covariance", {})
    return found


def with_sustained(cost: Cost, profile: Profile, only: str | None = None) -> Cost:
    """The cost by the `sustained` profile, with its derivatives by the logs of the clock and of the memory."""
    found = {}
    for factor, power in _factors(profile, only).items():
        moved = [power(name) * partial for name, partial in cost.partials.items() if power(name)]
        if moved:
            found[factor] = np.sum(moved, axis=0)
    return cost.plus_partials(found)


def _factors(profile: Profile, only: str | None) -> dict[str, Callable[[str], int]]:
    """The power of each factor in the coefficient called `name`, for the factors that the profile has."""
    powers = {CLOCK: _of_clock, MEMORY: _of_memory}
    if only is None and knows_power(profile):  # by which each step at the power limit is as long as its energy takes
        del powers[CLOCK]
    return {name: power for name, power in powers.items() if name in profile.coefficients and only in (None, name)}


def knows_power(profile: Profile) -> bool:
    """Return True if the profile has the coefficients of fp8plan.model.cost.power."""
    return POWER in profile.coefficients


@cache
def _of_clock(name: str) -> int:
    """The power of the clock in a coefficient: 1 for work per second of an SM, -1 for seconds of its work."""
    return int(name.endswith(SM_RATES)) - int(name.endswith(SM_TIMES))


@cache
def _of_memory(name: str) -> int:
    """The power of the memory in a coefficient: 1 for a share of the bandwidth, -1 for a number of reads."""
    bandwidth = name.endswith("bandwidth_efficiency") and not name.startswith("collective")
    return int(bandwidth) - int(name.endswith(".passes"))
