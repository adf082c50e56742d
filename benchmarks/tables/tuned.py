"""Limits and levers of `fp8plan tune`, predicted and then measured on an H200 with vLLM 0.33.

    python -m benchmarks.tables.tuned     prints the tables of docs/evidence/levers.md, and each cell of the limits

Predictions were committed before the measurements: for a host that is not known, and for hosts whose loops take 260 to
540 µs. A measurement is judged by those for its own host, between the two nearest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

import numpy as np

from benchmarks.tables.markdown import table
from fp8plan import jsonl

RESULTS: Final = Path(__file__).parents[1] / "results"
HOST: Final = "host_loop_us"  # of a prediction; None: not known
Row = Mapping[str, Any]

CELL: Final = ("model", "precision", "workload")
SETTING: Final = ("max_num_seqs", "cudagraph_largest_batch", "max_num_batched_tokens", "gpu_memory_utilization")
SECONDS: Final = ("predicted_s", "low_s", "high_s")
GAINS: Final = ("gain", "gain_low", "gain_high")
PLAIN: Final = "plain"  # the arm without a lever
TIMES: Final = ("before_s", "after_s")


def on_host(rows: Sequence[Row], names: Sequence[str], loop_s: float | None) -> dict[str, float]:
    """Some numbers of one prediction for a host; beyond the hosts that were predicted, those of the nearest.

    rows: the prediction for each host; loop_s: None: not known
    """
    if loop_s is None:
        unknown = next(row for row in rows if row[HOST] is None)
        return {name: unknown[name] for name in names}
    known = sorted((row for row in rows if row[HOST] is not None), key=lambda row: row[HOST])
    loops = [row[HOST] for row in known]
    return {name: float(np.interp(1e6 * loop_s, loops, [row[name] for row in known])) for name in names}


@dataclass(frozen=True)
class Cell:
    """A workload under some limits, measured.

    named:     `tune` names these limits
    predicted: seconds, and the gain of tune's limits over these, for the record's host
    """

    workload: tuple[str, ...]
    setting: tuple[float, ...]
    named: bool
    seconds: float
    predicted: Mapping[str, float]


def cells() -> list[Cell]:
    """The measured cells of limits_h200."""
    folder = RESULTS / "limits_h200"
    by_cell: dict[tuple[Any, ...], list[Row]] = {}
    for row in jsonl.rows(folder / "predictions.jsonl"):
        by_cell.setdefault(tuple(row[name] for name in (*CELL, *SETTING)), []).append(row)
    made = []
    for record in jsonl.rows(folder / "rollouts.jsonl"):
        rows = by_cell.pop(tuple(record[name] for name in (*CELL, *SETTING)), None)
        if rows is None:  # it repeats a cell
            continue
        first = rows[0]
        workload, setting = (tuple(first[name] for name in names) for names in (CELL, SETTING))
        named = all(first[name] == value for name, value in first["named"].items())
        predicted = on_host(rows, (*SECONDS, *GAINS), record["host_loop_s"])
        made.append(Cell(workload, setting, named, record["seconds"], predicted))
    return made


def measured_gains(every: Sequence[Cell]) -> list[tuple[Cell, float]]:
    """Each cell with other limits than tune's, and the measured gain of tune's over them."""
    named = {cell.workload: cell.seconds for cell in every if cell.named}
    return [(cell, cell.seconds / named[cell.workload]) for cell in every if not cell.named and cell.workload in named]


def limits() -> str:
    """A line for each measured cell, in Markdown."""
    every = cells()
    gains = {id(cell): gain for cell, gain in measured_gains(every)}
    setting = ("max_num_seqs", "largest graph", "token budget", "memory")
    heads = (
        "model",
        "precision",
        "workload",
        *setting,
        "measured (s)",
        "predicted (90%)",
        "gain of tune's",
        "predicted",
    )
    lines = []
    for cell in every:
        seconds, low, high = (cell.predicted[name] for name in SECONDS)
        shown = [*cell.workload, *(f"{value:,}" for value in cell.setting), f"{cell.seconds:.1f}"]
        shown.append(f"{seconds:.1f} ({low:.1f}-{high:.1f}), {seconds / cell.seconds - 1:+.0%}")
        gain, low, high = (cell.predicted[name] for name in GAINS)
        if cell.named:
            shown += ["named", ""]
        else:
            shown += [f"{gains[id(cell)]:.2f}x" if id(cell) in gains else "", f"{gain:.2f}x ({low:.2f}-{high:.2f})"]
        lines.append(shown)
    return table(heads, lines)


def verdicts() -> str:
    """The answers to what is asked of tune, in Markdown."""
    every = cells()
    gains = measured_gains(every)
    hold = sum(cell.predicted["low_s"] <= cell.seconds <= cell.predicted["high_s"] for cell in every)
    gains_hold = sum(cell.predicted["gain_low"] <= gain <= cell.predicted["gain_high"] for cell, gain in gains)
    points = max(100 * abs(cell.predicted["gain"] - gain) for cell, gain in gains)
    behind = [
        cell.seconds / min(other.seconds for other in every if other.workload == cell.workload) - 1
        for cell in every
        if cell.named
    ]
    lines = (
        ("90% intervals of seconds that hold what was measured", f"{hold} of {len(every)}"),
        ("gain of tune's limits over another setting: worst error, points", f"{points:.1f}"),
        ("90% intervals of these gains that hold", f"{gains_hold} of {len(gains)}"),
        ("tune's limits behind the best measured, worst", f"{max(behind):.1%}"),
    )
    return table(("question", "answer"), lines)


def levers() -> str:
    """A line for each lever, in Markdown, and a sentence on the intervals of their gains."""
    folder = RESULTS / "levers_h200"
    predicted = jsonl.rows(folder / "predictions.jsonl")
    runs = [run for run in jsonl.rows(folder / "runs.jsonl") if run["repeat"]]  # first runs only compile
    columns = ("without: measured (s)", "predicted", "with: measured (s)", "predicted")
    heads = ("workload", "lever", "accepted", *columns, "gain", "predicted (90%)", "error, points")
    lines, held = [], []
    for case, lever in dict.fromkeys((row["case"], row["lever"]) for row in predicted):
        own = [row for row in predicted if (row["case"], row["lever"]) == (case, lever)]
        before, after = ([run for run in runs if (run["case"], run["arm"]) == (case, arm)] for arm in (PLAIN, lever))
        numbers, accepted = _predicted(own, before, after)
        times = [median(run["seconds"] for run in some) for some in (before, after)]
        gain = times[0] / times[1]
        expected, low, high = (numbers[name] for name in GAINS)
        held.append(low <= gain <= high)
        seconds = [f"{x:.2f}" for pair in zip(times, (numbers[name] for name in TIMES), strict=True) for x in pair]
        shown = (f"{gain:.2f}x", f"{expected:.2f}x ({low:.2f}-{high:.2f})", f"{100 * (expected - gain):+.1f}")
        lines.append((case, lever, accepted, *seconds, *shown))
    return f"{table(heads, lines)}\n\n90% intervals that hold the measured gain: {sum(held)} of {len(held)}."


def _predicted(rows: Sequence[Row], before: Sequence[Row], after: Sequence[Row]) -> tuple[Mapping[str, float], str]:
    """The prediction of a lever for the host of its runs, and the share of first drafts that were accepted.

    Gains with drafts are predicted at several acceptances. The measured one lies between two.
    """
    loop_s = mean(run["host_loop_s"] for run in (*before, *after) if run["host_loop_s"] is not None)
    acceptances = list(dict.fromkeys(row["acceptance"] for row in rows))
    names = (*TIMES, *GAINS)
    own = [on_host([row for row in rows if row["acceptance"] == x], names, loop_s) for x in acceptances]
    if acceptances == [None]:
        return own[0], ""
    share = median(run["acceptance"] for run in after)
    return {name: float(np.interp(share, acceptances, [x[name] for x in own])) for name in names}, f"{share:.0%}"


if __name__ == "__main__":
    print("\n\n".join((verdicts(), limits(), levers())))
