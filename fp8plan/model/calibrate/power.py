"""The power coefficients that fit the power readings of measured rollouts: least squares, without any time.

    mean watts = idle * clock + (memory * seconds of its bytes + math * seconds of its FLOPs) / seconds

Math is that of GEMMs and attention, and that of routed experts, each in BF16 and FP8. Readings are NVML's, sampled
during each rollout (fp8plan.runtime.measure.rollouts.watch). They hold at the limit, too, where the clock falls.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fp8plan.model.calibrate.engine_steps import Windows
from fp8plan.model.cost.base import Array
from fp8plan.model.cost.bounds import bytes_bound, flops_by_kind
from fp8plan.model.cost.power import EXPERTS, IDLE, MATH, MEMORY
from fp8plan.model.profile.profile import Profile

LEAST_SECONDS, MOST_SECONDS = 0.9, 4.0  # shorter: the sampling misses too much; longer: no better known than that
LEAST_RUNS = 12
ALWAYS = (IDLE, MEMORY)
READING_SD = 40.0  # watts between a run and the fit, of cards and of what is not modelled
# Few rollouts are bound by FP8 FLOPs, so their energy is not left to the readings alone: 0.75 of BF16's for each FLOP,
# 1.5 times the watts at a peak twice as high. Assumed. With 0.15 instead of 0.05, readings make it 1.64, as they count
# what quantises and adds up in decode steps as FP8 FLOPs. Long GEMMs say less: 702 TFLOP/s of BF16 at 1,500 MHz, 1,255
# of FP8 at 1,605 (16,384 x 51,200 x 5,120 in profiles/h200_sxm/vllm-0.26.0/kernels/gemm.jsonl).
FP8_RATIO, FP8_RATIO_SD = 1.5, 0.05


def power_coefficients(steps: Sequence[Windows], profile: Profile) -> dict[str, float]:
    """The coefficients of fp8plan.model.cost.power; none without power readings of LEAST_RUNS rollouts, or where the
    GPU's limit is not known. Those of experts are there if a rollout had some.
    """
    runs = [x for x in steps if x.record.fields.get("power_w") and x.record.fields.get("sm_mhz")]
    runs = [x for x in runs if x.record.seconds >= LEAST_SECONDS and x.record.setup.gpu.power_limit_watts]
    if len(runs) < LEAST_RUNS:
        return {}
    fastest = max(float(x.record.fields["sm_mhz"]) for x in runs)
    used = np.array([_used(x, profile, fastest) for x in runs])
    kinds = [MATH, EXPERTS] if used[:, len(ALWAYS) + len(MATH) :].any() else [MATH]
    names = [*ALWAYS, *(name for kind in kinds for name in kind.values())]
    used = used[:, : len(names)]
    watts = np.array([float(x.record.fields["power_w"]) for x in runs])
    weights = np.sqrt([min(x.record.seconds, MOST_SECONDS) for x in runs]) / READING_SD
    without_fp8 = ["fp8" not in name for name in names]
    typical = np.linalg.lstsq(used[:, without_fp8], watts, rcond=None)[0][len(ALWAYS)]
    ratios = np.zeros((len(kinds), len(names)))
    for row, kind in zip(ratios, kinds, strict=True):
        bf16, fp8 = (names.index(name) for name in kind.values())
        row[bf16], row[fp8] = -FP8_RATIO / (FP8_RATIO_SD * typical), 1 / (FP8_RATIO_SD * typical)
    equations = np.vstack([used * weights[:, None], ratios])
    found = np.linalg.lstsq(equations, np.append(watts * weights, np.zeros(len(kinds))), rcond=None)[0]
    if (found <= 0).any():
        return {}
    return dict(zip(names, found.tolist(), strict=True))


def _used(run: Windows, profile: Profile, fastest: float) -> Array:
    """A rollout's clock, and its mean use of memory and of each kind of math, as fractions of their peaks."""
    engine, times = run.record.setup.step_model(profile), run.weights.sum(axis=0)
    math = flops_by_kind(engine, run.batch)
    seconds = [bytes_bound(engine, run.batch), *(math[kind] for kind in (*MATH, *EXPERTS))]
    use = [float(times @ x) / float(run.seconds.sum()) for x in seconds]
    return np.array([float(run.record.fields["sm_mhz"]) / fastest, *use])
