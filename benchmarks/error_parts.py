"""The parts of the error of predictions, and what the intervals hold, for each kind of profile.

    python -m benchmarks.error_parts

The error of a makespan is e = log(predicted / measured). It has parts of the GPU and of the model, which all precisions
share, a part of the precision, a part of the workload, and the rest. The mean of e1 * e2 over pairs of rollouts
estimates the variance of the parts that the two have in common. Each model, or pair of models, counts the same.
A speed-up's error has the parts of the precision and the rest of both its rollouts.

`gpu.pace` and `host.pace` of the datasheet profile, its model_error, SHARED_VARIANCE and the imported profiles'
OWN_ERROR are chosen by these figures, and so are MODEL_SHARE, WORKLOAD_SD and REST_SD of an anchor. Rollouts with a
slow host are left out, and repeats of a cell count once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8plan.model.hardware import find_gpu
from fp8plan.model.plan.choice import speed_up, timed
from fp8plan.model.profile.library import datasheet_profile, load_profile, profiles_path
from fp8plan.model.profile.profile import Profile
from fp8plan.model.rollout import Rollout
from fp8plan.model.validate.records import Record, read_records
from fp8plan.model.validate.validate import cell_of, simulated

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
    rollout: Rollout
    seconds: float

    @property
    def precision(self) -> str:
        return str(self.record.fields["precision"])

    @property
    def error(self) -> float:
        return float(np.log(self.rollout.makespan_s / self.seconds))


def cells(gpu: str, profile: Profile) -> list[Cell]:
    """The measured cells of a GPU, predicted by `profile`."""
    repeats: dict[object, list[Record]] = defaultdict(list)
    for path in (profiles_path() / FOLDERS[gpu] / f"{name}.jsonl" for name in FILES[gpu]):
        records = read_records(path)
        slowdowns = [float(record.fields.get("host_slowdown") or 1) for record in records]
        for record, slowdown in zip(records, slowdowns, strict=True):
            if slowdown < SLOW_HOST * float(np.median(slowdowns)):
                repeats[cell_of(record.fields | {"group": record.group})].append(record)
    return [
        Cell(same[0], simulated(same[0], profile).rollout, float(np.median([record.seconds for record in same])))
        for same in repeats.values()
    ]


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


def speed_ups(every: Sequence[Cell], profile: Profile) -> NDArray[np.float64]:
    """The log error of each speed-up over BF16, and the ends of its interval, in logs from the prediction: (n, 3)."""
    rows, groups = list[tuple[float, ...]](), dict[str, list[Cell]]()
    for cell in every:
        groups.setdefault(cell.record.group, []).append(cell)
    for group in groups.values():
        for bf16 in [cell for cell in group if cell.precision == "bf16"][:1]:
            for other in (cell for cell in group if cell.precision != "bf16"):
                baseline, faster = (timed(cell.rollout, cell.record.limits.cut) for cell in (bf16, other))
                gain = speed_up(baseline, faster, profile)
                ends = (float(np.log((end or 0.0) / gain.ratio)) for end in (gain.low, gain.high))
                rows.append((other.error - bf16.error, *ends))
    return np.array(rows)


def row(label: str, gpu: str, profile: Profile) -> str:
    every = cells(gpu, profile)
    ends = [np.log([x.rollout.makespan_low_s, x.rollout.makespan_high_s]) - np.log(x.rollout.makespan_s) for x in every]
    makespans = np.array([(-cell.error, *low_high) for cell, low_high in zip(every, ends, strict=True)])
    gains = speed_ups(every, profile)
    sds = " | ".join(f"{sd:.1%}" for sd in parts(every).values())
    error = np.std(gains[:, 0])
    return (
        f"| {label}, {gpu} | {len(every)}, {len(by_model(every))} | {sds} | {held(makespans)} | {len(gains)} "
        f"| {error:.1%} | {held(gains)} |"
    )


def held(rows: NDArray[np.float64]) -> str:
    """The share of the rows (error, low, high) inside their interval, and the median half-width."""
    error, low, high = rows.T
    inside, half = (low <= error) & (error <= high), (np.exp(high) - np.exp(low)) / 2
    return f"{np.mean(inside):.0%}, {np.median(half):.1%}"


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
