"""Write a line for each run into a table that is committed. The tables of docs/evidence are made of these lines.

    python -m benchmarks.learning.keep FOLDER/POLICY TABLE.jsonl                   runs that are over
    python -m benchmarks.learning.keep FOLDER/POLICY TABLE.jsonl --unfinished      those too that were broken off
    python -m benchmarks.learning.keep FOLDER/POLICY TABLE.jsonl.gz --speed        with seconds and lengths of each step

Lines of other runs stay. A line has the figures of a run's steps, as `figures` says.
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks.learning.predicted import last_tenth, observed, read_json, reward_after
from benchmarks.learning.run import found_runs
from benchmarks.learning.state import RunFolder
from fp8plan import jsonl, schemas

FIRST, MIDDLE, LATE = slice(0, 5), slice(20, 30), slice(-10, None)  # steps of a run
BEGIN: Final = slice(0, 10)
DOUBT: Final = "rollout_corr/rollout_log_ppl"  # -log p of sampled tokens, mean over sequences, in nats
COSTS: Final = {  # name of a column -> metric
    "clipped_mass": schemas.CLIPPED_MASS, "lost_tokens": schemas.LOST_TOKENS, "ess": schemas.ESS,
}  # fmt: skip
NOT_OF_SPEED: Final = (  # of a Monitor's record
    "guard", "profile", "versions", "thresholds", "decision", "reason", "alarms", "escalate",
)  # fmt: skip


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.keep")
    parser.add_argument("runs", type=Path)
    parser.add_argument("table", type=Path, help="NAME.jsonl, or NAME.jsonl.gz")
    parser.add_argument("--unfinished", action="store_true", help="keep runs that were broken off, too")
    parser.add_argument("--speed", action="store_true", help="keep the seconds and lengths of each step, too")
    given = parser.parse_args(words)
    policy = given.runs.resolve().name
    rows = {(row["policy"], row["arm"], row["seed"]): row for row in jsonl.rows(given.table)}
    for (arm, seed), run in found_runs(given.runs).items():
        if not run.done and not given.unfinished:
            continue
        row = {"policy": policy, "arm": arm, "seed": seed, **figures(run)}
        if given.speed:
            row |= of_speed(run)
        rows[policy, arm, seed] = row
    lines = b"".join(jsonl.line(row) for row in rows.values())
    if given.table.suffix == ".gz":
        lines = gzip.compress(lines, mtime=0)  # without a time stamp: the same rows make the same bytes
    given.table.write_bytes(lines)


def figures(run: RunFolder) -> dict[str, Any]:
    """The figures of a run's steps.

    reward_before, reward_after: on the pilot's problems; after is None for a run that was broken off
    reward_first, _middle, _late: in training: means of steps 1 to 5, 21 to 30 and the last ten
    kl_expected:                  the plan's k3, and the ends of its interval
    kl_k3, ess_raw, clip_fraction: medians over all steps but the first
    kl_first, _begin, _late, _end: k3 of step 1; its means over the first ten, the last ten, and the last tenth
    tis_least:                    the lowest C but the first step's; tis_late, tis_end: as k3's
    doubt_begin, doubt_late:      -log p of sampled tokens: means over the first and the last ten steps
    clipped_mass, lost_tokens, ess: means over the steps
    bf16_steps:                   steps that ran in BF16
    gradient_error:               [bias2, variance, norm2] of each step that measured it (trainer.GradientError)
    """
    steps = run.rows("steps.jsonl")
    metrics = [row["metrics"] for row in run.rows("run.jsonl")]
    said, seen = read_json(run / "predicted.json"), observed(run)
    rewards = [row["reward"] for row in steps]
    kls, bounds, doubts = (_column(metrics, name) for name in (schemas.K3, schemas.TIS, DOUBT))
    made = {
        "date": read_json(run / "done.json")["date"] if run.done else None,
        "steps": len(steps),
        "reward_before": said["pilot_reward"],
        "reward_after": reward_after(run) if run.done else None,
        "reward_first": _mean(rewards[FIRST]),
        "reward_middle": _mean(rewards[MIDDLE]),
        "reward_late": _mean(rewards[LATE]),
        "kl_expected": [said["kl_k3"], said["kl_k3_low"], said["kl_k3_high"]],
        **{name: seen[name] for name in ("kl_k3", "ess_raw", "clip_fraction")},
        "kl_first": kls[0],
        "kl_begin": _mean(kls[BEGIN]),
        "kl_late": _mean(kls[LATE]),
        "kl_end": _mean(last_tenth(kls)),
        "tis_least": seen["lowest_c"],
        "tis_late": _mean(bounds[LATE]),
        "tis_end": _mean(last_tenth(bounds)),
        "doubt_begin": _mean(doubts[BEGIN]),
        "doubt_late": _mean(doubts[LATE]),
        **{name: _mean([x for x in _column(metrics, metric) if x is not None]) for name, metric in COSTS.items()},
        "bf16_steps": sum(row["precision"] == "bf16" for row in steps),
        "gradient_error": [list(row["gradient_error"].values()) for row in steps if "gradient_error" in row],
    }
    return {name: _rounded(value) for name, value in made.items()}


def of_speed(run: RunFolder) -> dict[str, Any]:
    """The seconds of a run's steps beside what was predicted, and its rollouts' lengths and settings."""
    rollouts = []
    for row in run.rows("run.jsonl"):
        kept = {name: value for name, value in row.items() if name not in NOT_OF_SPEED}
        rollouts.append(kept | {"metrics": {schemas.K3: row["metrics"][schemas.K3]}})
    return {
        "predicted": read_json(run / "predicted.json"),
        "seconds": run.rows("steps.jsonl"),
        "rollouts": rollouts,
    }


def _column(metrics: Sequence[dict[str, Any]], name: str) -> list[float | None]:
    return [step.get(name) for step in metrics]


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean; None if a value is missing, or all are."""
    known = [x for x in values if x is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _rounded(value: Any) -> Any:
    """A float, or those of a list, to six digits."""
    if isinstance(value, list):
        return [_rounded(x) for x in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
