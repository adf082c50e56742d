"""The record of profiles on GPUs that nobody calibrated: what their intervals hold, and the datasheet profile's errors.

    python -m benchmarks.uncalibrated        writes benchmarks/results/uncalibrated.jsonl; ten minutes on one core

Rollouts were measured on H200s, H100s and one CPU. On other GPUs the import of AIConfigurator's tables stands in for
measurements: each measured workload that fits is predicted there by the import and by the datasheet profile. The
import is wrong, too, and its error on the rollouts of H100s is added as a normal one.

Figures of profiles/datasheet.json come from here: `alike`, `model_error`, and the log_sd of `gpu.pace` and `host.pace`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import norm

from benchmarks.error_parts import MEASURED, Cell, Ratio, cells, errors, summary
from benchmarks.tables.markdown import table as markdown
from fp8plan.errors import Fp8PlanError
from fp8plan.model.hardware import find_gpu
from fp8plan.model.profile.library import datasheet_profile, kind_of, load_profile, profile_path, profiles_path
from fp8plan.model.profile.profile import ASSUMED, Profile
from fp8plan.model.rollout import rollout
from fp8plan.model.validate.validate import simulated

RESULTS = Path(__file__).parent / "results" / "uncalibrated.jsonl"
IMPORTS = {"h100_sxm": "0.24.0", "b200": "0.24.0", "l40s": "0.24.0", "a100_sxm": "0.14.0"}
HELD = 0.9  # the share that an interval promises
SHARED_STEP, OWN_STEP = 0.01, 0.005  # of the sds of paces and of model_error


class Record(NamedTuple):
    """The errors of a profile on one GPU, and what they are against.

    error: standard deviations of the log of what stands in for a measured time, and for a measured speed-up
    """

    profile: str
    gpu: str
    against: str
    makespans: list[Ratio]
    speed_ups: list[Ratio]
    error: tuple[float, float] = (0.0, 0.0)

    @property
    def held(self) -> tuple[float, float]:
        """The shares of times and of speed-ups that the intervals hold."""
        return held(self.makespans, self.error[0]), held(self.speed_ups, self.error[1])


def held(ratios: Sequence[Ratio], sd: float = 0.0) -> float:
    """The share that the intervals hold; with an `sd` of the measured values' logs, the expected share."""
    error, low, high, _ = np.array(ratios).T
    if not sd:
        return float(np.mean((low <= error) & (error <= high)))
    return float(np.mean(norm.cdf((high - error) / sd) - norm.cdf((low - error) / sd)))


def imported(gpu: str) -> Profile:
    """The import of AIConfigurator's tables for a GPU, without a wider error for another version."""
    path = profile_path(profiles_path(), gpu, IMPORTS[gpu])
    return Profile.from_json(path.read_text(encoding="utf-8"), str(path))


def alike() -> float:
    """The correlation of the errors of the datasheet profile's coefficients of one kind, in units of their log_sd.

    The imports' coefficients are taken as right.
    """
    pairs = []
    for gpu, version in IMPORTS.items():
        fitted, sheet = imported(gpu), datasheet_profile(find_gpu(gpu), version)
        kinds: dict[str, list[float]] = {}
        for name, value in sheet.coefficients.items():
            variance = sheet.covariance([name])[0, 0]
            own = fitted.coefficients.get(name, value)
            if variance and own != value and not fitted.notes.get(name, "").startswith(ASSUMED):
                kinds.setdefault(kind_of(name), []).append(float(np.log(own / value) / np.sqrt(variance)))
        pairs += [pair for errors in kinds.values() for pair in combinations(errors, 2)]
    first, second = np.array(pairs).T
    return float(np.mean(first * second) / np.sqrt(np.mean(first**2) * np.mean(second**2)))


def stand_ins(workloads: Sequence[Cell], gpu: str, sheet: Profile) -> list[Cell]:
    """The workloads that fit another GPU, by the datasheet profile; the import's seconds are in place of measured."""
    fitted, judged = imported(gpu), []
    for cell in workloads:
        fields = cell.record.fields | {"gpu": gpu, "engine_version": fitted.engine_version, "host_loop_s": None}
        record = replace(cell.record, fields=fields)
        try:
            by_sheet = simulated(record, sheet)
            by_import = simulated(record, fitted, by_sheet)
        except Fp8PlanError:  # it does not fit, or the GPU lacks the precision
            continue
        judged.append(Cell(record, by_sheet, by_import.rollout.makespan_s))
    return judged


class Sheet(NamedTuple):
    """The datasheet profile of one GPU and its cells. error: as in Record"""

    profile: Profile
    gpu: str
    against: str
    cells: list[Cell]
    error: tuple[float, float] = (0.0, 0.0)

    def record(self) -> Record:
        """Its record."""
        return Record("datasheet", self.gpu, self.against, *errors(self.cells, self.profile), self.error)

    def with_errors(self, shared: float, own: float) -> Sheet:
        """The same cells, by the profile with these errors, as in `Profile.with_errors`."""
        wider, judged = self.profile.with_errors(shared, own), []
        for cell in self.cells:
            profile = wider.on_host(cell.record.fields.get("host_loop_s"))
            model = replace(cell.simulated.model, profile=profile)
            made = rollout(cell.simulated.schedules, model)
            judged.append(cell._replace(simulated=cell.simulated._replace(rollout=made, model=model)))
        return self._replace(profile=wider, cells=judged)


def sheets() -> Iterator[Sheet]:
    """The datasheet profiles that a record judges: on measured GPUs, then by imports."""
    measured: list[Cell] = []
    for gpu, version in (("h200", "0.26.0"), ("h100", "0.26.0")):
        profile = datasheet_profile(find_gpu(gpu), version)
        own = cells(gpu, profile)
        yield Sheet(profile, gpu, "measured", own)
        measured += own
    both = errors(cells("h100", imported("h100_sxm")), imported("h100_sxm"))
    sds = summary(both[0])["rms"], summary(both[1])["rms"]
    for gpu in ("b200", "l40s", "a100_sxm"):
        profile = datasheet_profile(find_gpu(gpu), IMPORTS[gpu])
        yield Sheet(profile, gpu, "its import", stand_ins(measured, gpu, profile), sds)


def of_cpu() -> Sheet:
    """The datasheet profile of CPUs on the one that was measured."""
    profile = datasheet_profile(find_gpu("cpu"), "0.30.0")
    return Sheet(profile, "cpu", "measured", cells("cpu", profile))


def least(every: Sequence[Sheet], of: int, step: float) -> float:
    """The least sd, in whole steps, with which all intervals hold what they promise.

    of: 0 for `shared_error`, which the intervals of times need; 1 for `model_error`, which those of speed-ups need
    """
    steps = 0
    while True:
        sds = [[sheet.profile.shared_error, sheet.profile.model_error] for sheet in every]
        for both in sds:
            both[of] = steps * step
        changed = (sheet.with_errors(*both) for sheet, both in zip(every, sds, strict=True))
        if all(sheet.record().held[of] >= HELD for sheet in changed):
            return round(steps * step, 3)
        steps += 1


def others() -> Iterator[Record]:
    """The records of the H200's calibration and of the H100's import, as a plan for an H100 with vLLM 0.26 has them."""
    path = profiles_path() / MEASURED["h200"] / "profile.json"
    calibrated = Profile.from_json(path.read_text(encoding="utf-8"), str(path))
    for label, profile in (("sibling", load_profile("h100", "0.26.0")[0]), ("imported", imported("h100_sxm"))):
        used = profile if profile.engine_version == calibrated.engine_version else profile.of_another_version()
        yield Record(label, "h100", "measured", *errors(cells("h100", used), used))


def row(record: Record) -> dict[str, Any]:
    """A line of the results."""
    parts = zip(("makespan", "speedup"), (record.makespans, record.speed_ups), record.held, strict=True)
    figures = {name: summary(ratios) | {"held": share} for name, ratios, share in parts}
    return {"profile": record.profile, "gpu": record.gpu, "against": record.against} | figures


def table() -> str:
    """The table of docs/evidence/accuracy.md, from the committed results."""
    head = ["profile", "GPU", "against", "times", "90% interval, median", "holds"]
    body = []
    for line in map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines()):
        cells = [line["profile"], line["gpu"], line["against"]]
        for part in (line["makespan"], line["speedup"]):
            cells += [f"{part['number']:.0f}", f"+-{part['half_width']:.1%}", f"{part['held']:.0%}"]
        body.append(cells)
    return markdown([*head, "speed-ups", "90% interval, median", "holds"], body)


def main() -> None:
    every, cpu = list(sheets()), of_cpu()
    lines = [json.dumps(row(record)) for record in (*(sheet.record() for sheet in (*every, cpu)), *others())]
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(table())
    sds = least(every, 0, SHARED_STEP), least([cpu], 0, SHARED_STEP), least(every, 1, OWN_STEP)
    print(f"\nalike: {alike():.2f}; paces: {sds[0]:g}, of a CPU {sds[1]:g}; model_error: {sds[2]:g}")


if __name__ == "__main__":
    main()
