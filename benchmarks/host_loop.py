"""The hosts that were seen: their loops of Python, the pace of their rollouts, and how well a prior from them holds.

    python -m benchmarks.host_loop          prints the tables of docs/evidence/accuracy.md, and the prior

A host is a boot of a machine. SEEN_LOOP_S of fp8plan.model.profile is the median of the hosts' median loops, from all
committed records. A rollout's pace is the factor on all seconds of the host at which its prediction is the measured
time. Only rollouts count that a host of half the speed makes SLOWER longer, by the H200's profile, and that took WAITED
longer than on the fastest host that is looked for. OTHER_HOST_SD is the spread of these paces around SEEN_LOOP_S, and
KNOWN_HOST_SD rounds the spread that a rollout's own loop leaves.

Both constants of the prior are judged on rollouts of hosts that are left out of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq

from benchmarks.tables.markdown import table as markdown
from fp8plan import jsonl
from fp8plan.model.profile.library import load_profile, profiles_path
from fp8plan.model.profile.profile import HOST_PACE, OTHER_HOST_SD, SEEN_LOOP_S, Profile
from fp8plan.model.rollout import Rollout, makespans
from fp8plan.model.validate.records import Record, read_records
from fp8plan.model.validate.validate import simulated

SLOWER, WAITED = 0.2, 0.003
FACTORS = 0.2, 4.0  # least and most that is looked for
VERSION = "0.26.0"
H200, H100 = (profiles_path() / f"{gpu}_sxm" / f"vllm-{VERSION}" for gpu in ("h200", "h100"))
RESULTS = Path(__file__).parent / "results"
ABOVE_GRAPHS = tuple(RESULTS / name / "rollouts.jsonl" for name in ("above_graphs", "limits_h100"))
FILES = {
    "H200, never fitted": (H200 / "validation/rollouts.jsonl", H200 / "families/held_out.jsonl"),
    "H100, up to 512 requests": tuple(
        H100 / name / "rollouts.jsonl" for name in ("validation", "reports", "calibrate/anchor")
    ),
    "H100, more requests": ABOVE_GRAPHS,
}
DOCTORS = "host_loops.jsonl"  # files of what `fp8plan doctor --host` said
NEWER = profiles_path() / "h200_sxm" / "vllm-0.33.0" / "calibrate" / "steps" / "rollouts.jsonl"


class Paced(NamedTuple):
    """One rollout that depends on its host. loop_s: as timed; by_seconds: the loop that its own seconds ask for"""

    boot: str
    loop_s: float
    by_seconds: float


@cache
def seen() -> dict[str, list[float]]:
    """Boot of a machine -> seconds of its loop in all committed records."""
    loops: dict[str, list[float]] = {}
    for path in sorted(path for root in (profiles_path(), RESULTS) for path in root.rglob("*.jsonl")):
        if "host_loop_s" not in path.read_text(encoding="utf-8"):
            continue
        for row in jsonl.rows(path):
            boot, loop_s = row.get("boot"), row.get("host_loop_s")
            if boot is None and path.name == DOCTORS:  # other files without boots repeat rollouts
                boot = _boot_near(path)
            if boot is not None and loop_s is not None:
                loops.setdefault(boot, []).append(loop_s)
    return loops


def _boot_near(path: Path) -> str:
    """The machine of what `fp8plan doctor --host` said, by the rollouts beside it."""
    boots = {record.fields["boot"] for file in path.parent.rglob("rollouts.jsonl") for record in read_records(file)}
    (boot,) = boots
    return str(boot)


def expected_s(without: str = "") -> float:
    """The loop to expect of a host that nobody timed. without: the boot of a host that does not count"""
    return median(median(loops) for boot, loops in seen().items() if boot != without)


def spread(without: str = "") -> float:
    """The root of the mean square of log(pace / that of `expected_s`). Each host counts as much as any other."""
    squares: dict[str, list[float]] = {}
    for each in (each for rows in paced().values() for each in rows if each.boot != without):
        squares.setdefault(each.boot, []).append(np.log(each.by_seconds / expected_s(without)) ** 2)
    return float(np.sqrt(np.mean([np.mean(own) for own in squares.values()])))


@cache
def paced() -> dict[str, list[Paced]]:
    """Name in FILES -> its rollouts that depend on the host."""
    return {name: [each for path in paths for each in _paced(path)] for name, paths in FILES.items()}


def _paced(path: Path) -> Iterator[Paced]:
    for record in read_records(path):
        loop_s = record.fields.get("host_loop_s")
        if loop_s is None:
            continue
        run = simulated(record, load_profile(record.fields["gpu"], VERSION)[0])
        timed_host = run.model.profile  # on the host that was timed

        def seconds(factor: float) -> float:
            return makespans([run.schedules], replace(run.model, profile=_times(timed_host, factor)))[0]  # noqa: B023

        low, high = map(seconds, FACTORS)
        if seconds(2.0) < (1 + SLOWER) * seconds(1.0) or not (1 + WAITED) * low < record.seconds < high:
            continue
        factor = brentq(lambda factor: seconds(factor) - record.seconds, *FACTORS, xtol=0.01)  # noqa: B023
        yield Paced(record.fields["boot"], loop_s, factor * loop_s)


def untimed(record: Record) -> Record:
    return replace(record, fields=record.fields | {"host_loop_s": None})


def _times(profile: Profile, factor: float) -> Profile:
    pace = factor * profile.coefficient(HOST_PACE)
    return replace(profile, coefficients=profile.coefficients | {HOST_PACE: pace}, log_covariance={})


# -------------------------------------------------------------------------------------------------------- tables


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.0f}"


def hosts() -> str:
    """The range of the hosts, and the prior, in sentences."""
    medians = [median(loops) for loops in seen().values()]
    records = sum(map(len, seen().values()))
    return (
        f"{len(medians)} hosts were seen, in {records} records. Their median loops take {_us(min(medians))} to "
        f"{_us(max(medians))} µs, and single ones {_us(min(map(min, seen().values())))} to "
        f"{_us(max(map(max, seen().values())))} µs. An unknown host is expected at {_us(expected_s())} µs. The log of "
        f"its pace has a spread of {spread():.2f}."
    )


def table() -> str:
    """The spreads in Markdown."""
    rows = []
    for name, rollouts in paced().items():
        pace = np.log([each.by_seconds / expected_s() for each in rollouts])
        left = np.log([each.by_seconds / each.loop_s for each in rollouts])
        spreads = (float(np.sqrt(np.mean(values**2))) for values in (pace, left))
        median_s = _us(expected_s() * np.exp(np.median(pace)))
        rows.append((name, str(len(rollouts)), median_s, *(f"{value:.2f}" for value in spreads)))
    head = ("rollouts", "number", "median pace, as a loop (µs)", "spread of the log", "left by the loop")
    older = over_loops(each for rollouts in paced().values() for each in rollouts)
    (newer,) = over_loops(_paced(NEWER))
    of_all = f"A host's pace is {older[0]:.2f} to {older[-1]:.2f} times its loop's with vLLM {VERSION}"
    return f"{markdown(head, rows)}\n\n{of_all} ({len(older)} hosts), and {newer:.2f} with 0.33 (one)."


def over_loops(rollouts: Iterable[Paced]) -> list[float]:
    """The geometric mean of pace over loop for each host, sorted."""
    logs: dict[str, list[float]] = {}
    for each in rollouts:
        logs.setdefault(each.boot, []).append(np.log(each.by_seconds / each.loop_s))
    return sorted(float(np.exp(np.mean(own))) for own in logs.values())


def left_out() -> str:
    """The rollouts of hosts that a prior has not seen, in Markdown."""
    profile, newer = load_profile("h100", VERSION)[0], load_profile("h200", VERSION)[0].of_another_version()
    records = [record for path in ABOVE_GRAPHS for record in read_records(path)]
    boots = dict.fromkeys(record.fields["boot"] for record in records)
    groups = [("H100, above the graphs", profile, [x for x in records if x.fields["boot"] == boot]) for boot in boots]
    rows, whole = [], list[tuple[Record, Rollout, Rollout]]()
    for name, known, own in (*groups, ("H200, vLLM 0.33, steps of its calibration", newer, read_records(NEWER))):
        boot = own[0].fields["boot"]
        prior = expected_s(boot), spread(boot)
        unknown = known.on_unknown_host(*prior)
        runs = [(x, simulated(untimed(x), unknown).rollout, simulated(x, known).rollout) for x in own]
        rows.append((name, boot[:8], str(len(own)), f"{_us(prior[0])} µs, {prior[1]:.2f}", *_judged(runs)))
        if known is profile:
            whole += runs
    rows.insert(len(groups), ("all of them", "", str(len(whole)), "", *_judged(whole)))
    head = ("rollouts", "host", "number", "prior without it", "host unknown: error", "held", "half-width")
    return markdown((*head, "with its loop: error", "held", "half-width"), rows)


def _judged(runs: Sequence[tuple[Record, Rollout, Rollout]]) -> Iterator[str]:
    """The error, the number of times in their intervals, and the intervals' half-width, for both predictions."""
    records, *both = zip(*runs, strict=True)
    for rollouts in both:
        pairs = [(record.seconds, rollout) for record, rollout in zip(records, rollouts, strict=True)]
        errors = [abs(rollout.makespan_s / seconds - 1) for seconds, rollout in pairs]
        held = sum(rollout.makespan_low_s <= seconds <= rollout.makespan_high_s for seconds, rollout in pairs)
        halves = [(rollout.makespan_high_s - rollout.makespan_low_s) / 2 / rollout.makespan_s for _, rollout in pairs]
        yield from (f"{np.mean(errors):.1%}, worst {max(errors):.0%}", f"{held} of {len(runs)}")
        yield f"+-{median(halves):.0%}"


if __name__ == "__main__":
    print(f"{hosts()}\n\n{table()}\n\n{left_out()}")
    print(f"\nin the code: SEEN_LOOP_S {SEEN_LOOP_S}, OTHER_HOST_SD {OTHER_HOST_SD}")
