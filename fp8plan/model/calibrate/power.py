"""The power coefficients that fit the power readings of measured rollouts: least squares, without any time.

    mean watts = idle * clock + (memory * seconds of its bytes + bf16, fp8 * seconds of their FLOPs) / seconds

Readings are NVML's, sampled during each rollout (fp8plan.runtime.measure.rollouts.watch). They hold at the limit, too,
where the clock falls.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fp8plan.model.architecture import Experts
from fp8plan.model.calibrate.engine_steps import Windows
from fp8plan.model.cost.base import Array
from fp8plan.model.cost.bounds import bytes_bound, flops_by_dtype
from fp8plan.model.cost.power import IDLE, MATH, MEMORY
from fp8plan.model.profile.profile import Profile

LEAST_SECONDS, MOST_SECONDS = 0.9, 4.0  # shorter: the sampling misses too much; longer: no better known than that
LEAST_RUNS = 12
READING_SD = 40.0  # watts between a run and the fit, of cards and of what is not modelled
# Few rollouts are bound by FP8 FLOPs, so their energy is not left to the readings alone: 0.75 of BF16's for each FLOP,
# 1.5 times the watts at a peak twice as high, give or take 0.15. Assumed.
FP8_RATIO, FP8_RATIO_SD = 1.5, 0.15


def power_coefficients(steps: Sequence[Windows], profile: Profile) -> dict[str, float]:
    """The coefficients of fp8plan.model.cost.power; none without power readings of LEAST_RUNS rollouts, or where the
    GPU's limit is not known.
    """
    runs = [x for x in steps if x.record.fields.get("power_w") and x.record.fields.get("sm_mhz")]
    runs = [x for x in runs if x.record.seconds >= LEAST_SECONDS and x.record.setup.gpu.power_limit_watts]
    runs = [x for x in runs if not _computes_padding(x)]
    if len(runs) < LEAST_RUNS:
        return {}
    fastest = max(float(x.record.fields["sm_mhz"]) for x in runs)
    used = np.array([_used(x, profile, fastest) for x in runs])
    watts = np.array([float(x.record.fields["power_w"]) for x in runs])
    weights = np.sqrt([min(x.record.seconds, MOST_SECONDS) for x in runs]) / READING_SD
    typical = np.linalg.lstsq(used[:, :3], watts, rcond=None)[0][2]
    ratio = np.array([0.0, 0.0, -FP8_RATIO, 1.0]) / (FP8_RATIO_SD * typical)
    equations, right = np.vstack([used * weights[:, None], ratio]), np.append(watts * weights, 0.0)
    found = np.linalg.lstsq(equations, right, rcond=None)[0]
    if (found <= 0).any():
        return {}
    return dict(zip((IDLE, MEMORY, MATH["bf16"], MATH["fp8"]), found.tolist(), strict=True))


def _computes_padding(run: Windows) -> bool:
    """Tell whether a rollout computes many more rows than are counted: experts do, with a few tokens for each."""
    return bool(run.record.setup.shape.parts_of(Experts))


def _used(run: Windows, profile: Profile, fastest: float) -> Array:
    """A rollout's clock, and its mean use of memory, BF16 and FP8 math, as fractions of their peaks."""
    engine, times = run.record.setup.step_model(profile), run.weights.sum(axis=0)
    math = flops_by_dtype(engine, run.batch)
    seconds = [bytes_bound(engine, run.batch), math["bf16"], math["fp8"]]
    use = [float(times @ x) / float(run.seconds.sum()) for x in seconds]
    return np.array([float(run.record.fields["sm_mhz"]) / fastest, *use])
