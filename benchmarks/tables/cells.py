"""Cells of measured rollouts, which repeats share, and the accuracy of predictions of them.

Rows are those of fp8plan.model.validate.validate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8plan.model.validate.validate import Row, by_group, grouped, relative_error, speedups

SECONDS = ("seconds", "predicted_s", "predicted_low_s", "predicted_high_s")
CELL = ("group", "precision", "kv_cache_tokens")  # the inputs of a prediction; rows that agree in them are repeats


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The accuracy of a set of predictions. Errors are fractions, (predicted - measured) / measured; points are
    speed-up errors x 100.

    answered:          rows with a prediction; when there is none, the makespan's figures are nan
    makespan_bias:     mean of the errors with their signs; above 0: predicted too slow
    mape_by_precision: mean absolute error of the rows of each precision
    ranked, ranked_right: groups of two precisions or more that are answered in full, and those of them whose predicted
                       fastest row was measured the fastest, or within the noise of it
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
    """The accuracy of `rows`. noise: relative difference of two measured times below which they count as equal"""
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


def names_the_fastest(group: Sequence[Row], noise: float) -> bool:
    """True if the row predicted the fastest is measured the fastest, or slower by no more than `noise`, a fraction."""
    fastest = min(row["seconds"] for row in group)
    chosen = min(group, key=lambda row: row["predicted_s"])
    return bool(chosen["seconds"] <= fastest * (1 + noise))


def merged(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """One row per cell: the first of its repeats, with the medians of all their seconds, and their error.

    Repeats differ in the speed of their host, and so in their prediction.
    """
    return [_median_of(runs) for runs in grouped(rows, cell_of).values()]


def _median_of(runs: Sequence[Row]) -> dict[str, Any]:
    columns = {key: [run[key] for run in runs if run.get(key) is not None] for key in SECONDS if key in runs[0]}
    medians = {key: float(np.median(values)) if values else None for key, values in columns.items()}
    error = {"error": relative_error(medians)} if "error" in runs[0] and medians["predicted_s"] else {}
    return {**runs[0]} | medians | error


def spreads(rows: Iterable[Row]) -> list[float]:
    """Relative spread, (slowest - fastest) / median, of each cell measured more than once on one card."""
    cells = grouped(rows, lambda row: (*cell_of(row), row.get("gpu_uuid")))
    times = [[row["seconds"] for row in runs] for runs in cells.values() if len(runs) > 1]
    return [float(np.ptp(seconds) / np.median(seconds)) for seconds in times]


def noise_floor(rows: Iterable[Row]) -> float | None:
    """The median spread of the repeated cells; None if no cell was repeated."""
    repeated = spreads(rows)
    return float(np.median(repeated)) if repeated else None


def cell_of(row: Row) -> tuple[Any, ...]:
    """The values that identify the row's cell."""
    return tuple(row.get(name) for name in CELL)


def _precisions(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["precision"] for row in rows))
