"""The measurements of `fp8plan calibrate`, one after the other, before the fit.

Each is a process of its own. A new start goes on: a kill loses only the point or rollout in flight.
model.calibrate.profile_of reads the results in FOLDER/kernels and FOLDER/steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fp8plan.errors import ConfigError, Fp8PlanError
from fp8plan.model.hardware import Gpu
from fp8plan.model.precision import Precision, find_precision
from fp8plan.model.setup import EngineSetup, default_limits

PACKAGE = __spec__.parent
KERNELS = ("gemm", "attention", "moe", "elementwise", "power")
CELLS = {"quick": "quick.json", "full": "fit.json"}
CPU_CELLS = "cpu.json"  # of each grid; kernels are for GPUs
LONGEST_ENGINE_S = 900
COMPILER_BYTES = 6e9  # of the GPU, for a process: a CUDA context, a pool of weights and one point. 13 fit on 80 GB


def note(text: str) -> None:
    """Print a line with the time of day on stderr, above a progress bar."""
    tqdm.write(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr)


def measure(folder: Path, card: Gpu, grid: str) -> None:
    """Make the measurements that `folder` lacks, on the first visible GPU or on the CPU. grid: a key of CELLS

    Raises ConfigError if a measurement cannot be made here at all. Single points that fail are noted and left out.
    """
    for name in () if card.is_cpu else KERNELS:
        words = "--output", str(folder / "kernels"), "--grid", grid, "--gpu", card.name
        _run(f"kernels.{name}", *words, "--compile", *_only(name, card, grid))
    steps = folder / "steps"
    steps.mkdir(parents=True, exist_ok=True)
    cells = Path(__file__).parent / "cells" / (CPU_CELLS if card.is_cpu else CELLS[grid])
    shipped = json.loads(cells.read_text(encoding="utf-8"))
    settings = cells_for(card, shipped)
    (steps / "cells.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    output = ("--output", str(steps / "rollouts.jsonl"), "--trace", "--timeout", str(LONGEST_ENGINE_S))
    _run("rollouts.run", "--cells", str(steps / "cells.json"), *output, *(() if card.is_cpu else ("--compile",)))


def add_compile(parser: argparse.ArgumentParser) -> None:
    """Add the option --compile [N] of a measurement. It is None without the option, and 0 without its number."""
    text = "first compile the FP8 kernels, in N processes; without N: in as many as the machine allows"
    parser.add_argument("--compile", nargs="?", type=int, const=0, metavar="N", help=text)


def compilers(card: Gpu) -> int:
    """Number of processes that compile kernels at once before a measurement, as this machine allows."""
    return max(1, min(len(os.sched_getaffinity(0)) - 2, int(card.memory_bytes / COMPILER_BYTES)))


def _only(name: str, card: Gpu, grid: str) -> list[str]:
    """The option --only, with the BF16 kernels, for a card without FP8; else none."""
    if card.has_fp8:
        return []
    kernels = {point.kernel for point in import_module(f"{PACKAGE}.kernels.{name}").points(grid)}
    return ["--only", *sorted(kernel for kernel in kernels if "fp8" not in kernel and kernel != "quantise")]


def cells_for(card: Gpu, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The settings for `card`, with the precisions that it has and the models that fit it. Notes name the others.

    Raises ConfigError if nothing fits.
    """
    kept = []
    for setting in settings:
        fitting = [name for name in setting["precisions"] if _fits(card, setting, find_precision(name))]
        if fitting:
            kept.append(setting | {"gpu": card.name, "precisions": fitting})
        if left := sorted(set(setting["precisions"]) - set(fitting)):
            note(f"{setting['model']}: {', '.join(left)} left out on {card.name}")
    if not kept:
        raise ConfigError(
            f"none of the calibration's models fits {card.name}; measure your own: {PACKAGE}.rollouts.run"
        )
    return kept


def _fits(card: Gpu, setting: dict[str, Any], preset: Precision) -> bool:
    """Tell whether the card has the precision's kernels, all of them timed, and memory for the model.

    FlashInfer's kernel for an FP8 KV cache on a GPU without FP8 tensor cores is not timed, and rollouts alone cannot
    tell its coefficients.
    """
    if card.why_not(preset) is not None or (card.stores_fp8_only and preset.uses_fp8):
        return False
    imposed = {key: setting[key] for key in ("gpu_memory_utilization", "max_model_len") if key in setting}
    limits = default_limits(card, setting["model"], **imposed)
    try:
        EngineSetup(setting["model"], card, preset, limits).memory(setting["max_model_len"])
    except Fp8PlanError:
        return False
    return True


def _run(module: str, *arguments: str) -> None:
    name = module.removeprefix("kernels.").removesuffix(".run")
    note(f"measuring: {name}")
    done = subprocess.run([sys.executable, "-m", f"{PACKAGE}.{module}", *arguments])
    if done.returncode == 1:
        note(f"{name}: something failed and is left out; the notes above say what")
    elif done.returncode:
        raise ConfigError(f"{name} could not be measured (exit status {done.returncode}); the notes above say why")
