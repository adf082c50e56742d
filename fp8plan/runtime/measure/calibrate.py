"""All that a profile is fitted to, measured one after the other: what `fp8plan calibrate` runs before the fit.

Each measurement is a process of its own, which goes on where it was when it is started again: a kill loses the point
or the rollout in flight, and nothing else. FOLDER/kernels and FOLDER/steps hold what model.calibrate.profile_of reads.

Messages of a measurement to whoever waits for it.
"""

from __future__ import annotations

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
from fp8plan.model.architecture import ModelShape
from fp8plan.model.hardware import Gpu
from fp8plan.model.memory.plan import memory_plan
from fp8plan.model.precision import Precision, precision
from fp8plan.model.setup import default_limits


def note(text: str) -> None:
    """Print a line on stderr with the time of day, past a progress bar where there is one."""
    tqdm.write(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr)


PACKAGE = __spec__.parent
KERNELS = ("gemm", "attention", "moe", "elementwise", "power")
CELLS = {"quick": "quick.json", "full": "fit.json"}
CPU_CELLS = "cpu.json"  # whatever the grid: kernels are timed on GPUs only, so steps must say it all
LONGEST_ENGINE_S = 900
COMPILERS = min(6, (os.cpu_count() or 1) // 2)  # processes that compile kernels first; each takes some GB of the GPU


def measure(folder: Path, card: Gpu, grid: str) -> None:
    """Measure what `folder` does not have yet, on the first visible GPU or on the CPU. grid: "quick" or "full".

    Raises ConfigError when a measurement cannot be made here at all; single points that fail are noted and left out.
    """
    for name in () if card.is_cpu else KERNELS:
        words = "--output", str(folder / "kernels"), "--grid", grid, "--gpu", card.name, "--compile-in", str(COMPILERS)
        _run(f"kernels.{name}", *words, *_only(name, card, grid))
    steps = folder / "steps"
    steps.mkdir(parents=True, exist_ok=True)
    cells = Path(__file__).parent / "cells" / (CPU_CELLS if card.is_cpu else CELLS[grid])
    settings = cells_for(card, json.loads(cells.read_text(encoding="utf-8")))
    (steps / "cells.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    output = ("--output", str(steps / "rollouts.jsonl"), "--trace", "--timeout", str(LONGEST_ENGINE_S))
    _run("rollouts.run", "--cells", str(steps / "cells.json"), *output)


def _only(name: str, card: Gpu, grid: str) -> list[str]:
    """The option --only with the kernels of BF16, if the card has no FP8; else nothing."""
    if card.has_fp8:
        return []
    kernels = {point.kernel for point in import_module(f"{PACKAGE}.kernels.{name}").points(grid)}
    return ["--only", *sorted(x for x in kernels if "fp8" not in x and x != "quantise")]


def cells_for(card: Gpu, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The settings for `card`: only precisions it has, only models that fit it; what is left out is noted.

    Raises ConfigError if nothing fits.
    """
    kept = []
    for setting in settings:
        names = [x for x in setting["precisions"] if _timed(card, precision(x))]
        fitting = [x for x in names if _fits(card, setting, x)]
        if fitting:
            kept.append(setting | {"gpu": card.name, "precisions": fitting})
        if len(fitting) < len(setting["precisions"]):
            left = sorted(set(setting["precisions"]) - set(fitting))
            note(f"{setting['model']}: {', '.join(left)} left out on {card.name}")
    if not kept:
        raise ConfigError(
            f"none of the calibration's models fits {card.name}; measure your own: {PACKAGE}.rollouts.run"
        )
    return kept


def _timed(card: Gpu, preset: Precision) -> bool:
    """Tell whether the kernels of a precision are timed. FlashInfer's, which reads an FP8 KV cache on a GPU without FP8
    tensor cores, is not: measured rollouts alone cannot tell its coefficients."""
    return card.why_not(preset) is None and not (card.stores_fp8_only and preset.uses_fp8)


def _fits(card: Gpu, setting: dict[str, Any], name: str) -> bool:
    given = {key: setting[key] for key in ("gpu_memory_utilization", "max_model_len") if key in setting}
    limits = default_limits(card, setting["model"], **given)
    try:
        memory_plan(ModelShape.from_hf(setting["model"]), precision(name), card, limits, setting["max_model_len"])
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
