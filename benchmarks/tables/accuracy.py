"""The accuracy of fp8plan's predictions as the documentation states it: totals, then by model, precision and workload.

`python -m benchmarks.tables.accuracy RECORDS` prints it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables.markdown import table
from fp8plan.model.precision import PRESETS
from fp8plan.model.validate.records import read_records
from fp8plan.model.validate.validate import (
    Accuracy,
    Validation,
    accuracy,
    by_group,
    merged,
    noise_floor,
    speedups,
    spreads,
    validate,
)

Cell = Mapping[str, Any]


def tables(result: Validation) -> str:
    """The tables in Markdown. Runs that repeat a cell count as one, with their median."""
    cells, noise = merged(result.records), noise_floor(result.records) or 0.0
    parts = [_totals(cells, noise, max(spreads(result.records), default=0.0)), _halves(result)]
    for title, name, order in (
        ("model", _model, None),
        ("precision", _precision, PRESETS),
        ("workload", _workload, None),
    ):
        names = order or dict.fromkeys(map(name, cells))
        parts.append(_by(title, cells, name, [x for x in names if any(name(cell) == x for cell in cells)]))
    return "\n\n".join(parts)


def families(result: Validation) -> str:
    """The table of several models in each of their precisions, and the pools' error."""
    cells = merged(result.records)
    kv = max(abs(x["predicted_kv_cache_tokens"] / x["measured_kv_cache_tokens"] - 1) for x in cells)
    names = dict.fromkeys(map(_engine, cells))
    halves = _halves(result)
    return f"{_by('model', cells, _engine, names)}\n\nKV cache tokens are within {kv:.2%}. {halves}"


def line(result: Validation, families: Validation) -> str:
    """The accuracy in a few sentences. families: rollouts of model families that no fit has seen"""
    both = [(merged(x.records), noise_floor(x.records) or 0.0) for x in (result, families)]
    cells, others = (len(merged_cells) for merged_cells, _ in both)
    found, of_others = (accuracy(merged_cells, noise) for merged_cells, noise in both)
    single = max(abs(row["error"]) for row in result.records)
    return (
        "Makespans of real vLLM 0.26 rollouts on H200s that no fit has seen are off by "
        f"{found.makespan_mape:.1%} on average in {cells} cells (worst {found.makespan_worst:.1%}). In {others} cells "
        f"of model families held out whole they are off by {of_others.makespan_mape:.1%} (worst "
        f"{of_others.makespan_worst:.1%}). Speed-ups are off by {found.speedup_mae_points:.1f} and "
        f"{of_others.speedup_mae_points:.1f} points. The fastest precision is named right in {found.ranked_right} of "
        f"{found.ranked} and in {of_others.ranked_right} of {of_others.ranked} groups. "
        f"Repeats count as their median; single runs are up to {single:.0%} off. Each is predicted for the speed of "
        "its host, where that was timed."
    )


def _totals(cells: Sequence[Cell], noise: float, largest: float) -> str:
    found, repeats = accuracy(cells, noise), f"median {noise:.1%}, largest {largest:.1%}"
    kv = max(abs(x["predicted_kv_cache_tokens"] / x["measured_kv_cache_tokens"] - 1) for x in cells)
    starved = [x for x in cells if x["preemptions"]]
    counts = "; ".join(f"{x['preemptions']} / {x['predicted_preemptions']}" for x in starved)
    rows = [
        (
            "makespan",
            f"MAPE {found.makespan_mape:.1%}, worst {found.makespan_worst:.1%}, bias {found.makespan_bias:+.1%}",
        ),
        (
            "speed-up over BF16",
            f"mean error {found.speedup_mae_points:.1f} points, worst {found.speedup_worst_points:.1f}",
        ),
        ("fastest precision", f"named right in {found.ranked_right} of {found.ranked} groups"),
        ("KV cache tokens", f"within {kv:.2%}"),
        ("preemptions, measured / predicted", f"{counts}; 0 / 0 in all other cells"),
        ("noise: spread of a repeated cell on one card", repeats),
    ]
    others = sum(bool(x["predicted_preemptions"]) for x in cells if not x["preemptions"])
    if others:
        rows[4] = (rows[4][0], f"{counts}; predicted but not measured in {others} cells")
    return table((f"{len(cells)} cells, {len(by_group(cells))} groups", ""), rows)


def _halves(result: Validation) -> str:
    return (
        f"The 90% interval holds {result.coverage:.0%} of the {len(result.records)} runs; its median half-width is "
        f"{result.interval_median_halfwidth:.1%}."
    )


def _by(title: str, cells: Sequence[Cell], name: Callable[[Cell], str], names: Iterable[str]) -> str:
    gains, rows = _gains(cells), []
    for wanted in names:
        chosen = [cell for cell in cells if name(cell) == wanted]
        found: Accuracy = accuracy(chosen)
        points = np.abs([gains[id(cell)] for cell in chosen if id(cell) in gains])
        speed = (f"{points.mean():.1f}", f"{points.max():.1f}") if points.size else ("-", "-")
        errors = (f"{found.makespan_mape:.1%}", f"{found.makespan_bias:+.1%}", f"{found.makespan_worst:.1%}")
        rows.append((wanted, str(len(chosen)), *errors, *speed))
    return table((f"by {title}", "cells", "makespan MAPE", "bias", "worst", "speed-up error, points", "worst"), rows)


def _gains(cells: Sequence[Cell]) -> dict[int, float]:
    """id of a cell -> error of its speed-up in points, where its group has a bf16 cell and it is not that."""
    found = {}
    for group in by_group(cells).values():
        others = (cell for cell in group if cell["precision"] != "bf16")
        found |= {id(cell): gain["error_points"] for gain, cell in zip(speedups(group), others, strict=False)}
    return found


def _model(cell: Cell) -> str:
    return str(cell["model"])


def _engine(cell: Cell) -> str:
    return f"{cell['model']} {cell['precision']}"


def _precision(cell: Cell) -> str:
    return str(cell["precision"])


def _workload(cell: Cell) -> str:
    return str(cell["workload"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    print(tables(validate(read_records(parser.parse_args().records))))


if __name__ == "__main__":
    main()
