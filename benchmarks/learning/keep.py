"""Copy what is worth keeping of runs into a folder that is committed: all their records, compressed.

    python -m benchmarks.learning.keep FOLDER/POLICY TARGET
    python -m benchmarks.learning.keep FOLDER/POLICY TARGET.jsonl       a line for each run: the figures of its steps.
                                                                        Lines of other runs stay

Runs that shared a GPU lose what only a check of their speed needs: the lengths of every request, and the guard's
verdicts. Checkpoints and plans stay where they are.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.learning.predicted import read_json, reward_after
from benchmarks.learning.run import found_runs
from benchmarks.learning.state import DRILL, RunFolder
from fp8plan import jsonl, schemas

KEPT: Final = ("predicted.json", "done.json", "drill.json")
OF_MODEL: Final = ("training.json", "config.json")  # with its config, `validate` can say again what was to be expected
LOGS: Final = ("run.jsonl", "steps.jsonl", "changes.jsonl", "events.jsonl")
COSTS: Final = {  # name of a column -> metric
    "high": schemas.BAND_HIGH, "clipped_mass": schemas.CLIPPED_MASS, "lost_tokens": schemas.LOST_TOKENS,
    "ess": schemas.ESS, "ess_raw": schemas.ESS_RAW, "news": schemas.NEWS,
}  # fmt: skip
OF_SPEED: Final = ("prompt_lengths", "response_lengths", "prompt_ids", "guard")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.keep")
    parser.add_argument("runs", type=Path)
    parser.add_argument("target", type=Path, help="a folder; or a file, NAME.jsonl")
    given = parser.parse_args(words)
    if given.target.suffix == ".jsonl":
        rows = {(row["arm"], row["seed"]): row for row in jsonl.rows(given.target)}
        for (arm, seed), run in found_runs(given.runs).items():
            if run.done:
                rows[arm, seed] = {"arm": arm, "seed": seed, **figures(run)}
        given.target.write_bytes(b"".join(jsonl.line(row) for row in rows.values()))
        return
    for (arm, seed), run in found_runs(given.runs).items():
        keep(run, given.target / arm / str(seed))
    if (given.runs / DRILL).is_dir():
        keep(RunFolder(given.runs / DRILL), given.target / DRILL)
    for name in OF_MODEL:
        if (given.runs / "model" / name).is_file():
            shutil.copy(given.runs / "model" / name, given.target)


def keep(run: RunFolder, target: Path) -> None:
    """Copy a run's records into a folder, which is made."""
    target.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        if (run / name).is_file():
            shutil.copy(run / name, target)
    left_out = () if read_json(run / "predicted.json").get("at_once", 1) == 1 else OF_SPEED
    for name in LOGS:
        if rows := run.rows(name):
            lines = (jsonl.line({key: x for key, x in row.items() if key not in left_out}) for row in rows)
            # Without a time stamp: the same rows make the same bytes.
            (target / f"{name}.gz").write_bytes(gzip.compress(b"".join(lines), mtime=0))


def figures(run: RunFolder) -> dict[str, Any]:
    """Rewards before and after a run, and of each step: the reward in training, the KL, C, its cost, the precision."""
    metrics = [row["metrics"] for row in run.rows("run.jsonl")]
    steps = run.rows("steps.jsonl")
    return {
        "date": read_json(run / "done.json")["date"],
        "reward_before": round(read_json(run / "predicted.json")["pilot_reward"], 4),
        "reward_after": round(reward_after(run), 4),
        "reward": [round(row["reward"], 3) for row in steps],
        "kl_k3": [float(f"{one[schemas.K3]:.3g}") for one in metrics],
        "tis": [None if one.get(schemas.TIS) is None else round(one[schemas.TIS], 3) for one in metrics],
        **{name: [_digits(step.get(metric)) for step in metrics] for name, metric in COSTS.items()},
        "precision": [row["precision"] for row in steps],
        "gradient_error": [
            {part: _digits(value) for part, value in row["gradient_error"].items()}
            for row in steps
            if "gradient_error" in row
        ],
    }


def _digits(number: float | None) -> float | None:
    """Three digits of a number."""
    return None if number is None else float(f"{number:.3g}")


if __name__ == "__main__":
    main()
