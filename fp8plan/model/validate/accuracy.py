"""The accuracy of predictions: over makespans, over speed-ups, and in naming the fastest precision.

A row is a mapping with `group` (one workload on one GPU with the same limits), `precision`, `seconds` and
`predicted_s`, which is None if there is no prediction. Its other fields are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar

import numpy as np

K = TypeVar("K")
Row: TypeAlias = Mapping[str, Any]
CELL = ("group", "precision", "kv_cache_tokens")  # what a prediction depends on; runs that differ in less are repeats


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The accuracy of a set of predictions. Errors are fractions, (predicted - measured) / measured; points are
    speed-up errors x 100.

    answered:          rows with a prediction; when there is none, the makespan's figures are nan
    makespan_bias:     mean of the errors with their signs; above 0: predicted too slow
    mape_by_precision: mean absolute error of the rows of each precision
    ranked, ranked_right: groups of two precisions or more that are answered in full, and those among them whose
                       predicted fastest row is measured the fastest, or within the noise of it
    groups:            groups of two precisions or more, answered or not
    """

    answered: int
    makespan_mape: float
    makespan_worst: float
    makespan_bias: float
    mape_by_precision: dict[str, float]
    speedup_mae_points: float | None  # None: no group has an answered bf16 row and another
    speedup_worst_points: float | None
    groups: int
    ranked: int
    ranked_right: int


def accuracy(rows: Sequence[Row], noise: float = 0.0) -> Accuracy:
    """Sum up `rows`. noise: relative difference of two measured times below which they count as equal"""
    answered = [row for row in rows if row["predicted_s"] is not None]
    errors = {name: [relative_error(r) for r in answered if r["precision"] == name] for name in _precisions(answered)}
    every = [error for values in errors.values() for error in values] or [np.nan]
    points = [gain["error_points"] for group in by_group(answered).values() for gain in speedups(group)]
    contests = [group for group in by_group(rows).values() if len(_precisions(group)) > 1]
    ranked = [group for group in contests if all(row["predicted_s"] is not None for row in group)]
    return Accuracy(
        answered=len(answered),
        makespan_mape=float(np.abs(every).mean()),
        makespan_worst=float(np.abs(every).max()),
        makespan_bias=float(np.mean(every)),
        mape_by_precision={name: float(np.abs(values).mean()) for name, values in errors.items()},
        speedup_mae_points=float(np.abs(points).mean()) if points else None,
        speedup_worst_points=float(np.abs(points).max()) if points else None,
        groups=len(contests),
        ranked=len(ranked),
        ranked_right=sum(names_the_fastest(group, noise) for group in ranked),
    )


def relative_error(row: Row) -> float:
    return float((row["predicted_s"] - row["seconds"]) / row["seconds"])


def by_group(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each group, in order."""
    return _grouped(rows, itemgetter("group"))


def speedups(group: Sequence[Row]) -> list[dict[str, Any]]:
    """Measured and predicted speed-up of each row against the median bf16 row; empty without one."""
    bf16 = [row for row in group if row["precision"] == "bf16"]
    if not bf16:
        return []
    measured, predicted = (float(np.median([row[key] for row in bf16])) for key in ("seconds", "predicted_s"))
    found = []
    for row in group:
        if row["precision"] != "bf16":
            real, expected = measured / row["seconds"], predicted / row["predicted_s"]
            gain = {"precision": row["precision"], "measured_speedup": real, "predicted_speedup": expected}
            found.append({"line": row.get("line")} | gain | {"error_points": 100 * (expected - real)})
    return found


def names_the_fastest(group: Sequence[Row], noise: float) -> bool:
    """True if the row predicted the fastest is measured the fastest, or slower by no more than `noise`, a fraction."""
    fastest = min(row["seconds"] for row in group)
    chosen = min(group, key=lambda row: row["predicted_s"])
    return bool(chosen["seconds"] <= fastest * (1 + noise))


def merged(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """One row per cell: the first of its repeats, with the median `seconds` of them all."""
    return [
        {**runs[0], "seconds": float(np.median([r["seconds"] for r in runs]))}
        for runs in _grouped(rows, cell_of).values()
    ]


def spreads(rows: Iterable[Row]) -> list[float]:
    """Relative spread, (slowest - fastest) / median, of each cell measured more than once on one card."""
    cells = _grouped(rows, lambda row: (*cell_of(row), row.get("gpu_uuid")))
    times = [[row["seconds"] for row in runs] for runs in cells.values() if len(runs) > 1]
    return [float(np.ptp(seconds) / np.median(seconds)) for seconds in times]


def noise_floor(rows: Iterable[Row]) -> float | None:
    """The median spread of the repeated cells; None if no cell was repeated. (The largest would call every difference a
    tie.)
    """
    found = spreads(rows)
    return float(np.median(found)) if found else None


def cell_of(row: Row) -> tuple[Any, ...]:
    """The values that identify the row's cell."""
    return tuple(row.get(name) for name in CELL)


def _grouped(rows: Iterable[Row], key: Callable[[Row], K]) -> dict[K, list[Row]]:
    found: dict[K, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def _precisions(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["precision"] for row in rows))
