"""Factors on an H100's host, GPU and watts that its rollouts ask for, judged on rollouts that are left out.

    python -m benchmarks.left_out        prints the table of docs/evidence/accuracy.md

A plan for an H100 takes the H200's profile, and no rollout of an H100 is in it. Each row fits one factor by least
squares of the errors' logs. It is judged twice: on each cell by the factor of the other cells of its set, and on the
other set. Each record's host has the loop that was timed there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.tables.markdown import table as markdown
from fp8plan.model.profile.library import load_profile, profiles_path
from fp8plan.model.profile.profile import GPU_PACE, HOST_PACE
from fp8plan.model.profile.sibling import IDLE, LIMIT
from fp8plan.model.rollout import makespans
from fp8plan.model.validate.records import Record, read_records
from fp8plan.model.validate.validate import simulated

SETS = {
    "vLLM 0.33": profiles_path() / "h100_sxm" / "vllm-0.33.0" / "validation" / "rollouts.jsonl",
    "engine limits, vLLM 0.26": Path(__file__).parent / "results" / "limits_h100" / "rollouts.jsonl",
}
MOST = 0.7  # of a factor's log: from half to twice
TRIED = np.linspace(-MOST, MOST, 9)  # between them the log of a rollout's seconds is interpolated
FINE = np.linspace(-MOST, MOST, 1401)
Errors = NDArray[np.float64]  # log(predicted / measured), shape (cells, factors)
Chosen = Callable[[str], bool]  # of coefficients


def _watts(name: str) -> bool:
    return name.startswith("power.") and name not in (IDLE, LIMIT)


FACTORS: dict[str, Chosen] = {
    "the host's pace": HOST_PACE.__eq__,
    "the GPU's pace": GPU_PACE.__eq__,
    "watts above the idle ones": _watts,
}


def errors(record: Record, chosen: Chosen) -> Errors:
    """The errors of a record for each factor of FINE on the chosen coefficients, shape (factors,)."""
    run = simulated(record, load_profile(record.fields["gpu"], record.fields["engine_version"])[0])
    profile, logs = run.model.profile, []
    for factor in np.exp(TRIED):
        scaled = {name: value * (factor if chosen(name) else 1.0) for name, value in profile.coefficients.items()}
        there = replace(profile, coefficients=scaled, log_covariance={})
        logs.append(np.log(makespans([run.schedules], replace(run.model, profile=there))[0] / record.seconds))
    return np.asarray(np.interp(FINE, TRIED, logs))


def best(of_cells: Errors) -> int:
    """The index in FINE of the factor with the least squares."""
    return int(np.argmin((of_cells**2).sum(axis=0)))


class Judged(NamedTuple):
    """A factor that one set of cells asks for. Errors are logs, of shape (cells of the set,).

    left_out: each cell by the factor of the other cells; by_other: by the factor of the other set
    """

    of: str
    cells: str
    factor: float
    without: Errors
    fitted: Errors
    left_out: Errors
    by_other: Errors


def judged() -> Iterator[Judged]:
    """Each factor for each set."""
    records = {name: read_records(path) for name, path in SETS.items()}
    for of, chosen in FACTORS.items():
        sets = {name: np.array([errors(record, chosen) for record in own]) for name, own in records.items()}
        for name, own in sets.items():
            (other,) = (each for another, each in sets.items() if another != name)
            left_out = [own[cell, best(np.delete(own, cell, axis=0))] for cell in range(len(own))]
            without, fitted = own[:, int(np.argmin(np.abs(FINE)))], own[:, best(own)]
            factor = float(np.exp(FINE[best(own)]))
            yield Judged(of, name, factor, without, fitted, np.array(left_out), own[:, best(other)])


def mape(logs: Errors) -> float:
    """The mean size of errors that are given as logs."""
    return float(np.abs(np.expm1(logs)).mean())


def table() -> str:
    """The factors and what they are worth, in Markdown."""
    rows = []
    for each in judged():
        worst = (float(np.abs(np.expm1(logs)).max()) for logs in each[3:])
        shown = [f"{mape(logs):.1%}, worst {most:.1%}" for logs, most in zip(each[3:], worst, strict=True)]
        rows.append((each.of, f"{each.cells}, {len(each.without)} cells", f"{each.factor:.2f}", *shown))
    columns = ("error without it", "of the fitted cells", "each cell left out", "by the other set's")
    return markdown(("factor on", "cells", "fitted", *columns), rows)


if __name__ == "__main__":
    print(table())
