"""The errors and intervals of profiles by two engines (`fp8plan calibrate --grid anchor`), and of their priors.

    python -m benchmarks.two_engines               by the committed steps of the H200 that are nearest to the grid's
    python -m benchmarks.two_engines FOLDER h100   by the rollouts that `calibrate --output FOLDER` measured on an H100

All measured rollouts of the GPU judge (benchmarks.error_parts.FILES). No profile by two engines has seen them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.anchored import VERSIONS
from benchmarks.error_parts import FOLDERS, Cell, cells, gains, makespan, summary
from benchmarks.tables.markdown import table as markdown
from fp8plan.model.calibrate.two_engines import TWO_ENGINES, by_two_engines
from fp8plan.model.hardware import find_gpu
from fp8plan.model.profile.library import datasheet_profile, load_profile, nearest_profile, profiles_path
from fp8plan.model.profile.profile import Profile
from fp8plan.model.validate.records import Record, read_records

MODEL, PRECISIONS = "fp8plan/moe-7b", ("bf16", "fp8_block+fp8_kv")  # the grid's engines


def committed(gpu: str) -> list[Record]:
    """The committed rollouts of the grid's two engines."""
    records = read_records(profiles_path() / FOLDERS[gpu] / "steps" / "rollouts.jsonl")
    return [x for x in records if x.fields["model"] == MODEL and x.fields["precision"] in PRECISIONS]


def priors(gpu: str) -> Iterator[tuple[str, Profile]]:
    """The profiles that could be there before any measurement of this GPU, each with a name."""
    card, version, folder = find_gpu(gpu), VERSIONS[gpu], profiles_path()
    yield "datasheet", datasheet_profile(card, version)
    imported = load_profile("h100", version, profiles_dir=folder)[0]
    if gpu == "h200":
        yield "import of the H100", imported.of_sibling(card.name)
    elif gpu == "h100":
        yield "import of the H100", imported
        yield "calibration of the H200", nearest_profile(card, version, folder)


def row(label: str, every: Sequence[Cell]) -> list[str]:
    groups: dict[str, list[Cell]] = {}
    for cell in every:
        groups.setdefault(cell.record.group, []).append(cell)
    profile = every[0].simulated.model.profile
    times = summary([makespan(cell, cell.rollout) for cell in every])
    ratios = summary([x for own in groups.values() for x in gains(own, [cell.rollout for cell in own], profile)])
    shown = [
        f"{times['points']:.1f}%", f"+-{times['half_width']:.1%}", f"{times['held']:.0%} of {times['number']:.0f}",
        f"{ratios['points']:.1f}", f"+-{ratios['half_width']:.1%}", f"{ratios['held']:.0%} of {ratios['number']:.0f}",
    ]  # fmt: skip
    return [label, *shown]


def table(gpu: str, records: Sequence[Record]) -> str:
    """A row for each prior, for its correction by `records`, and for the full calibration if there is one."""
    head = ["profile", "makespan error, mean", "90% interval, median", "holds"]
    head += ["speed-up error, points", "90% interval, median", "holds"]
    rows = []
    for name, prior in priors(gpu):
        rows.append(row(name, cells(gpu, prior)))
        rows.append(row(f"{name}, two engines", cells(gpu, by_two_engines(prior, records, VERSIONS[gpu]))))
    full = load_profile(gpu, VERSIONS[gpu], profiles_dir=profiles_path())[0]
    if full.kind == "calibrated" and full.gpu == find_gpu(gpu).name and full.engine_version == VERSIONS[gpu]:
        rows.append(row("full calibration", cells(gpu, full)))
    return markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="of a measured grid; default: the H200's committed steps")
    parser.add_argument("gpu", choices=list(FOLDERS), nargs="?", default="h200")
    words = parser.parse_args()
    measured = words.folder and read_records(words.folder / TWO_ENGINES / "rollouts.jsonl")
    print(table(words.gpu, measured or committed(words.gpu)))


if __name__ == "__main__":
    main()
