"""A folder of measurements -> the profile that fits them, and how wrong it was before and is now.

    FOLDER/kernels/*.jsonl              timings of single kernels (fp8plan.runtime.measure.gemm, attention, moe, ...)
    FOLDER/steps/rollouts.jsonl         rollouts whose steps are fitted (fp8plan.runtime.measure.rollouts --trace)
    FOLDER/steps/rollouts.trace.jsonl.gz
    FOLDER/profile.json                 what `fp8plan calibrate` writes

Kernels say how each GEMM and attention scales with its shape; engine steps say what is between them: launches, small
kernels, sampling, the host. Both are fitted at once, so neither has to be subtracted from the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd

from fp8plan.errors import ConfigError
from fp8plan.model.batch import Array, StepBatch
from fp8plan.model.calibrate import Fit, Observations, fit, held_out, robust_sd
from fp8plan.model.cost import Cost, together
from fp8plan.model.engine_steps import Windows, read_traces, windows
from fp8plan.model.hardware import Gpu
from fp8plan.model.kernel_rows import hull, observe, read_rows
from fp8plan.model.profile import Profile, datasheet_profile
from fp8plan.model.records import read_records

STEPS = "engine steps"


@dataclass(frozen=True, slots=True)
class KernelError:
    """Relative errors of one kernel's rows: medians of |predicted / measured - 1|.

    before:   by the prior (the datasheet profile)
    fitted:   by the fit, which has seen the rows
    held_out: by fits that have not seen the row's weight shape, head layout or engine
    worst:    the largest held-out error
    """

    kernel: str
    rows: int
    before: float
    fitted: float
    held_out: float
    worst: float


@dataclass(frozen=True, slots=True)
class Calibration:
    profile: Profile
    errors: tuple[KernelError, ...]


def calibrate(folder: Path, card: Gpu, engine_version: str) -> Calibration:
    """Fit everything measured in `folder`. Raises ConfigError without engine steps, the least it needs."""
    rows, steps = kernel_rows(folder / "kernels"), step_windows(folder / "steps")
    if not steps:
        raise ConfigError(f"{folder / 'steps'} has no measured rollouts; type: fp8plan calibrate --output {folder}")
    prior = datasheet_profile(card, engine_version)
    observations = [*(observe(rows, card) if len(rows) else []), observe_steps(steps)]
    found = fit(observations, prior)
    unseen = held_out(observations, prior, found)
    errors = tuple(
        KernelError(
            x.kernel,
            x.seconds.size,
            _median(x.errors(prior)),
            _median(x.errors(found.profile)),
            _median(unseen[x.kernel]),
            float(np.max(np.abs(np.expm1(unseen[x.kernel])))),
        )
        for x in observations
    )
    profile = replace(
        found.profile,
        kind="calibrated",
        source=_source(folder, rows, steps),
        residuals={kernel: robust_sd(values) for kernel, values in unseen.items()},
        model_error=model_error(steps, observations, prior, found),
        hull=_hull(rows, steps),
        date=max(str(w.record.fields.get("date", ""))[:10] for w in steps) or datetime.now(UTC).date().isoformat(),
        notes={},
    )
    return Calibration(profile, errors)


def measured_version(folder: Path) -> str:
    """The engine version of the rollouts in `folder`. Raises ConfigError where there are none, or of several."""
    file = folder / "steps" / "rollouts.jsonl"
    found = sorted({str(x.fields["engine_version"]) for x in read_records(file)})
    if len(found) > 1:
        raise ConfigError(f"{file} holds rollouts of vLLM {' and '.join(found)}; a profile is of one: move the others")
    return found[0]


def kernel_rows(folder: Path) -> pd.DataFrame:
    """All timings of single kernels; empty where none was measured."""
    files = [x for x in sorted(folder.glob("*.jsonl")) if not x.name.endswith((".failed.jsonl", "machines.jsonl"))]
    return pd.concat([pd.DataFrame(), *map(read_rows, files)], ignore_index=True)


def step_windows(folder: Path) -> list[Windows]:
    """The windows of every rollout in `folder` that has a trace."""
    if not (folder / "rollouts.jsonl").is_file():
        return []
    traces = read_traces(sorted(folder.glob("*.trace.jsonl.gz")))
    records = read_records(folder / "rollouts.jsonl")
    return [windows(x, traces[x.fields["key"]]) for x in records if x.fields.get("key") in traces]


def observe_steps(steps: Sequence[Windows], kernel: str = STEPS) -> Observations:
    """Windows of several rollouts as one kernel; a group is an engine: a model at a precision."""

    def predict(profile: Profile) -> Cost:
        return together([x.cost(profile) for x in steps])

    groups = np.concatenate([np.repeat(x.engine, x.seconds.size) for x in steps])
    return Observations(kernel, np.concatenate([x.seconds for x in steps]), groups, predict)


def model_error(steps: Sequence[Windows], observations: Sequence[Observations], prior: Profile, full: Fit) -> float:
    """sd of log(predicted / measured) of whole rollouts, each predicted by a fit that has not seen its engine."""
    others = [x for x in observations if not x.kernel.startswith(STEPS)]
    errors = []
    for engine in dict.fromkeys(x.engine for x in steps):
        rest = [x for x in steps if x.engine != engine]
        profile = fit([*others, observe_steps(rest)], prior, near=full).profile if rest else prior
        for x in steps:
            if x.engine == engine:
                errors.append(float(np.log(x.cost(profile).seconds.sum() / x.seconds.sum())))
    return float(np.sqrt(np.mean(np.square(errors))))


def _median(errors: Array) -> float:
    return float(np.median(np.abs(np.expm1(errors))))


def _hull(rows: pd.DataFrame, steps: Sequence[Windows]) -> dict[str, dict[str, tuple[float, float]]]:
    ranges: dict[str, tuple[float, float]] = {}
    for name in StepBatch.__slots__:
        values = np.concatenate([getattr(x.batch, name) for x in steps])
        used = values[values > 0]
        if used.size:
            ranges[name] = (float(used.min()), float(used.max()))
    return (hull(rows) if len(rows) else {}) | {STEPS: ranges}


def _source(folder: Path, rows: pd.DataFrame, steps: Sequence[Windows]) -> str:
    fields = [x.record.fields for x in steps]
    cards = sorted({str(x.get("gpu_uuid")) for x in fields})
    engines = len({x.engine for x in steps})
    kernels = f"{len(rows)} timings of {rows.kernel.nunique()} kernels and " if len(rows) else ""
    return f"{kernels}{len(steps)} rollouts of {engines} engines, measured on {', '.join(cards)}"
