"""The pace of an engine's host by its loop of Python, beside the pace that its rollouts had.

    python -m benchmarks.host_loop          prints the table of docs/evidence/accuracy.md, and OTHER_HOST_SD

Each rollout's pace is the factor on all seconds of the host at which the prediction is the measured time. Only rollouts
count that a host of half the speed makes SLOWER longer, by the H200's profile. KNOWN_HOST_SD of fp8plan.model.profile
rounds the spread that the loop leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq

from benchmarks.tables.markdown import table as markdown
from fp8plan.model.profile.library import load_profile, profiles_path
from fp8plan.model.profile.profile import HOST_LOOP, HOST_PACE, Profile
from fp8plan.model.rollout import makespans
from fp8plan.model.validate.records import read_records
from fp8plan.model.validate.validate import simulated

SLOWER = 0.2
PACES = 0.3, 6.0  # least and most that is looked for
VERSION = "0.26.0"
H200, H100 = (profiles_path() / f"{gpu}_sxm" / f"vllm-{VERSION}" for gpu in ("h200", "h100"))
RESULTS = Path(__file__).parent / "results"
FILES = {
    "H200, never fitted": (H200 / "validation/rollouts.jsonl", H200 / "families/held_out.jsonl"),
    "H100, up to 512 requests": tuple(
        H100 / name / "rollouts.jsonl" for name in ("validation", "reports", "calibrate/anchor")
    ),
    "H100, more requests": tuple(RESULTS / name / "rollouts.jsonl" for name in ("above_graphs", "limits_h100")),
}


class Paced(NamedTuple):
    """One rollout. pace: by its seconds; by_loop: by its loop; both as factors on the profile's host"""

    pace: float
    by_loop: float


def paced(path: Path) -> Iterator[Paced]:
    """The rollouts of a file that depend on the host."""
    for record in read_records(path):
        loop_s = record.fields.get("host_loop_s")
        if loop_s is None:
            continue
        profile = load_profile(record.fields["gpu"], VERSION)[0]
        run = simulated(replace(record, fields=record.fields | {"host_loop_s": None}), profile)

        def seconds(pace: float) -> float:
            return makespans([run.schedules], replace(run.model, profile=_at(profile, pace)))[0]  # noqa: B023

        if seconds(2.0) < (1 + SLOWER) * seconds(1.0) or not seconds(PACES[0]) < record.seconds < seconds(PACES[1]):
            continue
        pace = brentq(lambda pace: seconds(pace) - record.seconds, *PACES, xtol=0.01)  # noqa: B023
        yield Paced(pace, loop_s / profile.coefficient(HOST_LOOP))


def _at(profile: Profile, pace: float) -> Profile:
    return replace(profile, coefficients=profile.coefficients | {HOST_PACE: pace}, log_covariance={})


def lines() -> Iterator[tuple[str, ...]]:
    for name, paths in FILES.items():
        pairs = np.log([each for path in paths for each in paced(path)])
        left = pairs[:, 0] - pairs[:, 1]
        spreads = (float(np.sqrt(np.mean(values**2))) for values in (pairs[:, 0], left))
        yield name, str(len(pairs)), f"{np.exp(np.median(pairs[:, 0])):.2f}", *(f"{spread:.2f}" for spread in spreads)


def table() -> str:
    """The spreads in Markdown."""
    head = ("rollouts", "number", "median pace", "spread of the log", "left by the loop")
    return markdown(head, lines())


def other_hosts() -> float:
    """The root of the mean square of log(host_loop_s / HOST_LOOP) over all timed rollouts that no fit has seen."""
    own = load_profile("h200", VERSION)[0].coefficient(HOST_LOOP)
    records = [record for path in FILES["H200, never fitted"] for record in read_records(path)]
    loops = [loop_s for record in records if (loop_s := record.fields.get("host_loop_s")) is not None]
    return float(np.sqrt(np.mean(np.log(np.array(loops) / own) ** 2)))


if __name__ == "__main__":
    print(f"{table()}\n\nother hosts: {other_hosts():.2f}")
