"""Write a line for each run into a table that is committed. The tables of docs/evidence are made of these lines.

    python -m benchmarks.learning.keep FOLDER/POLICY TABLE.jsonl                   runs that are over
    python -m benchmarks.learning.keep FOLDER/POLICY TABLE.jsonl --unfinished      those too that were broken off

Lines of other runs stay. A line has the figures of a run's steps, as `figures` says.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from benchmarks.learning.run import begun_runs
from benchmarks.learning.state import RunFolder, read_json
from fp8plan import jsonl, schemas

LATE: Final = slice(-10, None)  # the last steps of a run


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.keep")
    parser.add_argument("runs", type=Path)
    parser.add_argument("table", type=Path)
    parser.add_argument("--unfinished", action="store_true", help="keep runs that were broken off, too")
    options = parser.parse_args(words)
    policy = options.runs.resolve().name
    rows = {(row["policy"], row["arm"], row["seed"]): row for row in jsonl.rows(options.table)}
    for (arm, seed), run in begun_runs(options.runs).items():
        if run.done or options.unfinished:
            rows[policy, arm, seed] = {"policy": policy, "arm": arm, "seed": seed, **figures(run)}
    options.table.write_bytes(b"".join(jsonl.line(row) for row in rows.values()))


def figures(run: RunFolder) -> dict[str, Any]:
    """The figures of a run's steps.

    reward_before, reward_after: on the pilot's problems; after is None for a run that was broken off
    reward_late:              in training: the mean of the last ten steps
    kl_expected:              the plan's k3, and the ends of its interval
    kl_k3, ess_raw, clip_fraction: medians over all steps but the first, which warms up
    kl_late, tis_late:        k3 and C: means over the last ten steps
    tis_least:                the lowest C but the first step's
    bf16_steps:               steps that ran in BF16
    routing_differs:          median share of the tokens that trainer and engine route differently; None if unknown
    """
    steps = run.rows("steps.jsonl")
    metrics = [row["metrics"] for row in run.rows("run.jsonl")]
    predicted = read_json(run / "predicted.json")
    done = read_json(run / "done.json") if run.done else {"date": None, "reward_after": None}
    k3, ess, clipped, bounds = (
        [step.get(name) for step in metrics]
        for name in (schemas.K3, schemas.ESS_RAW, schemas.CLIP_FRACTION, schemas.TIS)
    )
    made = {
        "date": done["date"],
        "steps": len(steps),
        "reward_before": predicted["pilot_reward"],
        "reward_after": done["reward_after"],
        "reward_late": _mean([row["reward"] for row in steps[LATE]]),
        "kl_expected": [predicted["kl_k3"], predicted["kl_k3_low"], predicted["kl_k3_high"]],
        "kl_k3": _median(k3[1:]),
        "ess_raw": _median(ess[1:]),
        "clip_fraction": _median(clipped[1:]),
        "kl_late": _mean(k3[LATE]),
        "tis_least": min(filter(None, bounds[1:]), default=None),
        "tis_late": _mean(bounds[LATE]),
        "bf16_steps": sum(row["precision"] == "bf16" for row in steps),
        "routing_differs": _median([step.get(schemas.ROUTING_DIFFERS) for step in metrics]),
    }
    return {name: _rounded(value) for name, value in made.items()}


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean; None if a value is missing, or all are."""
    known = [x for x in values if x is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _median(values: Sequence[float | None]) -> float | None:
    """The median of the values that are there; None if none is."""
    known = [x for x in values if x is not None]
    return median(known) if known else None


def _rounded(value: Any) -> Any:
    """A float, or those of a list, to six digits."""
    if isinstance(value, list):
        return [_rounded(x) for x in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
