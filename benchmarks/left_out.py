"""Factors on an H100's host, GPU and watts that its rollouts ask for, judged on rollouts that are left out.

    python -m benchmarks.left_out        prints the table of docs/evidence/accuracy.md

A plan for an H100 takes the H200's profile, and no rollout of an H100 is in it. Each row fits one factor by least
squares of the errors' logs. It is judged twice: on each cell by the factor of the other cells of its set, and on the
other set. Each record's host has the loop that was timed there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

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
MOST = 0.36  # of a factor's log
TRIED = np.linspace(-MOST, MOST, 5)  # between them the log of a rollout's seconds is interpolated
FINE = np.linspace(-MOST, MOST, 721)
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


def mape(logs: Errors) -> str:
    """The mean and the largest of errors that are given as logs."""
    sizes = np.abs(np.expm1(logs))
    return f"{sizes.mean():.1%}, worst {sizes.max():.1%}"


def row(factor: str, name: str, sets: Mapping[str, Errors]) -> tuple[str, ...]:
    own = sets[name]
    (others,) = (each for other, each in sets.items() if other != name)
    every = range(len(own))
    left_out = np.array([own[cell, best(np.delete(own, cell, axis=0))] for cell in every])
    fitted, alone = best(own), int(np.argmin(np.abs(FINE)))
    judged = (own[:, alone], own[:, fitted], left_out, own[:, best(others)])
    return factor, f"{name}, {len(own)} cells", f"{np.exp(FINE[fitted]):.2f}", *map(mape, judged)


def table() -> str:
    """The factors and what they are worth, in Markdown."""
    records = {name: read_records(path) for name, path in SETS.items()}
    rows = []
    for factor, chosen in FACTORS.items():
        sets = {name: np.array([errors(record, chosen) for record in own]) for name, own in records.items()}
        rows += [row(factor, name, sets) for name in sets]
    judged = ("error without it", "of the fitted cells", "each cell left out", "by the other set's")
    return markdown(("factor on", "cells", "fitted", *judged), rows)


if __name__ == "__main__":
    print(table())
