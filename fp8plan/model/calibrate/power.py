"""The power coefficients, fitted by least squares to power readings of rollouts and of single kernels.

    mean watts = idle + sum over coefficients of (watts * seconds of its use) / seconds

fp8plan.model.cost.power has the uses. Readings are NVML's, sampled during each rollout
(fp8plan.runtime.measure.rollouts.host) and while single kernels ran for seconds
(fp8plan.runtime.measure.kernels.power). The equation also holds at the power limit, where the seconds are longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from fp8plan.model.calibrate.fit import Windows
from fp8plan.model.calibrate.kernel_rows import (
    PRECISIONS,
    attention_of,
    cost_alone,
    decode_batch,
    experts_of,
    prefill_batch,
)
from fp8plan.model.cost.base import Array, StepBatch
from fp8plan.model.cost.gemm import peak_flops
from fp8plan.model.cost.mixers import bytes_read, flops
from fp8plan.model.cost.moe import expert_flops
from fp8plan.model.cost.power import EXPERTS, MATH, RUNNING, running_seconds, uses
from fp8plan.model.hardware import Gpu
from fp8plan.model.profile.profile import Profile
from fp8plan.model.profile.sibling import IDLE, MEMORY_WATTS

LEAST_SECONDS, MOST_SECONDS = 0.9, 4.0  # a shorter rollout has too few samples; a longer one is no better
LEAST_READINGS = 12
NAMES = (IDLE, MEMORY_WATTS, *MATH.values(), *EXPERTS.values(), *RUNNING.values())
# Weights, in watts. A kernel's reading counts about as much as a long rollout's, because little else runs at the limit.
ROLLOUT_SD, KERNEL_SD = 30.0, 25.0
LEAST_WATTS = 0.1  # instead of 0: another coefficient would stand in for a missing one
# Pairs of coefficients that are about equal, with a standard deviation of LIKE_SD. All belong to one GPU, and each
# bounds few readings.
LIKE = {MATH["fp8"]: MATH["bf16"], EXPERTS["bf16_experts"]: MATH["bf16"], EXPERTS["fp8_experts"]: MATH["fp8"]}
LIKE |= {name: RUNNING["kernels"] for name in RUNNING.values() if name != RUNNING["kernels"]}
LIKE_SD = 300.0
# Watts that a GPU draws while an engine waits, as a share of its limit. Readings of busy rollouts alone cannot tell it
# from the watts of running kernels. The H200's many readings give 124 W of 700.
IDLE_SHARE, IDLE_SD = 0.18, 0.04

Uses = Mapping[str, Array]


def power_coefficients(steps: Sequence[Windows], profile: Profile, kernels: pd.DataFrame) -> dict[str, float]:
    """The coefficients of fp8plan.model.cost.power; {} for fewer than LEAST_READINGS, or a GPU of unknown power limit.
    Experts and recurrent layers have theirs if a reading has any.

    kernels: rows of kernels/power.jsonl
    """
    limit = steps[0].record.setup.gpu.power_limit_watts if steps else None
    if limit is None:
        return {}
    runs = [run for run in steps if run.record.fields.get("power_w") and run.record.seconds >= LEAST_SECONDS]
    if len(runs) + len(kernels) < LEAST_READINGS:
        return {}
    equations = [_of_rollout(run, profile) for run in runs]
    equations += _of_kernels(kernels, steps[0].record.setup.gpu, profile)
    used = pd.DataFrame([shares for shares, *_ in equations], columns=list(NAMES)).fillna(0.0)
    watts, weights = np.array([rest for _, *rest in equations]).T
    names = [name for name in NAMES if used[name].any()]
    alike = [(name, LIKE[name]) for name in names if LIKE.get(name) in names]
    held = np.array([[(c == name) - (c == other) for c in names] for name, other in alike], dtype=float) / LIKE_SD
    idle = np.array([[name == IDLE for name in names]], dtype=float) / (IDLE_SD * limit)
    matrix = np.vstack([used[names].to_numpy() * weights[:, None], held.reshape(-1, len(names)), idle])
    wanted = np.concatenate([watts * weights, np.zeros(len(alike)), [IDLE_SHARE / IDLE_SD]])
    fitted, _ = nnls(matrix, wanted)
    known = {name: max(float(value), LEAST_WATTS) for name, value in zip(names, fitted, strict=True)}
    return known if min(known.get(name, 0.0) for name in (IDLE, RUNNING["kernels"])) > LEAST_WATTS else {}


def _of_rollout(run: Windows, profile: Profile) -> tuple[dict[str, float], float, float]:
    """The mean use of each coefficient in a rollout, its watts, and the weight of both."""
    engine, times = run.record.setup.step_model(profile, run.record.fields.get("experts_hit")), run.weights.sum(axis=0)
    used, lasted = uses(engine, run.batch, engine.load(run.batch)), float(run.seconds.sum())
    shares = {name: float((times * seconds).sum()) / lasted for name, seconds in used.items()}
    weight = np.sqrt(min(run.record.seconds, MOST_SECONDS) / MOST_SECONDS) / ROLLOUT_SD
    return shares | {IDLE: 1.0}, float(run.record.fields["power_w"]), float(weight)


def _of_kernels(rows: pd.DataFrame, card: Gpu, profile: Profile) -> Iterator[tuple[dict[str, float], float, float]]:
    """The same for each reading of a single kernel."""
    for kernel, part in rows.groupby("kernel"):
        used = kernel_uses(str(kernel), part, card, profile)
        for i, (watts, lasted) in enumerate(zip(part.power_w, part.seconds, strict=True)):
            shares = {name: float(seconds[i] / lasted) for name, seconds in used.items()}
            yield shares | {IDLE: 1.0}, float(watts), 1 / KERNEL_SD


def kernel_uses(kernel: str, rows: pd.DataFrame, card: Gpu, profile: Profile) -> Uses:
    """Coefficient -> seconds for which one call draws it, each of shape (rows,), without a power limit."""
    name, _, dtype = kernel.partition(".")
    running, read, math = _KINDS.get(name, _small)(dtype, rows)
    seconds = {RUNNING[running]: running_seconds(cost_alone(kernel, rows, card, profile))}
    seconds[MEMORY_WATTS] = read / card.memory_bandwidth
    return seconds | {coefficient: work / peak_flops(card, dtype) for coefficient, work in math.items()}


Kind = tuple[str, Array, dict[str, Array]]  # a key of RUNNING, bytes read, math's coefficient -> FLOPs


def _gemm(dtype: str, rows: pd.DataFrame) -> Kind:
    m, n, k = (rows[name].to_numpy(float) for name in ("m", "n", "k"))
    read = [PRECISIONS[dtype].linear_bytes(*size, True) for size in zip(n.astype(int), k.astype(int), strict=True)]
    return "kernels", np.array(read, dtype=float), {MATH[_math(dtype)]: 2 * m * n * k}


def _attention(batch: Callable[[pd.DataFrame], StepBatch]) -> Callable[[str, pd.DataFrame], Kind]:
    def kind(dtype: str, rows: pd.DataFrame) -> Kind:
        steps, heads, precision = batch(rows), attention_of(rows), PRECISIONS[dtype]
        return f"attention_{dtype}", bytes_read(steps, heads, precision, 1), {MATH[dtype]: flops(steps, heads, 1)}

    return kind


def _experts(dtype: str, rows: pd.DataFrame) -> Kind:
    experts, hidden = experts_of(rows)
    read = rows.hit.to_numpy() * experts.stored_bytes(hidden, PRECISIONS[dtype])
    math = rows.tokens.to_numpy() * float(experts.experts_per_token * expert_flops(experts, hidden, 1))
    return f"experts_{_math(dtype)}", read, {EXPERTS[f"{_math(dtype)}_experts"]: math}


def _small(dtype: str, rows: pd.DataFrame) -> Kind:
    return "kernels", np.zeros(len(rows)), {}


def _math(dtype: str) -> str:
    return dtype.partition("_")[0]


_KINDS: dict[str, Callable[[str, pd.DataFrame], Kind]] = {
    "gemm": _gemm,
    "attention_decode": _attention(decode_batch),
    "attention_prefill": _attention(prefill_batch),
    "moe": _experts,
}
