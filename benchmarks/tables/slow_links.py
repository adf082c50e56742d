"""Tables of docs/evidence/weight_sync.md on slow links, from committed measurements.

python -m benchmarks.tables.slow_links     prints the fit of the plan's seconds of a patched sync
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
from scipy.optimize import brentq, nnls

from benchmarks.tables import markdown
from fp8plan.jsonl import rows
from fp8plan.model.architecture import ModelShape
from fp8plan.model.cost.step import StepModel
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.precision import BF16_BYTES, PRESETS
from fp8plan.model.profile.library import load_profile
from fp8plan.model.rl_step import Mode, SyncCost, WeightSync, rank_matrices, sync_costs

RESULTS: Final = Path(__file__).parents[1] / "results"
Row = dict[str, Any]


def read(name: str) -> list[Row]:
    return list(rows(RESULTS / f"slow_links_{name}.jsonl"))


def mb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.3g} MB"


def steps() -> str:
    """Bytes of a step's sync of a real model, in several encodings: medians over steps."""
    logged = read("steps")
    model = next(row for row in logged if row["what"] == "model")
    steps = [row for row in logged if row["what"] == "step"]
    fp8, bf16, dense = model["fp8_values"], model["bf16_values"], model["fp8_dense_bytes"]

    def mid(name: str) -> float:
        return median(row[name] for row in steps)

    parts = {
        "dense BF16": (2.0 * fp8, 2.0 * bf16),
        "dense FP8": (float(dense), 2.0 * bf16),
        "verl's places and BF16 values": (mid("verl_fp8_bytes"), mid("verl_bytes") - mid("verl_fp8_bytes")),
        "fp8plan's patches": (mid("fp8_bytes"), mid("bf16_bytes")),
        "the entropy of what changed": (mid("fp8_entropy_bits") / 8, None),
    }
    cells = [
        [name, mb(own), f"{own / fp8:.2g}", f"{dense / own:.3g}", "-" if rest is None else mb(rest)]
        for name, (own, rest) in parts.items()
    ]
    heads = [f"sync, {len(steps)} steps", "linears", "byte a weight", "times fewer than dense FP8", "other tensors"]
    return markdown.table(heads, cells)


def _key(row: Row) -> tuple[str, str, str, float]:
    way = "nccl" if row.get("nccl") else row["trainer"]
    return row["model"], way, row["what"], row.get("rate") or 0.0


def gpu_syncs() -> dict[tuple[str, str, str, float], Row]:
    """Syncs on GPUs: bytes, seconds of a sync and, apart from it, of quantising or of the search for changes.

    By model, GPU of the trainer or "nccl", what was sent, and size of the step. Seconds are the least of four, as other
    work had the other CPU cores. The first sync of each, which compiles kernels, is left out.
    """
    logged = defaultdict(list)
    for row in read("gpu"):
        if row["what"] in ("bf16", "fp8", "delta") and row["repeat"] > 0:
            logged[_key(row)].append(row)
    return {
        key: {
            "bytes": median(row["bytes"] for row in some),
            "before_s": min(row.get("quantise_s", row.get("encode_s", 0.0)) for row in some),
            "wall_s": min(row["wall_s"] for row in some),
        }
        for key, some in logged.items()
    }


def fitted() -> tuple[float, float, float]:
    """Fit the planner's seconds of a patched sync: for each BF16 byte of the trainer, each matrix and each patch byte.

    Non-negative least squares of the relative errors, over the syncs within one GPU.
    """
    rows, seconds = [], []
    for (model, way, what, _), row in gpu_syncs().items():
        if way == "cuda:0" and what == "delta":
            matrices = rank_matrices(ModelShape.from_hf(model), EngineLimits())
            elements = sum(number * matrix.elements for matrix, number in matrices)
            rows.append([BF16_BYTES * elements, sum(number for _, number in matrices), row["bytes"]])
            seconds.append(row["wall_s"])
    features, units = np.array(rows), np.array([1e-12, 1e-6, 1e-9])  # of about the size of the results
    solution, _ = nnls(features * units / np.array(seconds)[:, None], np.ones(len(seconds)))
    byte, matrix, patch_byte = (solution * units).tolist()
    return byte, matrix, patch_byte


MEASURED_WITH: Final = "0.26.0"
LINKS: Final = ("1Gb/s", "5Gb/s", "25Gb/s", "100Gb/s", "400Gb/s", "3.2Tb/s")


def _planned(model: str, link: str, nbytes: float) -> dict[str, float]:
    """Return the planned seconds of each mode, at the learning rate whose patches have that size."""
    gpu = find_gpu("h200")
    profile = load_profile(gpu, MEASURED_WITH)[0]
    step = StepModel(ModelShape.from_hf(model), gpu, PRESETS["fp8_block"], EngineLimits(), profile)

    def costs(rate: float) -> dict[str, SyncCost]:
        return {cost.mode: cost for cost in sync_costs(step, WeightSync(link, rate))}

    exponent = brentq(lambda exponent: costs(10**exponent)[Mode.DELTA].bytes - nbytes, -9, -3)
    return {mode: cost.seconds for mode, cost in costs(10**exponent).items()}


class Modes(NamedTuple):
    """Modes over a link: the planned seconds, and the measured ones of both sides with the link's computed ones."""

    planned: dict[str, float]
    measured: dict[str, float]

    @property
    def right(self) -> bool:
        """True if the planned mode is the measured one, or at most a tenth slower."""
        best = min(self.planned, key=self.planned.__getitem__)
        return self.measured[best] <= 1.1 * min(self.measured.values())


def planned_links(model: str, rate: float) -> dict[str, Modes]:
    """The modes over six links, for syncs within one GPU of steps of that size."""
    syncs = gpu_syncs()
    sizes = {Mode.DENSE_BF16: ("bf16", 0.0), Mode.DENSE_FP8: ("fp8", 0.0), Mode.DELTA: ("delta", rate)}
    rows = {mode: syncs[model, "cuda:0", *key] for mode, key in sizes.items()}
    quantise = rows[Mode.DENSE_FP8]["before_s"]  # a sync of patches quantises, too, and BF16 is quantised by the engine
    made = {}
    for link in LINKS:
        own = {mode: row["wall_s"] + (quantise if mode == Mode.DENSE_FP8 else 0.0) for mode, row in rows.items()}
        measured = {mode: own[mode] + row["bytes"] / WeightSync(link).bandwidth for mode, row in rows.items()}
        made[link] = Modes(_planned(model, link, rows[Mode.DELTA]["bytes"]), measured)
    return made


def link_modes() -> str:
    """The mode that a plan names on six links, beside the measured seconds."""
    cells = []
    for model in ("Qwen/Qwen3-8B", "fp8plan/moe-7b"):
        for link, modes in planned_links(model, 3e-7).items():
            best = min(modes.planned, key=modes.planned.__getitem__)
            seconds = [f"{modes.measured[mode]:.2f} ({modes.planned[mode]:.2f})" for mode in modes.measured]
            cells.append([model, link, *seconds, best, "yes" if modes.right else "no"])
    names = ["dense BF16", "dense FP8", "delta"]
    heads = ["model", "link", *(f"{name}, s (planned)" for name in names), "the plan names", "right"]
    return markdown.table(heads, cells)


def tables() -> dict[str, str]:
    """The tables of the page, by the name of their block."""
    return {"bytes of a step": steps(), "modes over links": link_modes()}


if __name__ == "__main__":
    print("fitted: {:.3g} s for a BF16 byte, {:.3g} for a matrix, {:.3g} for a patch's byte".format(*fitted()))
