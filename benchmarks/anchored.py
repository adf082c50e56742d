"""The errors and intervals of predictions before and after one or two measured rollouts, on records that nobody fitted.

    python -m benchmarks.anchored [--gpu h200|h100|cpu]

A target is a workload of a model, measured in BF16 and in other precisions. The profile is anchored to rollouts of other
workloads, and predicts the target's makespans and speed-ups. The datasheet profile stands in for a GPU that nobody
measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from error_parts import MEASURED, Cell, by_model, cells

from fp8plan.model.hardware import find_gpu
from fp8plan.model.plan.anchor import Anchor, anchored
from fp8plan.model.plan.choice import speed_up, timed
from fp8plan.model.profile.library import datasheet_profile, load_profile, profiles_path
from fp8plan.model.profile.profile import Profile
from fp8plan.model.rollout import Rollout, rollout
from fp8plan.model.validate.validate import simulated

SCENARIOS = (
    "none",
    "one BF16 of another model",
    "one BF16 of the model",
    "two of the model",
    "all other of the model in BF16",
)


def chosen(scenario: str, target: list[Cell], models: Sequence[Sequence[Cell]]) -> Iterator[list[Cell]]:
    """The cells to anchor to, in up to three ways."""
    model, group = target[0].record.fields["model"], target[0].record.group
    own = [c for m in models for c in m if c.record.fields["model"] == model and c.record.group != group]
    others = [c for m in models for c in m if c.record.fields["model"] != model and c.precision == "bf16"]
    bf16 = [c for c in own if c.precision == "bf16"]
    if scenario == "none":
        yield []
    elif scenario == SCENARIOS[1]:
        yield from ([c] for c in spread(others))
    elif scenario == SCENARIOS[2]:
        yield from ([c] for c in spread(bf16))
    elif scenario == SCENARIOS[3]:
        for c in spread(bf16):
            same = [o for o in own if o.record.group == c.record.group and o.precision != "bf16"]
            yield from ([c, o] for o in same[:1])
    elif bf16:
        yield bf16


def spread(cells: Sequence[Cell], most: int = 3) -> list[Cell]:
    return (
        [cells[i] for i in sorted({round(x) for x in np.linspace(0, len(cells) - 1, min(most, len(cells)))})]
        if cells
        else []
    )


def evaluated(every: Sequence[Cell], profile: Profile, scenario: str):
    models = by_model(every)
    cache: dict[tuple, Profile] = {}
    sims: dict[int, object] = {}
    makespans, gains, points = [], [], []
    for model in models:
        groups: dict[str, list[Cell]] = {}
        for c in model:
            groups.setdefault(c.record.group, []).append(c)
        for target in groups.values():
            for anchors in chosen(scenario, target, models):
                key = (target[0].record.fields["model"], tuple(id(c) for c in anchors))
                if key not in cache:
                    records = [replace(c.record, seconds=c.seconds) for c in anchors]
                    version = target[0].record.fields["engine_version"]
                    cache[key] = anchored(profile, key[0], version, records).applied(profile) if records else profile
                used = cache[key]
                now = {}
                for c in target:
                    if id(c) not in sims:
                        sims[id(c)] = simulated(c.record, profile)
                    s = sims[id(c)]
                    now[id(c)] = r = rollout(s.schedules, replace(s.model, profile=used))
                    makespans.append(
                        (
                            np.log(c.seconds / r.makespan_s),
                            np.log(r.makespan_low_s / r.makespan_s),
                            np.log(r.makespan_high_s / r.makespan_s),
                        )
                    )
                for b in [c for c in target if c.precision == "bf16"][:1]:
                    for o in (c for c in target if c.precision != "bf16"):
                        gain = speed_up(*(timed(now[id(c)], c.record.limits.cut) for c in (b, o)), used)
                        real = b.seconds / o.seconds
                        gains.append(
                            (np.log(real / gain.ratio), np.log(gain.low / gain.ratio), np.log(gain.high / gain.ratio))
                        )
                        points.append(abs(real - gain.ratio) * 100)
    return np.array(makespans), np.array(gains), np.array(points)


def line(rows):
    e, lo, hi = rows.T
    return f"mean |e| {np.mean(np.abs(e)):.1%} sd {np.std(e):.1%} rms {np.sqrt(np.mean(e**2)):.1%} held {np.mean((lo <= e) & (e <= hi)):.0%} half {np.median((np.exp(hi) - np.exp(lo)) / 2):.1%}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", choices=sorted(MEASURED))
    args = parser.parse_args()
    for gpu in [args.gpu] if args.gpu else ("h200", "h100", "cpu"):
        version = "0.30.0" if gpu == "cpu" else "0.26.0"
        for label, profile in (
            ("measured", load_profile(gpu, version, profiles_dir=profiles_path())[0]),
            ("datasheet", datasheet_profile(find_gpu(gpu), version)),
        ):
            every = cells(gpu, profile)
            for scenario in SCENARIOS:
                makespans, gains, points = evaluated(every, profile, scenario)
                print(
                    f"{gpu} {label}, {scenario}: {len(makespans)} {line(makespans)} | {len(gains)} speed-ups {np.mean(points):.1f} points {line(gains)}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
