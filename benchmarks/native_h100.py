"""Profiles of the H100, judged on measured rollouts that no fit has seen.

    python -m benchmarks.native_h100        prints the table of profiles/README.md, in two minutes

The second table has `validation` alone: the cells that were frozen for one GPU.

`calibrate`'s own fit sees the rollouts in calibrate/anchor with their traces, and the kernels beside them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.anchored import VERSIONS
from benchmarks.error_parts import FOLDERS, Cell, cells, gains, makespan, summary
from benchmarks.tables.baselines import MOST_REQUESTS
from benchmarks.tables.markdown import table as markdown
from benchmarks.two_engines import import_of_the_h100
from fp8plan.model.calibrate.profile_of import calibrate
from fp8plan.model.calibrate.two_engines import by_two_engines
from fp8plan.model.hardware import find_gpu
from fp8plan.model.profile.library import nearest_profile, profiles_path
from fp8plan.model.profile.profile import Profile
from fp8plan.model.validate.records import read_records

CARD = find_gpu("h100")


def profiles() -> Iterator[tuple[str, Profile]]:
    """The profiles, each with a name."""
    version, folder = VERSIONS["h100"], profiles_path() / FOLDERS["h100"] / "calibrate"
    imported = import_of_the_h100()
    yield "the H200's calibration, which plans take", nearest_profile(CARD, version, profiles_path())
    yield "the import", imported
    with TemporaryDirectory() as place:
        shutil.copytree(folder / "kernels", Path(place) / "kernels")
        shutil.copytree(folder / "anchor", Path(place) / "steps")
        yield "`calibrate`'s own fit", calibrate(Path(place), CARD, version).profile
    yield (
        "the import, corrected by these rollouts",
        by_two_engines(imported, read_records(folder / "anchor" / "rollouts.jsonl"), version),
    )


def row(name: str, every: Sequence[Cell]) -> list[str]:
    times = summary([makespan(cell, cell.rollout) for cell in every])
    worst = max(abs(cell.rollout.makespan_s / cell.record.seconds - 1) for cell in every)
    groups = {cell.record.group: [x for x in every if x.record.group == cell.record.group] for cell in every}
    of_groups = (gains(own, [cell.rollout for cell in own], own[0].simulated.model.profile) for own in groups.values())
    ratios = summary([ratio for group in of_groups for ratio in group])
    shown = [f"{times['points']:.1f}%", f"{worst:.1%}", f"+-{times['half_width']:.1%}", f"{times['held']:.0%}"]
    return [name, str(len(every)), *shown, f"{ratios['points']:.1f}"]


def tables() -> str:
    """The table of all rollouts, and that of those on one GPU."""
    judged = {name: cells("h100", profile) for name, profile in profiles()}
    head = ["profile", "rollouts", "makespans, MAPE", "worst", "90% interval, median", "holds", "speed-ups, points"]
    every, single = [], []
    for name, own in judged.items():
        small = [cell for cell in own if len(cell.record.batch.responses) <= MOST_REQUESTS]
        every.append(row(name, small))
        single.append(row(name, [cell for cell in small if cell.record.limits.tensor_parallel_size == 1]))
    return f"{markdown(head, every)}\n\n{markdown(head, single)}"


if __name__ == "__main__":
    print(tables())
