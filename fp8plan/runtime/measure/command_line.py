"""The arguments that all sweeps take, and what they choose."""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from fp8plan.errors import ConfigError
from fp8plan.model.hardware import find_gpu
from fp8plan.runtime.measure.machine import gpu_facts

P = TypeVar("P", bound=Any)  # has a kernel


def arguments(name: str, doc: str | None, words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.{name}", description=(doc or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help=f"folder of {name}.jsonl, which is appended to")
    parser.add_argument("--grid", choices=("quick", "full"), default="full", help="quick: about two minutes")
    parser.add_argument("--seconds", type=float, help="stop after so many; the same command goes on")
    parser.add_argument("--gpu", default="auto", help="refuse to measure another one than this")
    parser.add_argument("--only", nargs="+", default=[], metavar="KERNEL", help="kernels as the rows name them")
    parser.add_argument(
        "--part", default="1/1", metavar="I/N", help="every N-th point from the I-th, to share the work"
    )
    parser.add_argument("--compile-in", type=int, default=0, metavar="N", help="first compile kernels, in N processes")
    parser.add_argument("--compile-only", action="store_true", help="run every point once, time and write nothing")
    parser.add_argument("--list", action="store_true", help="print the points that are left, and stop")
    return parser.parse_args(words)


def select(points: Sequence[P], only: Sequence[str], part: str) -> list[P]:
    """The points of some kernels (none named: all), and of those the part "I/N".

    Raises ConfigError for an unknown kernel or part.
    """
    known = sorted({point.kernel for point in points})
    if unknown := sorted(set(only) - set(known)):
        raise ConfigError(f"--only is {unknown[0]!r}; allowed: {', '.join(known)}")
    first, step = _part(part)
    return [point for point in points if not only or point.kernel in only][first - 1 :: step]


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    first, step = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= step:
        raise ConfigError(f"--part is {text!r}; allowed: I/N with I from 1 to N, as in 2/4")
    return first, step


def check_gpu(name: str) -> None:
    """Raise ConfigError if `name` is not this machine's GPU, or if there is none."""
    product = gpu_facts()["gpu_product"]
    if product is None:
        raise ConfigError("no NVIDIA GPU here, or none visible; measure on a machine that has one")
    if name != "auto" and not find_gpu(name).is_of(product):
        raise ConfigError(f"--gpu is {name} ({find_gpu(name).product}), this machine has {product}; type --gpu auto")


def compile_first(name: str, given: argparse.Namespace) -> None:
    """Run this command with --compile-only in `given.compile_in` processes, each on a share of the points.

    Compilers write to caches on the disk, which the timing process finds. What fails here fails again, and is noted,
    there. Each process takes the memory of a CUDA context, of the pools and of one point. Ends after half of
    --seconds, compiled or not.
    """
    same = [sys.executable, "-m", f"{__package__}.{name}", "--compile-only"]
    same += ["--output", str(given.output), "--grid", given.grid, *(["--only", *given.only] if given.only else [])]
    until = time.monotonic() + (given.seconds or math.inf) / 2  # the rest is for timing
    with open(given.output / f"{name}.compile.log", "ab") as log:
        children = [
            subprocess.Popen([*same, "--part", part], stdout=log, stderr=log)
            for part in shares(given.part, given.compile_in)
        ]
        try:
            while any(child.poll() is None for child in children) and time.monotonic() < until:
                time.sleep(0.2)
        finally:
            for child in children:
                child.kill()
                child.wait()


def shares(part: str, number: int) -> list[str]:
    """A part "I/N" split into `number` parts."""
    first, step = _part(part)
    return [f"{first + i * step}/{step * number}" for i in range(number)]
