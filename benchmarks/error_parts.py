"""The parts of the error of predictions, and what the intervals hold, for each kind of profile.

    python -m benchmarks.error_parts

The error of a makespan is e = log(predicted / measured). It has parts of the GPU and of the model, which all precisions
share, a part of the precision, a part of the workload, and the rest. The mean of e1 * e2 over pairs of rollouts
estimates the variance of the parts that the two have in common. Each model, or pair of models, counts the same.
A speed-up's error has the parts of the precision and the rest of both its rollouts.

SHARED_VARIANCE and the imported profiles' OWN_ERROR are chosen by these figures, and so are MODEL_SHARE, WORKLOAD_SD
and REST_SD of an anchor. benchmarks/uncalibrated.py has the datasheet profile's figures. Rollouts with a slow host are
left out, and repeats of a cell count once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import combinations
from typing import NamedTuple

import numpy as np

from benchmarks.tables.cells import cell_of
from fp8plan.model.hardware import find_gpu
from fp8plan.model.plan.choice import speed_up
from fp8plan.model.profile.library import datasheet_profile, load_profile, profiles_path
from fp8plan.model.profile.profile import Profile
from fp8plan.model.rollout import Rollout, Simulated
from fp8plan.model.validate.records import Record, read_records
from fp8plan.model.validate.validate import simulated

FOLDERS = {"h200": "h200_sxm/vllm-0.26.0", "h100": "h100_sxm/vllm-0.26.0", "cpu": "cpu/vllm-0.30.0"}
H200 = ("validation/rollouts", "validation/again", "validation/anchor", "first_look/rollouts", "families/held_out")
FILES = {
    "h200": H200,
    "h100": ("reports/rollouts", "validation/rollouts", "validation/anchored"),
    "cpu": ("validation/rollouts",),
}
MEASURED = {"h200": "h200_sxm/vllm-0.26.0", "h100": "h100_sxm/vllm-0.24.0", "cpu": "cpu/vllm-0.30.0"}
SLOW_HOST = 1.5  # the least slowdown of a host, over the median of its file, that is left out


class Cell(NamedTuple):
    """One model, workload, precision and KV cache. seconds: the median of its repeats"""

    record: Record
    simulated: Simulated
    seconds: float

    @property
    def rollout(self) -> Rollout:
        return self.simulated.rollout

    @property
    def precision(self) -> str:
        return str(self.record.fields["precision"])

    @property
    def error(self) -> float:
        return float(np.log(self.rollout.makespan_s / self.seconds))


class Ratio(NamedTuple):
    """The logs of a measured value, and of the ends of its interval, less that of the prediction; and its size."""

    error: float
    low: float
    high: float
    points: float  # 100 times the difference of a speed-up, or of a time as a share of the measured


@cache
def measured(gpu: str) -> list[tuple[Record, float]]:
    """The measured cells of a GPU: the first record of each, and the median of its repeats' seconds."""
    repeats: dict[object, list[Record]] = defaultdict(list)
    for path in (profiles_path() / FOLDERS[gpu] / f"{name}.jsonl" for name in FILES[gpu]):
        records = read_records(path)
        slowdowns = [float(record.fields.get("host_slowdown") or 1) for record in records]
        for record, slowdown in zip(records, slowdowns, strict=True):
            if slowdown < SLOW_HOST * float(np.median(slowdowns)):
                repeats[cell_of(record.fields | {"group": record.group})].append(record)
    return [(same[0], float(np.median([record.seconds for record in same]))) for same in repeats.values()]


_SIMULATED: dict[str, list[Simulated]] = {}  # GPU -> its cells by the first profile, whose schedules serve all others


def cells(gpu: str, profile: Profile) -> list[Cell]:
    """The measured cells of a GPU, predicted by `profile`."""
    pairs = measured(gpu)
    before = _SIMULATED.get(gpu, [None] * len(pairs))
    made = [simulated(record, profile, first) for (record, _), first in zip(pairs, before, strict=True)]
    _SIMULATED.setdefault(gpu, made)
    return [Cell(record, each, seconds) for (record, seconds), each in zip(pairs, made, strict=True)]


def by_model(every: Iterable[Cell]) -> list[list[Cell]]:
    models: dict[str, list[Cell]] = defaultdict(list)
    for cell in every:
        models[cell.record.fields["model"]].append(cell)
    return list(models.values())


def in_common(models: Sequence[Sequence[Cell]], alike: Callable[[Cell, Cell], bool]) -> float:
    """The mean product of the errors of pairs of cells of one model that are `alike`."""
    products = [[a.error * b.error for a, b in combinations(cells, 2) if alike(a, b)] for cells in models]
    return float(np.mean([float(np.mean(pairs)) for pairs in products if pairs] or [0.0]))


def across(models: Sequence[Sequence[Cell]]) -> float:
    """The mean product of the errors of pairs of cells of two models, in different precisions."""
    products = [
        [a.error * b.error for a in x for b in y if a.precision != b.precision] for x, y in combinations(models, 2)
    ]
    return float(np.mean([float(np.mean(pairs)) for pairs in products if pairs] or [0.0]))


def parts(every: Sequence[Cell]) -> dict[str, float]:
    """Part of the error -> its standard deviation."""
    models = by_model(every)
    total = float(np.mean([np.mean([cell.error**2 for cell in own]) for own in models]))
    model = in_common(models, lambda a, b: a.record.group != b.record.group and a.precision != b.precision)
    workload = in_common(models, lambda a, b: a.record.group == b.record.group and a.precision != b.precision) - model
    precision = in_common(models, lambda a, b: a.record.group != b.record.group and a.precision == b.precision) - model
    rest = total - model - workload - precision
    gpu = across(models)
    variances = {
        "total": total,
        "GPU": gpu,
        "model": model - max(gpu, 0.0),
        "workload": workload,
        "precision": precision,
        "rest": rest,
    }
    return {name: float(np.sqrt(max(variance, 0.0))) for name, variance in variances.items()}


def makespan(cell: Cell, made: Rollout) -> Ratio:
    """The cell's time and that of its rollout by some profile."""
    ends = np.log(np.array([cell.seconds, made.makespan_low_s, made.makespan_high_s]) / made.makespan_s).tolist()
    return Ratio(*ends, 100 * abs(made.makespan_s / cell.seconds - 1))


def gains(target: Sequence[Cell], made: Sequence[Rollout], profile: Profile) -> list[Ratio]:
    """The speed-ups of one workload over its BF16, if that was measured. made: the cells' rollouts by the profile"""
    pairs, ratios = list(zip(target, made, strict=True)), []
    for slow, baseline in [pair for pair in pairs if pair[0].precision == "bf16"][:1]:
        for fast, other in (pair for pair in pairs if pair[0].precision != "bf16"):
            gain = speed_up(baseline, other, profile)
            measured = slow.seconds / fast.seconds
            ends = [float(np.log((end or 0.0) / gain.ratio)) for end in (measured, gain.low, gain.high)]
            ratios.append(Ratio(*ends, 100 * abs(measured - gain.ratio)))
    return ratios


def errors(every: Sequence[Cell], profile: Profile) -> tuple[list[Ratio], list[Ratio]]:
    """The errors of the makespans of cells, and of the speed-ups within each workload."""
    groups: dict[str, list[Cell]] = defaultdict(list)
    for cell in every:
        groups[cell.record.group].append(cell)
    speed_ups = [gain for own in groups.values() for gain in gains(own, [cell.rollout for cell in own], profile)]
    return [makespan(cell, cell.rollout) for cell in every], speed_ups


def summary(ratios: Sequence[Ratio]) -> dict[str, float]:
    """The number of the ratios, their mean error in points and in logs, the share that is held, and its half-width."""
    error, low, high, points = np.array(ratios).T
    return {
        "number": len(ratios),
        "points": float(np.mean(points)),
        "rms": float(np.sqrt(np.mean(error**2))),
        "held": float(np.mean((low <= error) & (error <= high))),
        "half_width": float(np.median((np.exp(high) - np.exp(low)) / 2)),
    }


def row(label: str, gpu: str, profile: Profile) -> str:
    every = cells(gpu, profile)
    makespans, speed_ups = errors(every, profile)
    times, ratios = summary(makespans), summary(speed_ups)
    sds = " | ".join(f"{sd:.1%}" for sd in parts(every).values())
    error = np.std([gain.error for gain in speed_ups])
    held = [f"{x['held']:.0%}, {x['half_width']:.1%}" for x in (times, ratios)]
    return (
        f"| {label}, {gpu} | {len(every)}, {len(by_model(every))} | {sds} | {held[0]} | {len(speed_ups)} "
        f"| {error:.1%} | {held[1]} |"
    )


def main() -> None:
    """Print a row for each kind of profile and each GPU with measured rollouts."""
    columns = ["profile, GPU", "cells, models", "total", "GPU", "model", "workload", "precision", "rest"]
    columns += ["makespans held, half-width", "speed-ups", "sd of their error", "held, half-width"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for gpu, kind in (("h200", "calibrated"), ("cpu", "calibrated"), ("h100", "imported")):
        path = profiles_path() / MEASURED[gpu] / "profile.json"
        print(row(kind, gpu, Profile.from_json(path.read_text(encoding="utf-8"), str(path))))
    print(row("imported, another version", "h100", load_profile("h100", "0.26.0", profiles_dir=profiles_path())[0]))
    for gpu in ("h200", "h100"):
        print(row("datasheet", gpu, datasheet_profile(find_gpu(gpu), "0.26.0")))


if __name__ == "__main__":
    main()
