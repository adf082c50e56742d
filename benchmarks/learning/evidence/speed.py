"""Tables of speed: what was predicted and what was seen, of runs that had the GPU for themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

from benchmarks.learning.arms import BASELINE
from benchmarks.learning.evidence.kept import Run, kept_runs
from benchmarks.learning.evidence.places import ALONE, SHAPES
from benchmarks.learning.evidence.seeds import spread
from benchmarks.learning.predicted import UNSEEN, speedups
from benchmarks.tables.markdown import table
from fp8plan import jsonl
from fp8plan.model.validate.records import read_records
from fp8plan.model.validate.validate import validate


class Alone(NamedTuple):
    """A run that had the GPU for itself.

    kept: its line, with `predicted`, `seconds` and `rollouts`
    disturbed: steps in which another run was on the GPU after all
    """

    policy: str
    arm: str
    seed: int
    kept: Run
    disturbed: set[int]

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of `seconds` or `rollouts` that count: not the first step's, nor those of disturbed ones."""
        return [row for row in self.kept[name][1:] if row["step"] not in self.disturbed]


def alone(policies: Sequence[str]) -> list[Alone]:
    """The runs of these policies that had the GPU for themselves, in the order of the table of arms."""
    return [
        Alone(policy, arm, seed, row, set(row.get("disturbed", ())))
        for policy in policies
        for arm, runs in kept_runs(ALONE, policy=policy, unfinished=True).items()
        for (_, seed), row in runs.items()
    ]


def timed(*policies: str) -> str:
    """A line for each run that had the GPU for itself, in Markdown: seconds predicted, and medians of those seen.

    Of seconds per token of a rollout, the lowest and highest, too.
    """
    heads = (
        "policy",
        "arm",
        "steps",
        "rollout, predicted (90%)",
        "observed",
        "per token",
        "training",
        "sync",
        "whole step",
    )
    return table(heads, (_timed(one) for one in alone(policies)))


def _timed(one: Alone) -> list[str]:
    said, steps = one.kept["predicted"], one.rows("seconds")
    rollout, *others = (
        f"{median(row[f'{part}_s'] for row in steps):.2f} s" for part in ("rollout", "train", "sync", "step")
    )
    each = spread([1e6 * row["rollout_s"] / row["response_tokens"] for row in steps], ".0f", median, " µs")
    low, high = said["makespan_low_s"], said["makespan_high_s"]
    predicted = f"{said['makespan_s']:.2f} s ({low:.2f} to {high:.2f})"
    return [one.policy, one.arm, str(len(steps)), predicted, rollout, each, *others]


def gained(*policies: str) -> str:
    """A line for each FP8 run that had the GPU for itself, in Markdown: speed-ups and KL of its plan, and those seen.

    Observed: seconds per token of BF16's step over those of the same step of the run, whose problems are the same; the
    median over steps, and the lowest and highest. KL: k3 of the plan, and the median seen, of all steps but the first.
    A star: the plan went beyond what its profile had measured.
    """
    heads = ("policy", "arm", "steps", "rollout, predicted", "seen", "step, predicted", "seen", "k3, predicted", "seen")
    return table(heads, _gained(alone(policies)))


def _gained(found: Sequence[Alone]) -> Iterator[list[str]]:
    runs = {(one.policy, one.arm, one.seed): one for one in found}
    for (policy, arm, seed), one in runs.items():
        base = runs.get((policy, BASELINE, seed))
        if base is None or base is one:
            continue
        said, kl = one.kept["predicted"], one.kept["kl_k3"]
        but = base.disturbed | one.disturbed
        rollout, step = (speedups(base.kept["seconds"], one.kept["seconds"], part, but) for part in ("rollout", "step"))
        band = f"{said['speedup']:.2f} ({said['speedup_low']:.2f} to {said['speedup_high']:.2f})"
        k3 = f"{said['kl_k3']:.1e} ({said['kl_k3_low']:.1e} to {said['kl_k3_high']:.1e})"
        name = f"{policy} *" if said["extrapolated"] else policy
        seen = (spread(rollout, ".2f", median), spread(step, ".2f", median), UNSEEN if kl is None else f"{kl:.1e}")
        yield [name, arm, str(len(rollout)), band, seen[0], f"{said['step_speedup']:.2f}", seen[1], k3, seen[2]]


def again(*policies: str) -> str:
    """A line for each run that had the GPU for itself, in Markdown: its rollouts as predicted from their own lengths,
    but for the first of each engine.

    Errors of the seconds of `generate`, (predicted - measured) / measured. The profile is today's, the plan's may have
    been another.
    """
    heads = ("policy", "arm", "steps", "median error", "lowest", "highest")
    return table(heads, (_again(one) for one in alone(policies)))


def _again(one: Alone) -> list[str]:
    rows = [row | {"model": str(SHAPES / one.policy)} for row in one.rows("rollouts")]
    with NamedTemporaryFile(suffix=".jsonl") as file:
        Path(file.name).write_bytes(b"".join(map(jsonl.line, rows)))
        errors = [row["error"] for row in validate(read_records(file.name)).records]
    cells = (f"{x:+.1%}" for x in (median(errors), min(errors), max(errors)))
    return [one.policy, one.arm, str(len(errors)), *cells]
