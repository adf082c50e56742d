"""The gate of accuracy: predictions of all committed rollouts, held against BARS and against the committed baseline.

    python -m benchmarks.gate            compares, and fails if a file of records got worse
    python -m benchmarks.gate --update   makes today's predictions the baseline

A file of records fails if its makespans' mean error is above its bar. Beside the baseline both sides are judged on the
records that both have. A file fails if its makespans' mean error or its mean speed-up error is more than LIMIT points
worse. All files together fail if the intervals hold LIMIT points less than they did and promise, and if a record of the
baseline is gone. `--update` moves the baseline, and never a bar: many small steps cannot pass unseen. A commit that
raises a bar says why in its message.

A record whose host nobody timed is predicted on the profile's own host, as it is of the machines that were calibrated.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.tables.cells import accuracy
from fp8plan.model.hardware import find_gpu
from fp8plan.model.profile.library import profile_path, profiles_path
from fp8plan.model.profile.profile import HOST_LOOP, Profile
from fp8plan.model.validate.records import Record, read_records
from fp8plan.model.validate.validate import validate

BASELINE = Path(__file__).parent / "results" / "gate.jsonl"
LIMIT = 2.0  # points
PROMISED = 90.0  # percent of the measured times that lie in their intervals
# File of records -> the largest mean error of its makespans over all its runs, in percent: that of 29 November 2026 and
# some tenths more.
BARS = {
    "cpu/vllm-0.30.0/steps/rollouts.jsonl": 4.4,
    "cpu/vllm-0.30.0/validation/rollouts.jsonl": 5.7,
    "h100_sxm/vllm-0.26.0/calibrate/anchor/rollouts.jsonl": 7.6,
    "h100_sxm/vllm-0.26.0/reports/rollouts.jsonl": 5.9,
    "h100_sxm/vllm-0.26.0/validation/anchored.jsonl": 3.0,
    "h100_sxm/vllm-0.26.0/validation/rollouts.jsonl": 2.2,
    "h100_sxm/vllm-0.33.0/validation/rollouts.jsonl": 2.5,
    "h200_sxm/vllm-0.26.0/families/held_out.jsonl": 3.3,
    "h200_sxm/vllm-0.26.0/families/rollouts.jsonl": 2.5,
    "h200_sxm/vllm-0.26.0/first_look/rollouts.jsonl": 3.1,
    "h200_sxm/vllm-0.26.0/power/rollouts.jsonl": 1.6,
    "h200_sxm/vllm-0.26.0/steps/rollouts.jsonl": 3.2,
    "h200_sxm/vllm-0.26.0/validation/again.jsonl": 8.0,
    "h200_sxm/vllm-0.26.0/validation/anchor.jsonl": 1.6,
    "h200_sxm/vllm-0.26.0/validation/rollouts.jsonl": 3.1,
    "h200_sxm/vllm-0.33.0/calibrate/steps/rollouts.jsonl": 8.4,
    "h200_sxm/vllm-0.33.0/validation/rollouts.jsonl": 4.1,
}
NAMES = ("rollouts", "held_out", "again", "anchor", "anchored")  # of files with measured rollouts
KEPT = ("line", "group", "precision", "seconds", "predicted_s", "predicted_low_s", "predicted_high_s")
Rows = Mapping[tuple[str, int], Mapping[str, Any]]


def files() -> list[Path]:
    """The committed files of measured rollouts."""
    folder = profiles_path()
    return sorted(path for name in NAMES for path in folder.rglob(f"{name}.jsonl"))


def predictions(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """A row for each record of the files."""
    rows = []
    for path in paths:
        name = path.relative_to(profiles_path()).as_posix()
        records = [_timed(record) for record in read_records(path)]
        rows += [{"file": name} | {key: row[key] for key in KEPT} for row in validate(records).records]
    return rows


def _timed(record: Record) -> Record:
    """The record, with the loop of the profile's own host if nobody timed another."""
    fields = record.fields
    if fields.get("host_loop_s") is not None:
        return record
    return replace(record, fields=fields | {"host_loop_s": own_loop_s(fields["gpu"], fields["engine_version"])})


@cache
def own_loop_s(gpu: str, engine_version: str) -> float | None:
    """The loop of the host that a shipped profile was calibrated on; None if that was not timed."""
    path = profile_path(profiles_path(), find_gpu(gpu).name, engine_version)
    own: float | None = Profile.from_json(path.read_text(encoding="utf-8")).coefficients.get(HOST_LOOP)
    return own


def keyed(rows: Iterable[Mapping[str, Any]]) -> Rows:
    return {(row["file"], row["line"]): row for row in rows}


def faults(before: Rows, now: Rows) -> list[str]:
    """Sentences on all that got worse from the baseline to now; empty if the gate is open."""
    gone = [
        f"line {line} of {file} is in the baseline and not in the records"
        for file, line in before
        if (file, line) not in now
    ]
    common = [key for key in before if key in now]
    worse = []
    for name in dict.fromkeys(file for file, _ in common):
        old, new = (accuracy([side[key] for key in common if key[0] == name]) for side in (before, now))
        pairs = {"mean error of makespans": (100 * old.makespan_mape, 100 * new.makespan_mape)}
        if old.speedup_mae_points is not None and new.speedup_mae_points is not None:
            pairs["mean error of speed-ups"] = old.speedup_mae_points, new.speedup_mae_points
        worse += [
            f"{name}: the {what} was {was:.1f} points and is {today:.1f}"
            for what, (was, today) in pairs.items()
            if today > was + LIMIT
        ]
    held = [100 * _held([side[key] for key in common]) for side in (before, now)]
    if common and held[1] < min(held[0], PROMISED) - LIMIT:
        worse.append(f"the intervals held {held[0]:.0f}% of the measured times and hold {held[1]:.0f}%")
    return gone + worse


def above_bars(rows: Rows, bars: Mapping[str, float]) -> list[str]:
    """Sentences on the files whose makespans are off by more than their bar allows, or that have none."""
    sentences = []
    for name in dict.fromkeys(file for file, _ in rows):
        error = 100 * accuracy([row for key, row in rows.items() if key[0] == name]).makespan_mape
        if name not in bars:
            sentences.append(f"{name} has no bar in benchmarks/gate.py; its makespans are off by {error:.1f}%")
        elif error > bars[name]:
            sentences.append(f"{name}: makespans are off by {error:.1f}%, and the bar is {bars[name]:.1f}%")
    return sentences


def _held(rows: Sequence[Mapping[str, Any]]) -> float:
    inside = [row["predicted_low_s"] <= row["seconds"] <= row["predicted_high_s"] for row in rows]
    return sum(inside) / len(inside)


def baseline() -> Rows:
    return keyed(map(json.loads, BASELINE.read_text(encoding="utf-8").splitlines()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the baseline")
    update, rows = parser.parse_args().update, predictions(files())
    if update:
        BASELINE.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    problems = above_bars(keyed(rows), BARS) + faults(baseline(), keyed(rows))
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
