"""Runs as lines of the committed tables, by arm."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.learning.arms import LOGGED
from fp8plan import jsonl
from fp8plan.errors import ConfigError

Run = dict[str, Any]  # a line, as benchmarks.learning.keep.figures says
Key = tuple[Path, int]  # a table, and a seed
Runs = dict[Key, Run]


def kept_runs(*tables: Path, policy: str | None = None, unfinished: bool = False) -> dict[str, Runs]:
    """Arm -> its runs in the tables, in the order of the table of arms; arms that it has no more come last.

    policy:     whose runs; None: of all
    unfinished: with the runs that were broken off

    Raises ConfigError if there is no such table.
    """
    runs = defaultdict[str, Runs](dict)
    for table in tables:
        if not table.is_file():
            raise ConfigError(f"{table} does not exist; type: python -m benchmarks.learning.keep FOLDER/POLICY {table}")
        for row in jsonl.rows(table):
            of_policy = policy is None or row["policy"] == policy
            if of_policy and (unfinished or row["reward_after"] is not None):
                runs[row["arm"]][table, row["seed"]] = row
    return {arm: runs[arm] for arm in dict.fromkeys([*LOGGED, *runs]) if arm in runs}


def figure(runs: Runs, name: str) -> dict[Key, float]:
    """One figure of each run."""
    return {key: row[name] for key, row in runs.items()}
