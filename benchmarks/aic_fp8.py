"""A fit to AIConfigurator's tables: FP8 linears with one scale for a matrix, for profiles/datasheet.json.

`python -m benchmarks.aic_fp8` prints the coefficients of each architecture (pip install 'fp8plan[aic]'; minutes). The
rows are vLLM 0.24's own layers, timed in CUDA graphs: CUTLASS's GEMM, and the quantisation of its input, whose cost
stays as it is. Nothing of it was measured by fp8plan, and scales for each token and row are taken to cost what one for
all does. Experts are not here: which of several kernels vLLM takes for them depends on GPU, version and scales, and the
tables have one of these for each GPU.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pandas as pd

from fp8plan.model.architecture import Linear
from fp8plan.model.calibrate.fit import Observations, fit
from fp8plan.model.cost.base import Cost, together
from fp8plan.model.cost.gemm import gemm_cost, quantise_cost
from fp8plan.model.hardware import Gpu, find_gpu
from fp8plan.model.precision import find_precision
from fp8plan.model.profile.library import datasheet_profile
from fp8plan.model.profile.profile import Profile
from tools import import_aic

GPUS = ("h200", "h100", "b200", "l40s")
ROWS = 1000  # more do not move the coefficients
FP8 = find_precision("fp8_tensor")
BACKENDS = {"gemm.fp8": "cutlass"}
# Where the fit starts, and how far its logs may be from there (one standard deviation).
PRIOR = {
    "gemm.fp8.launch_seconds": (3.2e-6, 0.7),
    "gemm.fp8.bandwidth_efficiency": (0.8, 0.2),
    "gemm.fp8.compute_efficiency": (0.65, 0.3),
    "gemm.fp8.wave_seconds": (3e-7, 1.5),
}


def main() -> None:
    """Print the fitted coefficients, and the median error that they leave, of each GPU and each architecture."""
    data, _ = import_aic.find_data()
    logs = defaultdict[str, list[list[float]]](list)
    for card in map(find_gpu, GPUS):
        prior = _prior(card)
        seen = _linears(import_aic._folder(data, card), card)
        found = fit([seen], prior, list(PRIOR)).profile
        print(f"{card.name}: median error {np.median(np.abs(seen.errors(found))):.1%}")
        logs[card.architecture].append([float(np.log(found.coefficients[name])) for name in PRIOR])
    every = [np.mean(values, axis=0) for values in logs.values()]
    for architecture, mean in {**dict(zip(logs, every, strict=True)), "common": np.mean(every, axis=0)}.items():
        print(architecture, {name: float(f"{x:.3g}") for name, x in zip(PRIOR, np.exp(mean), strict=True)})


def _prior(card: Gpu) -> Profile:
    sheet = datasheet_profile(card)
    return replace(
        sheet,
        kernel_backends=sheet.kernel_backends | BACKENDS,
        coefficients=sheet.coefficients | {name: value for name, (value, _) in PRIOR.items()},
        log_covariance=sheet.log_covariance | {name: {name: sd**2} for name, (_, sd) in PRIOR.items()},
    )


def _linears(folder: import_aic.Path, card: Gpu) -> Observations:
    rows = import_aic._read(folder, "gemm/vllm/*/gemm", dtype="gemm_dtype", m="m", n="n", k="k")
    run = (rows.m <= import_aic.LONGEST_STEP) & (rows.n >= import_aic.NARROWEST)
    run &= rows.k.between(import_aic.NARROWEST, import_aic.DEEPEST)
    rows = rows[run & (rows.dtype == "fp8") & import_aic._cold(rows.n * rows.k, card)]

    def cost(part: pd.DataFrame, profile: Profile) -> Cost:
        one = [Linear("measured", int(part.n.iloc[0]), int(part.k.iloc[0]), 1, True, False)]
        m = part.m.to_numpy()
        return gemm_cost(m, one, FP8, card, profile) + quantise_cost(m, one, FP8, card, profile)

    rows = rows.sample(frac=1, random_state=0).head(ROWS).sort_values(["n", "k"]).reset_index(drop=True)
    shapes = rows.groupby(["n", "k"], sort=True)
    parts = [part for _, part in shapes]
    return Observations(
        "linear.fp8",
        rows.seconds.to_numpy(),
        shapes.ngroup().to_numpy(),
        lambda profile: together([cost(part, profile) for part in parts]),
    )


if __name__ == "__main__":
    main()
