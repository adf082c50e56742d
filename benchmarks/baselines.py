"""Predictions of others for measured rollouts: a datasheet roofline, fp8plan uncalibrated, and AIConfigurator 0.12.

`make baselines` runs this in AIConfigurator's environment. benchmarks/results/baselines_SET.jsonl gets one line per
method and cell, with the predicted seconds or the reason why there are none. A cell is a group, a precision and an
imposed KV size; repeated runs share it. benchmarks/tables/baselines.py has the sets, and sums up. Methods:

roofline           per step the larger of bytes / bandwidth and FLOPs / peak of the datasheet, on fp8plan's schedule
datasheet profile  fp8plan with profiles/datasheet.json, whatever was measured since
aic-*-estimate     AIConfigurator's own estimate with its vLLM or SGLang tables, at mean lengths (see aic.estimate)
aic-*-simulated    AIConfigurator's step times on fp8plan's schedule and memory plan (see aic.simulated)
aic-vllm+*-...     the same, its vLLM tables mended by rows of another engine (see aic)
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version

import aic
from tqdm import tqdm

from benchmarks.tables.baselines import SETS, records, results
from benchmarks.tables.cells import CELL, cell_of
from fp8plan.errors import Fp8PlanError
from fp8plan.model.hardware import find_gpu
from fp8plan.model.profile.library import datasheet_profile
from fp8plan.model.rollout import Simulated, rollout, step_batch
from fp8plan.model.validate.records import Record
from fp8plan.model.validate.validate import simulated

Answer = tuple[float, str | None]  # seconds, and a warning that came with them
Method = Callable[[Record, Simulated], Answer]  # raises where it refuses


def roofline(_: Record, prepared: Simulated) -> Answer:
    """Seconds by the datasheet: no launch, no host, no inefficiency, no overlap between steps."""
    model, seconds = prepared.model, []
    for plan in prepared.schedules:
        batch = step_batch(plan)
        bound = model.least_seconds(batch)
        seconds.append(float(plan.steps @ bound))
    return max(seconds), None


def datasheet(_: Record, prepared: Simulated) -> Answer:
    return rollout(prepared.schedules, prepared.model).makespan_s, None


def methods() -> dict[str, Method]:
    """Name -> method, in the order of the file."""
    methods: dict[str, Method] = {"roofline": roofline, "datasheet profile": datasheet}
    for backend in aic.BACKENDS:
        methods[f"aic-{backend}-estimate"] = partial(aic.estimate, backend=backend)
        methods[f"aic-{backend}-simulated"] = partial(aic.simulated, backend=backend)
    return methods


def cell(record: Record) -> dict[str, object]:
    """The fields, by name, that identify the record's cell."""
    return dict(zip(CELL, cell_of(record.fields | {"group": record.group}), strict=True))


def lines(record: Record) -> Iterator[dict[str, object]]:
    """One per method. A method that raises has refused this cell: that is a result too."""
    prepared = simulated(record, datasheet_profile(find_gpu(record.fields["gpu"]), record.fields["engine_version"]))
    for name, method in methods().items():
        row: dict[str, object] = {**cell(record), "method": name, "predicted_s": None}
        start = time.perf_counter()
        try:
            seconds, warning = method(record, prepared)
            row |= {"predicted_s": round(seconds, 6)} | ({"warning": warning} if warning else {})
        except Exception as error:
            row["refusal"] = f"{type(error).__name__}: {without_paths(str(error))}"
        yield row | {"took_s": round(time.perf_counter() - start, 3), "by": made_by(name, prepared.model.gpu.name)}


def made_by(method: str, card: str) -> str:
    """Name and version of what made the numbers."""
    if not method.startswith("aic-"):
        return f"fp8plan {version('fp8plan')}"
    backend = method.split("-")[1]
    versions = f"aiconfigurator {version('aiconfigurator')}, core {version('aiconfigurator-core')}"
    return f"{versions}, tables of {aic.made_of(card, backend)}"


def without_paths(message: str) -> str:
    """The beginning of a message on one line, paths of this machine cut to their last name."""
    return re.sub(r"(?<!\w)/(?:[\w.+-]+/)+", "", " ".join(message.split()))[:300]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"default: {' '.join(SETS)}")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # AIConfigurator warns of tables that these models do not use
    try:
        for name in arguments.sets or SETS:
            write(name)
    except Fp8PlanError as error:
        sys.exit(f"error: {error}")


def write(name: str) -> None:
    """Ask every method about the cells of a set."""
    cells = {tuple(cell(record).values()): record for record in records(name)}
    today = {"date": time.strftime("%Y-%m-%d")}
    rows = [row | today for record in tqdm(cells.values(), name, disable=None) for row in lines(record)]
    results(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused = sum(row["predicted_s"] is None for row in rows)
    print(f"{len(cells)} cells x {len(methods())} methods, {refused} refusals: {results(name)}")


if __name__ == "__main__":
    main()
