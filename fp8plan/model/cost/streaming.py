"""The cost of a small kernel that streams: its launch, and its bytes at a fraction of the memory's bandwidth."""

from __future__ import annotations

import numpy as np

from fp8plan.model.cost.base import Array, Cost, times, traffic
from fp8plan.model.hardware import Gpu
from fp8plan.model.profile.profile import Profile


def streaming_cost(rows: Array, bytes_per_row: float, names: tuple[str, str], gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of one call with `rows` rows, shape of `rows`; none without rows.

    names: the coefficients of its launch (seconds) and of its bandwidth (a share of the GPU's)
    """
    launch, efficiency = names
    moved = traffic(rows * bytes_per_row, gpu.memory_bandwidth, profile.named(efficiency))
    return moved + times(np.where(rows > 0, 1.0, 0.0), *profile.named(launch))
