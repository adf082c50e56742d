"""Profiles of the H100, judged on measured rollouts that no fit has seen.

    python -m benchmarks.native_h100     prints the tables of profiles/README.md and docs/evidence/accuracy.md

The second table has `validation` alone: the cells that were frozen for one GPU.

`calibrate`'s own fit is that of calibrate/anchor with its traces, and of the kernels beside it. It was made by commit
37ce6b13.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.anchored import VERSIONS
from benchmarks.error_parts import FOLDERS, Cell, cells, errors, summary
from benchmarks.tables.baselines import MOST_REQUESTS
from benchmarks.tables.markdown import table as markdown
from fp8plan import jsonl
from fp8plan.model.hardware import find_gpu
from fp8plan.model.profile.library import load_profile, profiles_path
from fp8plan.model.profile.profile import Profile
from fp8plan.model.validate.records import read_records
from fp8plan.model.validate.validate import validate

CARD = find_gpu("h100")
RESULTS = Path(__file__).parent / "results" / "native_h100.jsonl"
SETS = profiles_path() / FOLDERS["h100"] / "validation"


def plans_take() -> Profile:
    """The profile of the H100 in plans."""
    return load_profile(CARD, VERSIONS["h100"], profiles_dir=profiles_path())[0]


def profiles() -> Iterator[tuple[str, Profile]]:
    """The profiles that are there, each with a name."""
    yield "the H200's calibration, which plans take", plans_take()
    yield "the import", load_profile(CARD, "0.24.0", profiles_dir=profiles_path())[0].of_another_version()


HEAD = ("rollouts", "makespans, MAPE", "worst", "90% interval, median", "holds", "speed-ups, points")  # of `row`


def row(name: str, every: Sequence[Cell]) -> list[str]:
    makespans, speed_ups = errors(every, every[0].simulated.model.profile)
    times, ratios = summary(makespans), summary(speed_ups)
    worst = max(abs(cell.rollout.makespan_s / cell.record.seconds - 1) for cell in every)
    shown = [f"{times['points']:.1f}%", f"{worst:.1%}", f"+-{times['half_width']:.1%}", f"{times['held']:.0%}"]
    return [name, str(len(every)), *shown, f"{ratios['points']:.1f}"]


def rows(name: str, profile: Profile) -> dict[str, list[str]]:
    """The rows of a profile: of all rollouts, and of those on one GPU."""
    small = [cell for cell in cells("h100", profile) if len(cell.record.batch.responses) <= MOST_REQUESTS]
    single = [cell for cell in small if cell.record.limits.tensor_parallel_size == 1]
    return {"all": row(name, small), "single": row(name, single)}


def tables() -> str:
    """The table of all rollouts, and that of those on one GPU."""
    judged = [rows(*each) for each in profiles()] + [dict(each) for each in jsonl.rows(RESULTS)]
    return "\n\n".join(markdown(("profile", *HEAD), [each[kind] for each in judged]) for kind in ("all", "single"))


def sets() -> str:
    """The errors of both sets that the import had predicted, in a sentence."""
    validated = [validate(read_records(SETS / f"{name}.jsonl")) for name in ("rollouts", "anchored")]
    first, second = (f"{x.makespan_mape:.1%} (worst {x.makespan_worst:.1%})" for x in validated)
    return (
        "Its imported profile predicted two sets beforehand, 17 rollouts to 4.3% and 18 to 3.2%. "
        f"The H200's calibration gives {first} and {second}:"
    )


if __name__ == "__main__":
    print(f"{tables()}\n\n{sets()}")
