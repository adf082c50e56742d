"""The errors and intervals of predictions before and after one or two measured rollouts, on records that nobody fitted.

    python -m benchmarks.anchored            writes benchmarks/results/anchored.jsonl; eight minutes on one core

A target is a workload of a model, measured in BF16 and in other precisions. The profile is anchored to rollouts of
other workloads, in up to three ways, and predicts the target's makespans and speed-ups. The datasheet profile stands in
for a GPU that nobody measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.error_parts import Cell, Ratio, by_model, cells, gains, makespan, summary
from benchmarks.tables.markdown import table as markdown
from fp8plan.model.architecture import ModelShape
from fp8plan.model.hardware import find_gpu
from fp8plan.model.plan.anchor import anchored
from fp8plan.model.profile.library import datasheet_profile, load_profile, profiles_path
from fp8plan.model.profile.profile import Profile
from fp8plan.model.rollout import rollout
from fp8plan.model.validate.records import host_of

RESULTS = Path(__file__).parent / "results" / "anchored.jsonl"
VERSIONS = {"h200": "0.26.0", "h100": "0.26.0", "cpu": "0.30.0"}
NONE, OTHER, OWN, TWO = "none", "BF16 of another model", "BF16 of the model", "BF16 and FP8 of the model"
WAYS = 3  # anchors for each target and scenario


def anchors(scenario: str, target: Sequence[Cell], every: Sequence[Cell]) -> Iterator[list[Cell]]:
    """The cells to anchor to, in up to WAYS ways."""
    model, group = target[0].record.fields["model"], target[0].record.group
    own = [cell for cell in every if cell.record.fields["model"] == model and cell.record.group != group]
    if scenario == NONE:
        yield []
    elif scenario == OTHER:
        others = [cell for cell in every if cell.record.fields["model"] != model and cell.precision == "bf16"]
        yield from ([cell] for cell in _spread(others))
    else:
        for cell in _spread([cell for cell in own if cell.precision == "bf16"]):
            fp8 = [x for x in own if x.record.group == cell.record.group and x.precision != "bf16"]
            if scenario == OWN:
                yield [cell]
            elif fp8:
                yield [cell, fp8[0]]


def _spread(cells: Sequence[Cell]) -> list[Cell]:
    """Up to WAYS cells, from all over the list."""
    places = np.linspace(0, len(cells) - 1, min(WAYS, len(cells))).round().astype(int)
    return [cells[place] for place in sorted(set(places.tolist()))]


def predictions(every: Sequence[Cell], profile: Profile, scenario: str) -> tuple[list[Ratio], list[Ratio]]:
    """The makespans and the speed-ups of all targets, by the profile on their host with the scenario's anchors."""
    makespans, speed_ups = list[Ratio](), list[Ratio]()
    corrected: dict[tuple[object, ...], Profile] = {}
    for model in by_model(every):
        name = model[0].record.fields["model"]
        for group in dict.fromkeys(cell.record.group for cell in model):
            target = [cell for cell in model if cell.record.group == group]
            loop_s = host_of([cell.record for cell in target], profile.gpu)
            for used in anchors(scenario, target, every):
                key = name, loop_s, tuple(map(id, used))
                if key not in corrected:
                    corrected[key] = _corrected(profile.on_host(loop_s), name, used)
                now = [
                    rollout(s.schedules, replace(s.model, profile=corrected[key]))
                    for s in (cell.simulated for cell in target)
                ]
                makespans += [makespan(cell, made) for cell, made in zip(target, now, strict=True)]
                speed_ups += gains(target, now, corrected[key])
    return makespans, speed_ups


def _corrected(profile: Profile, model: str, used: Sequence[Cell]) -> Profile:
    if not used:
        return profile
    records = [replace(cell.record, seconds=cell.seconds) for cell in used]
    version = used[0].record.fields["engine_version"]
    return anchored(profile, ModelShape.from_hf(model), version, records).applied(profile)


def measured() -> Iterator[dict[str, Any]]:
    """A row for each GPU, profile and scenario."""
    for gpu, version in VERSIONS.items():
        own = load_profile(gpu, version, profiles_dir=profiles_path())[0]
        for profile in (own, datasheet_profile(find_gpu(gpu), version)):
            every = cells(gpu, profile)
            for scenario in (NONE, OTHER, OWN, TWO):
                makespans, speed_ups = predictions(every, profile, scenario)
                row = {"gpu": gpu, "profile": profile.kind, "engine_version": version, "anchor": scenario}
                yield row | {"makespan": summary(makespans), "speedup": summary(speed_ups)}


def table() -> str:
    """The table of docs/evidence/accuracy.md, from the committed results."""
    head = ["GPU, profile", "anchor", "makespan error, mean", "90% interval, median", "holds"]
    head += ["speed-up error, points", "90% interval, median", "holds"]
    rows = []
    for row in map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines()):
        makespan, gain = row["makespan"], row["speedup"]
        cells = [f"{row['gpu']}, {row['profile']}", row["anchor"], f"{makespan['points']:.1f}%"]
        cells += [f"+-{makespan['half_width']:.1%}", f"{makespan['held']:.0%}", f"{gain['points']:.1f}"]
        rows.append([*cells, f"+-{gain['half_width']:.1%}", f"{gain['held']:.0%} of {gain['number']:.0f}"])
    return markdown(head, rows)


def main() -> None:
    lines = []
    for row in measured():
        lines.append(json.dumps(row))
        print(lines[-1], flush=True)
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
