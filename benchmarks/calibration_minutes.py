"""The error of a profile of vLLM 0.33 on an H200 against the minutes that its calibration took.

    python -m benchmarks.calibration_minutes    prints the table of profiles/README.md; seven minutes on one core

One calibration, in profiles/h200_sxm/vllm-0.33.0/calibrate, is cut short in several places. Each cut is fitted by
itself, and judged on rollouts that no fit has seen, with their hosts' loops. The minutes are those of its log.
"""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterator
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.error_parts import Cell
from benchmarks.native_h100 import HEAD, row
from benchmarks.tables.markdown import table as markdown
from fp8plan import jsonl
from fp8plan.model.calibrate.profile_of import calibrate
from fp8plan.model.hardware import find_gpu
from fp8plan.model.profile.library import of_another_version, profile_path, profiles_path
from fp8plan.model.profile.profile import Profile
from fp8plan.model.validate.records import read_records
from fp8plan.model.validate.validate import simulated

CARD, VERSION = find_gpu("h200"), "0.33.0"
FOLDER = profile_path(profiles_path(), CARD.name, VERSION).parent
MEASURED, UNSEEN = FOLDER / "calibrate", FOLDER / "validation" / "rollouts.jsonl"
KERNELS = ("gemm", "attention", "moe", "elementwise", "power")
FIRST = ("Qwen3-1.7B",)
EVERY = (*FIRST, "moe-7b", "dense-50m")
LINE = re.compile(r"^\[(\d\d:\d\d:\d\d)\] (?:measuring: (\w+)|(compiling)|([\w.-]+?)\.(?:bf16|fp8)\S*: starting)?")


def seconds() -> dict[str, float]:
    """Stage of the calibration -> the seconds that it took, by the times in its log."""
    spent: dict[str, float] = defaultdict(float)
    stage, since = "", 0.0
    for line in (MEASURED / "calibrate.log").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("real"):  # one of the two runs has ended
            stage = ""
        if not (match := LINE.match(line)):
            continue
        now = datetime.strptime(match[1], "%H:%M:%S").timestamp()
        if stage:
            spent[stage] += now - since
        stage, since = next(filter(None, match.groups()[1:]), stage), now
    return spent


def profiles() -> Iterator[tuple[str, float, Profile]]:
    """Each cut: its name, its minutes, and the profile that it gives."""
    spent, before = seconds(), of_another_version(CARD, VERSION)
    if before is None:
        raise SystemExit(f"there is no other calibrated profile of {CARD.name}")
    engines = sum(spent[name] for name in FIRST)
    kernels = sum(spent[name] for name in (*KERNELS, "compiling"))
    yield f"none: the profile of vLLM {before.engine_version}", 0.0, before.of_another_version()
    yield "kernels, and two engines", (kernels + engines) / 60, fitted(FIRST, before)
    yield "whole", (kernels + sum(spent[name] for name in EVERY)) / 60, fitted(EVERY, before)


def fitted(models: Collection[str], before: Profile) -> Profile:
    """The fit of all kernels, and of the engines of these models."""
    with TemporaryDirectory() as place:
        shutil.copytree(MEASURED / "kernels", Path(place) / "kernels")
        shutil.copytree(MEASURED / "steps", Path(place) / "steps")
        file = Path(place) / "steps" / "rollouts.jsonl"
        kept = [x for x in jsonl.rows(file) if _name(x["model"]) in models]
        file.unlink()
        for record in kept:
            jsonl.write(file, record)
        return calibrate(Path(place), CARD, VERSION, before).profile


def _name(model: str) -> str:
    return model.rpartition("/")[2]


def table() -> str:
    records, rows = read_records(UNSEEN), []
    for name, minutes, profile in profiles():
        cells = [Cell(record, simulated(record, profile), record.seconds) for record in records]
        label, *errors = row(name, cells)
        rows.append([label, f"{minutes:.0f}", *errors])
    return markdown(("measured", "minutes", *HEAD), rows)


if __name__ == "__main__":
    print(table())
