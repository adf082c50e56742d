"""The errors and intervals of profiles by two engines (`fp8plan calibrate --grid anchor`), and of their priors.

    python -m benchmarks.two_engines h200          by the committed rollouts that are nearest to the grid's
    python -m benchmarks.two_engines h100          likewise
    python -m benchmarks.two_engines h100 FOLDER   by the rollouts that `calibrate --output FOLDER` measured

All measured rollouts of the GPU judge (benchmarks.error_parts.FILES), but for those of the two engines' model.
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
from fp8plan.model.profile.library import datasheet_profile, load_profile, profiles_path
from fp8plan.model.profile.profile import Profile
from fp8plan.model.validate.records import Record, read_records

GRID = Path(__file__).parent / "results" / "grid_h100"
PRECISIONS = "bf16", "fp8_block+fp8_kv"  # of the grid's engines
# GPU -> the model and the file of the committed rollouts that are nearest to the grid's
NEAREST = {
    "h200": ("fp8plan/moe-7b", "steps/rollouts.jsonl"),
    "h100": ("Qwen/Qwen3-30B-A3B", "validation/rollouts.jsonl"),
}


def committed(gpu: str) -> list[Record]:
    """The committed rollouts that are nearest to those of the grid's two engines."""
    model, file = NEAREST[gpu]
    records = read_records(profiles_path() / FOLDERS[gpu] / file)
    return [x for x in records if x.fields["model"] == model and x.fields["precision"] in PRECISIONS]


def committed_table(gpu: str) -> str:
    """The table of docs/evidence/accuracy.md: the H100's grid ran there, and the H200's is made of other rollouts."""
    return table(gpu, read_records(GRID / TWO_ENGINES / "rollouts.jsonl") if gpu == "h100" else committed(gpu))


def import_of_the_h100() -> Profile:
    """The profile of an H100 by others' tables, of vLLM 0.24, used for another version."""
    return load_profile("h100", "0.24.0", profiles_dir=profiles_path())[0].of_another_version()


def priors(gpu: str) -> Iterator[tuple[str, Profile]]:
    """The profiles that could be there before any measurement of this GPU, each with a name."""
    card, version, folder = find_gpu(gpu), VERSIONS[gpu], profiles_path()
    yield "datasheet", datasheet_profile(card, version)
    imported = import_of_the_h100()
    if gpu == "h200":
        yield "import of the H100", imported.of_sibling(card.name)
    elif gpu == "h100":
        yield "import of the H100", imported
        yield "calibration of the H200", load_profile("h200", version, profiles_dir=folder)[0].of_sibling(card.name)


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
    models = {record.fields["model"] for record in records}

    def judged(profile: Profile) -> list[Cell]:
        return [cell for cell in cells(gpu, profile) if cell.record.fields["model"] not in models]

    head = ["profile", "makespan error, mean", "90% interval, median", "holds"]
    head += ["speed-up error, points", "90% interval, median", "holds"]
    rows = []
    for name, prior in priors(gpu):
        rows.append(row(name, judged(prior)))
        rows.append(row(f"{name}, two engines", judged(by_two_engines(prior, records, VERSIONS[gpu]))))
    full = load_profile(gpu, VERSIONS[gpu], profiles_dir=profiles_path())[0]
    if full.kind == "calibrated" and full.gpu == find_gpu(gpu).name and full.engine_version == VERSIONS[gpu]:
        rows.append(row("full calibration", judged(full)))
    return markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpu", choices=list(NEAREST))
    parser.add_argument("folder", type=Path, nargs="?", help="of a measured grid; default: the committed rollouts")
    words = parser.parse_args()
    measured = words.folder and read_records(words.folder / TWO_ENGINES / "rollouts.jsonl")
    print(table(words.gpu, measured or committed(words.gpu)))


if __name__ == "__main__":
    main()
