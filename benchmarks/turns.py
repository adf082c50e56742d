"""Rollouts of turns on an H200: predicted, then measured, and judged by bars that were set before.

    python -m benchmarks.turns > benchmarks/results/turns/predictions.jsonl     before the lease
    python -m benchmarks.turns benchmarks/results/turns/rollouts.jsonl          tables, and a verdict

The lease job `turns` measures the cells. Predictions are for several host loops, and a record is judged by the
prediction that is interpolated at its own. The profile's measurements have no turns. In the last cell FP8's engine has
as few KV tokens as BF16's: beside it the gain by kept prefixes is measured, too.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.tables.markdown import table as markdown
from fp8plan import jsonl
from fp8plan.model.profile.library import load_profile
from fp8plan.model.rollout import Simulated, simulate, step_batch
from fp8plan.model.setup import EngineSetup
from fp8plan.model.validate.records import read_records
from fp8plan.model.workload import Batch
from fp8plan.runtime.measure.rollouts.jobs import limits_of, workload_of

CELLS: Final = Path(__file__).parent / "results" / "turns" / "cells.json"
PREDICTIONS: Final = CELLS.with_name("predictions.jsonl")
ROLLOUTS: Final = CELLS.with_name("rollouts.jsonl")
VERSION: Final = "0.33.0"
HOST_LOOPS_S: Final = (2e-4, 2.74e-4, 3.5e-4, 4.16e-4, 4.8e-4, 5.5e-4, 7e-4)
CELL: Final = ("model", "workload", "precision", "kv_cache_tokens")  # the fields that name one
FP8: Final = "fp8_block+fp8_kv"
FULL: Final = 0.9  # of the tokens that a step may have
MAKESPAN, HITS, SPEED_UP = 5.0, 2.0, 4.0  # bars: percent, points, points


def run(setup: EngineSetup, batch: Batch, loop_s: float, blocks: int | None = None) -> Simulated:
    """The predicted rollout on a host with this loop. blocks: of the KV pool; None: as the setup has it"""
    if blocks is not None:
        setup = replace(setup, limits=replace(setup.limits, num_gpu_blocks=blocks))
    return simulate(setup, batch, load_profile(setup.gpu, VERSION)[0].on_host(loop_s))


def predictions(cells: Path = CELLS) -> Iterator[dict[str, Any]]:
    """A row for each cell and host.

    FP8's rows with a pool of their own size have its speed-up, and the factors of it: FP8 weights with as many KV
    tokens as BF16 has, then FP8 KV with as many, which is read faster, then FP8's own number of tokens.
    """
    for setting in json.loads(cells.read_text(encoding="utf-8")):
        workloads = [workload_of(row, row["name"]) for row in setting["workloads"]]
        limits = limits_of(setting | {"source": setting["model"]}, workloads)
        imposed = setting.get("kv_cache_tokens")
        for row, workload in zip(setting["workloads"], workloads, strict=True):
            batch = workload.batch()
            for precision in setting["precisions"]:
                setup = EngineSetup(setting["model"], setting["gpu"], precision, limits, engine_version=VERSION)
                for loop_s in HOST_LOOPS_S:
                    predicted = run(setup, batch, loop_s)
                    cell = (setting["model"], row["name"], precision, imposed)
                    gains = factors(setup, batch, loop_s, predicted) if precision == FP8 and imposed is None else {}
                    yield dict(zip(CELL, cell, strict=True)) | {"host_loop_s": loop_s} | facts(predicted) | gains


def facts(predicted: Simulated) -> dict[str, Any]:
    """The figures of a predicted rollout of turns."""
    rollout = predicted.rollout
    assert rollout.turns is not None
    return {
        "predicted_s": round(rollout.makespan_s, 3),
        "low_s": round(rollout.makespan_low_s, 3),
        "high_s": round(rollout.makespan_high_s, 3),
        "hit_share": round(rollout.turns["hit_share"], 4),
        "again_tokens": rollout.turns["again_tokens"],
        "tool_share": round(rollout.turns["tool_share"], 4),
        "preemptions": rollout.preemptions,
        "pool_tokens": predicted.memory.pool_tokens,
    }


def factors(setup: EngineSetup, batch: Batch, loop_s: float, own: Simulated) -> dict[str, float]:
    """The speed-up of FP8, and its factors."""
    bf16 = run(replace(setup, precision="bf16"), batch, loop_s)
    blocks = bf16.memory.kv.usable_blocks
    weights = run(replace(setup, precision="fp8_block"), batch, loop_s, blocks)
    reads = run(setup, batch, loop_s, blocks)
    seconds = [each.rollout.makespan_s for each in (bf16, weights, reads, own)]
    return {
        "speed_up": round(seconds[0] / seconds[3], 4),
        "by_weights": round(seconds[0] / seconds[1], 4),
        "by_reads": round(seconds[1] / seconds[2], 4),
        "by_kept_prefixes": round(seconds[2] / seconds[3], 4),
    }


def compared(records: Iterable[dict[str, Any]], predicted: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each record: measured figures beside predicted ones. The last record of a cell counts.

    Raises ValueError for a host whose loop lies outside of those that were predicted.
    """
    rows = {cell_of(record): record for record in records}
    for cell, record in rows.items():
        here = [row for row in predicted if cell_of(row) == cell]
        if not here:
            continue
        loops = [row["host_loop_s"] for row in here]
        loop_s = record["host_loop_s"]
        if not loops[0] <= loop_s <= loops[-1]:
            raise ValueError(f"the host's loop took {loop_s:.3g} s; predicted: {loops[0]} to {loops[-1]}")
        at_loop = {
            name: float(np.interp(loop_s, loops, [row[name] for row in here]))
            for name, value in here[0].items()
            if name not in (*CELL, "host_loop_s") and value is not None
        }
        hits = record["prefix_cache_hits"] / record["prefix_cache_queries"]
        base = rows.get((*cell[:2], "bf16", None))
        gain = base["seconds"] / record["seconds"] if base and "speed_up" in at_loop else None
        limited = [other["seconds"] for name, other in rows.items() if name[:3] == cell[:3] and name[3] is not None]
        kept = limited[0] / record["seconds"] if limited and cell[3] is None else None
        yield (
            dict(zip(CELL, cell, strict=True))
            | at_loop
            | {
                "record": record,
                "makespan_error": 100 * (at_loop["predicted_s"] / record["seconds"] - 1),
                "measured_hits": hits,
                "hit_error": 100 * (at_loop["hit_share"] - hits),
                "measured_speed_up": gain,
                "measured_kept_prefixes": kept,
                "speed_up_error": None if gain is None else 100 * (at_loop["speed_up"] - gain),
            }
        )


def cell_of(fields: dict[str, Any]) -> tuple[Any, ...]:
    """The values of CELL."""
    return tuple(fields.get(name) for name in CELL)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of `compared` in Markdown."""
    cells = []
    for row in rows:
        record, gain = row["record"], ""
        if row["measured_speed_up"] is not None:
            gain = f"{row['measured_speed_up']:.3f} ({row['speed_up']:.3f}, {row['speed_up_error']:+.1f})"
        cells.append(
            {
                "cell": name_of(row),
                "host loop, us": f"{record['host_loop_s'] * 1e6:.0f}",
                "KV tokens (predicted)": f"{record['measured_kv_cache_tokens']:,} ({row['pool_tokens']:,.0f})",
                "seconds (predicted, error)": f"{record['seconds']:.2f} ({row['predicted_s']:.2f}, "
                f"{row['makespan_error']:+.1f}%)",
                "prefix hits (predicted, points)": f"{row['measured_hits']:.1%} ({row['hit_share']:.1%}, "
                f"{row['hit_error']:+.1f})",
                "preemptions (predicted)": f"{record['preemptions']} ({row['preemptions']:.0f})",
                "lag of a turn, ms": f"{1e3 * record['turn_lag_s']:.1f}",
                "speed-up (predicted, points)": gain,
            }
        )
    return markdown(list(cells[0]), [list(cell.values()) for cell in cells])


def split_table(rows: Sequence[dict[str, Any]]) -> str:
    """FP8's speed-up by its factors: predicted, and measured where FP8's engine ran with as few tokens as BF16's."""
    cells = []
    for row in rows:
        if row["measured_speed_up"] is None:
            continue
        numbers = [row["measured_speed_up"], *(row[name] for name in ("by_weights", "by_reads", "by_kept_prefixes"))]
        *parts, kept = (f"{number:.3f}" for number in numbers)
        if row["measured_kept_prefixes"] is not None:
            kept += f" (measured {row['measured_kept_prefixes']:.3f})"
        cells.append([name_of(row), *parts, kept])
    return markdown(["cell", "speed-up", "FP8 weights", "faster KV reads", "kept prefixes"], cells)


def full_steps(rollouts: Path, trace: Path) -> str:
    """Seconds of a step at the start of the workload "long waits", where prefill fills the steps, in Markdown."""
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        ends = {row["key"]: row["core_s"] for row in map(json.loads, file)}  # of each step
    cells = []
    for record in read_records(rollouts):
        if record.fields["workload"] != "long waits":
            continue
        predicted = run(record.setup, record.batch, record.fields["host_loop_s"])
        batch = step_batch(predicted.schedules[0])
        full = np.asarray(batch.prefill_tokens) > FULL * record.limits.max_num_batched_tokens
        steps = int(np.argmin(full))  # the number of full ones before the first that is not
        step_ends = ends[record.fields["key"]]
        measured_s = (step_ends[steps - 1] - step_ends[0]) / (steps - 1)
        timed = predicted.model.timed(batch)
        unlimited = sum(component.per_step().seconds for component in timed.components)
        cell = [name_of(record.fields), str(steps), f"{measured_s:.3f}"]
        for seconds in (timed.seconds(), unlimited):
            predicted_s = float(seconds[1:steps].mean())  # the first step's begin was not measured
            cell.append(f"{predicted_s:.3f}, {100 * (predicted_s / measured_s - 1):+.1f}%")
        cells.append(cell)
    heads = ["cell", "full steps of prefill", "seconds of a step", "predicted", "predicted without the power limit"]
    return markdown(heads, cells)


def name_of(row: dict[str, Any]) -> str:
    """A cell in words."""
    pool = f", {row['kv_cache_tokens']:,} KV tokens" if row["kv_cache_tokens"] else ""
    return f"{row['model'].rpartition('/')[2]}, {row['workload']}, {row['precision']}{pool}"


def misses(rows: Sequence[dict[str, Any]], predicted: Sequence[dict[str, Any]]) -> list[str]:
    """Sentences on the bars that were missed, and on cells without a record."""
    bars = {"makespan_error": (MAKESPAN, "%"), "hit_error": (HITS, " points"), "speed_up_error": (SPEED_UP, " points")}
    missed = [
        f"{name_of(row)}: {name.replace('_', ' ')} {row[name]:+.1f}{unit}, allowed {bar:g}{unit}"
        for row in rows
        for name, (bar, unit) in bars.items()
        if row[name] is not None and abs(row[name]) > bar
    ]
    measured = {cell_of(row) for row in rows}
    without = {cell_of(row): row for row in predicted if cell_of(row) not in measured}
    missed += [f"{name_of(row)}: not measured" for row in without.values()]
    larger = [row for row in rows if (row["measured_kept_prefixes"] or 0) > row.get("by_reads", 1)]
    if not larger:
        missed.append("in no cell is FP8 KV's measured gain by kept prefixes larger than that by faster reads")
    return missed


def judged(rollouts: Path = ROLLOUTS) -> tuple[str, list[str]]:
    """The tables of records in Markdown, and the sentences of `misses`. A trace beside the records has a table, too."""
    predicted = jsonl.rows(PREDICTIONS)
    rows = list(compared(jsonl.rows(rollouts), predicted))
    inside = sum(row["low_s"] <= row["record"]["seconds"] <= row["high_s"] for row in rows)
    held = f"{inside} of {len(rows)} makespans are inside their 90% intervals."
    tables = [table(rows), held, split_table(rows)]
    trace = rollouts.with_suffix(".trace.jsonl.gz")
    if trace.exists():
        tables.append(full_steps(rollouts, trace))
    return "\n\n".join(tables), misses(rows, predicted)


def main() -> int:
    if len(sys.argv) == 1:
        for row in predictions():
            print(json.dumps(row))
        return 0
    tables, missed = judged(Path(sys.argv[1]))
    print(tables, "", *missed or ["all bars are met"], sep="\n")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
