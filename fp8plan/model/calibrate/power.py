"""The power coefficients that fit the power readings of measured rollouts: least squares, without any time.

    mean watts = idle * clock + (memory * seconds of its bytes + math * seconds of its FLOPs
                 + recurrent * seconds of recurrent layers) / seconds

Math is that of GEMMs and attention, and that of routed experts, each in BF16 and FP8. Readings are NVML's, sampled
during each rollout (fp8plan.runtime.measure.rollouts.watch). They hold at the limit, too, where the clock falls.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from fp8plan.model.calibrate.engine_steps import Windows
from fp8plan.model.cost.power import EXPERTS, IDLE, MATH, MEMORY, RECURRENT, uses
from fp8plan.model.profile.profile import Profile

LEAST_SECONDS, MOST_SECONDS = 0.9, 4.0  # shorter: the sampling misses too much; longer: no better known than that
LEAST_RUNS = 12
NAMES = [IDLE, MEMORY, RECURRENT, *MATH.values(), *EXPERTS.values()]
READING_SD = 40.0  # watts between a run and the fit, of cards and of what is not modelled
# FP8's watts at its peak over BF16's, with a standard deviation, as few rollouts are bound by FP8 FLOPs. Of GEMMs: the
# middle of two. Readings alone make it 1.4, but they count the padding of decode steps as FP8 FLOPs. Long GEMMs, which
# run where the limit holds the clock, make it 1.1: BF16 reached 702 TFLOP/s at 1,500 MHz and FP8 1,255 at 1,605, which
# is 790 and 840 W at the peaks without those of clock and memory (16,384 x 51,200 x 5,120 in
# profiles/h200_sxm/vllm-0.26.0/kernels/gemm.jsonl). Of experts: assumed.
FP8_RATIOS = ((MATH, 1.25, 0.1), (EXPERTS, 1.5, 0.25))


def power_coefficients(steps: Sequence[Windows], profile: Profile) -> dict[str, float]:
    """The coefficients of fp8plan.model.cost.power; none without power readings of LEAST_RUNS rollouts, or where the
    GPU's limit is not known. Those of experts and of recurrent layers are there if a rollout had some that drew more
    than nothing.
    """
    runs = [x for x in steps if x.record.fields.get("power_w") and x.record.fields.get("sm_mhz")]
    runs = [x for x in runs if x.record.seconds >= LEAST_SECONDS and x.record.setup.gpu.power_limit_watts]
    if len(runs) < LEAST_RUNS:
        return {}
    fastest = max(float(x.record.fields["sm_mhz"]) for x in runs)
    used = pd.DataFrame([_used(x, profile, fastest) for x in runs], columns=NAMES)
    ratios = [x for x in FP8_RATIOS if used[[*x[0].values()]].any(axis=None)]
    of_ratios = {name for kind, *_ in ratios for name in kind.values()}
    names = [name for name in NAMES if used[name].any() or name in of_ratios]
    watts = np.array([float(x.record.fields["power_w"]) for x in runs])
    weights = np.sqrt([min(x.record.seconds, MOST_SECONDS) for x in runs]) / READING_SD
    without_fp8 = [name for name in names if "fp8" not in name]
    typical = np.linalg.lstsq(used[without_fp8], watts, rcond=None)[0][without_fp8.index(MATH["bf16"])]
    held = np.zeros((len(ratios), len(names)))
    for row, (kind, ratio, sd) in zip(held, ratios, strict=True):
        bf16, fp8 = (names.index(name) for name in kind.values())
        row[bf16], row[fp8] = -ratio / (sd * typical), 1 / (sd * typical)
    equations = np.vstack([used[names].to_numpy() * weights[:, None], held])
    found, _ = nnls(equations, np.append(watts * weights, np.zeros(len(ratios))))
    known = {name: float(value) for name, value in zip(names, found, strict=True) if value > 0}
    return known if known.keys() >= {IDLE, MEMORY, *MATH.values()} else {}


def _used(run: Windows, profile: Profile, fastest: float) -> list[float]:
    """A rollout's clock and its mean use of what draws power, as NAMES has them, as fractions of their peaks."""
    engine, times = run.record.setup.step_model(profile), run.weights.sum(axis=0)
    used = uses(engine, run.batch, engine.load(run.batch))
    shares = [float(times @ used[name]) / float(run.seconds.sum()) for name in NAMES[1:]]
    return [float(run.record.fields["sm_mhz"]) / fastest, *shares]
