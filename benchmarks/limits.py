"""Rollouts under several limits of two engines on an H200 with vLLM 0.33, beside predictions that were frozen before.

    python -m benchmarks.limits             prints the tables of docs/evidence/levers.md
    python -m benchmarks.limits --freeze    predicts every cell, before anything is measured

The cells are those of benchmarks/results/limits_h100. `tune` names limits for each workload, among all of its grid.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from benchmarks import frozen
from benchmarks.tables.markdown import table as markdown
from fp8plan import jsonl
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.candidates import Candidate
from fp8plan.model.plan.choice import speed_up
from fp8plan.model.plan.planner import predict
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.tune.request import TuneRequest
from fp8plan.model.tune.search import search
from fp8plan.model.workload import Workload, parse_lengths

RESULTS: Final = Path(__file__).parent / "results"
CELLS = RESULTS / "limits_h100" / "cells.json"
PREDICTIONS = RESULTS / "limits_h200" / "predictions.jsonl"
MEASURED = RESULTS / "limits_h200" / "rollouts.jsonl"
GPU, VERSION = "h200_sxm", "0.33.0"

LIMITS: Final = {field.name for field in fields(EngineLimits)}
CELL: Final = ("model", "precision", "workload")
SETTING: Final = ("max_num_seqs", "cudagraph_largest_batch", "max_num_batched_tokens", "gpu_memory_utilization")
SECONDS: Final = ("predicted_s", "low_s", "high_s")
GAINS: Final = ("gain", "gain_low", "gain_high")


@dataclass(frozen=True)
class Cell:
    """One rollout to measure. name: of the workload"""

    model: str
    precision: str
    name: str
    workload: Workload
    limits: EngineLimits


def cells() -> Iterator[Cell]:
    """The cells of the committed file."""
    for setting in json.loads(CELLS.read_text(encoding="utf-8")):
        limits = EngineLimits(**{name: setting[name] for name in LIMITS & setting.keys()})
        for precision in setting["precisions"]:
            for row in setting["workloads"]:
                yield Cell(setting["model"], precision, row["name"], _workload(row), limits)


def _workload(row: Mapping[str, Any]) -> Workload:
    prompts, responses = (parse_lengths(row[f"{kind}_lengths"], f"{kind}_length") for kind in ("prompt", "response"))
    return Workload(row["prompts"], row["samples"], prompts, responses, row.get("seed", 0))


def predictions() -> Iterator[frozen.Row]:
    """Each cell by `plan`, and the gain of the limits that `tune` names for its workload over the cell's."""
    named: dict[Any, Candidate] = {}
    for loop_us in frozen.HOST_LOOPS_US:
        for cell in cells():
            known: dict[str, Any] = {"precisions": [cell.precision], "engine_version": VERSION}
            known["host_loop_s"] = frozen.seconds(loop_us)
            prediction = predict(PlanRequest(cell.model, GPU, cell.workload, limits=cell.limits, **known))
            key = cell.model, cell.precision, cell.name, loop_us
            if key not in named:
                asked = replace(EngineLimits(), max_model_len=cell.limits.max_model_len, gpu_memory_utilization=0.85)
                named[key] = search(TuneRequest(cell.model, GPU, cell.workload, limits=asked, **known)).best.chosen
            own, best = prediction.chosen, named[key]
            gain = speed_up(own.timed, best.timed, prediction.profile)
            rollout = own.timed
            times = rollout.makespan_s, rollout.makespan_low_s, rollout.makespan_high_s
            yield {
                **dict(zip(CELL, (cell.model, cell.precision, cell.name), strict=True)),
                **setting_of(own),
                frozen.HOST: loop_us,
                **{name: round(value, 3) for name, value in zip(SECONDS, times, strict=True)},
                "named": setting_of(best),
                **{name: round(value or 1.0, 4) for name, value in zip(GAINS, gain, strict=True)},
            }


def setting_of(candidate: Candidate) -> dict[str, Any]:
    """The limits that a record of the candidate's rollout would have."""
    limits, largest = candidate.setup.limits, max(candidate.setup.cudagraph_sizes)
    values = limits.max_num_seqs, largest, limits.max_num_batched_tokens, limits.gpu_memory_utilization
    return dict(zip(SETTING, values, strict=True))


@dataclass(frozen=True)
class Judged:
    """One cell with its prediction for its own host, and for one that is not known.

    measured: the record; None: not measured yet
    own:      numbers for the record's host loop; those of an unknown host before it is measured
    unknown:  numbers for an unknown host
    """

    row: frozen.Row
    measured: Mapping[str, Any] | None
    own: Mapping[str, float]
    unknown: Mapping[str, float]

    @property
    def is_named(self) -> bool:
        """True for the limits that `tune` names."""
        return all(self.row[name] == value for name, value in self.row["named"].items())

    @property
    def workload(self) -> tuple[str, ...]:
        return tuple(self.row[name] for name in CELL)


def judged(predicted: Sequence[frozen.Row], records: Sequence[Mapping[str, Any]]) -> list[Judged]:
    """Every predicted cell, with its first record."""
    by_cell: dict[Any, list[frozen.Row]] = {}
    for row in predicted:
        by_cell.setdefault(tuple(row[name] for name in (*CELL, *SETTING)), []).append(row)
    result = []
    for key, rows in by_cell.items():
        same = [record for record in records if tuple(record[name] for name in (*CELL, *SETTING)) == key]
        record = same[0] if same else None
        loop_s = record["host_loop_s"] if record else None
        own, unknown = (frozen.on_host(rows, (*SECONDS, *GAINS), loop) for loop in (loop_s, None))
        result.append(Judged(rows[0], record, own, unknown))
    return result


def table(those: Sequence[Judged]) -> str:
    """The cells in Markdown, with measured seconds where there are any."""
    named = {cell.workload: cell.measured["seconds"] for cell in those if cell.is_named and cell.measured}
    setting = "max_num_seqs", "largest graph", "token budget", "memory"
    seconds = "measured (s)", "host unknown (s)", "with its loop (s)"
    gains = "gain of tune's limits", "predicted"
    heads = "model", "precision", "workload", *setting, *seconds, *gains
    return markdown(heads, (_line(cell, named.get(cell.workload)) for cell in those))


def _line(cell: Judged, named_s: float | None) -> Iterator[str]:
    yield from cell.workload
    yield from (f"{cell.row[name]:,}" for name in SETTING)
    record = cell.measured
    yield f"{record['seconds']:.1f}" if record else "not yet"
    unknown, own = (_seconds(numbers, record) for numbers in (cell.unknown, cell.own))
    yield unknown
    yield own if record else ""
    if cell.is_named:
        yield from ("named", "")
    else:
        yield f"{record['seconds'] / named_s:.2f}x" if record and named_s else ""
        yield f"{cell.own['gain']:.2f}x ({cell.own['gain_low']:.2f}-{cell.own['gain_high']:.2f})"


def _seconds(numbers: Mapping[str, float], record: Mapping[str, Any] | None) -> str:
    predicted, low, high = (numbers[name] for name in SECONDS)
    error = f", {predicted / record['seconds'] - 1:+.0%}" if record else ""
    return f"{predicted:.1f} ({low:.1f}-{high:.1f}){error}"


def verdicts(those: Sequence[Judged]) -> str:
    """The answers to what is asked of tune, in Markdown. Gains count where tune's limits were measured, too."""
    ran = [cell for cell in those if cell.measured]
    named = {cell.workload: cell.measured["seconds"] for cell in ran if cell.is_named and cell.measured}
    best = {key: min(x.measured["seconds"] for x in ran if x.measured and x.workload == key) for key in named}
    others = [cell for cell in ran if cell.workload in named and not cell.is_named]
    rows = [(cell, cell.measured["seconds"] / named[cell.workload]) for cell in others if cell.measured]
    holds = sum(_within(cell.measured["seconds"], cell.own, SECONDS[1:]) for cell in ran if cell.measured)
    gains_hold = sum(_within(gain, cell.own, GAINS[1:]) for cell, gain in rows)
    points = [100 * abs(cell.own["gain"] - gain) for cell, gain in rows]
    behind = [named[key] / best[key] - 1 for key in named]
    lines = (
        ("cells measured", f"{len(ran)} of {len(those)}"),
        ("90% intervals of seconds that hold what was measured", f"{holds} of {len(ran)}"),
        (
            "gain of tune's limits over another setting: worst error, points",
            f"{max(points, default=0):.1f}" if points else "not yet",
        ),
        ("90% intervals of these gains that hold", f"{gains_hold} of {len(rows)}"),
        ("tune's limits behind the best measured, worst", f"{max(behind):.1%}" if behind else "not yet"),
    )
    return markdown(("question", "answer"), lines)


def _within(value: float, numbers: Mapping[str, float], ends: Sequence[str]) -> bool:
    low, high = (numbers[name] for name in ends)
    return low <= value <= high


def committed() -> list[Judged]:
    """The committed predictions beside the committed records."""
    return judged(jsonl.rows(PREDICTIONS), jsonl.rows(MEASURED))


def tables() -> str:
    """Both tables in Markdown."""
    those = committed()
    return f"{table(those)}\n\n{verdicts(those)}"


if __name__ == "__main__":
    frozen.command("limits", PREDICTIONS, MEASURED, predictions, tables)
