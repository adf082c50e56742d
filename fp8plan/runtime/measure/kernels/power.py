"""Run kernels for seconds, each by itself, and read the GPU's power and clock meanwhile.

    python -m fp8plan.runtime.measure.kernels.power --output FOLDER [--grid quick|full] [--seconds N] [--compile-in 12]

A row of FOLDER/power.jsonl each: the kernels and sizes of gemm, attention, moe and elementwise beside this file, called
as there. `seconds` is of one call while the power limit holds, so it is no timing for a fit of kernels; `power_w` is
what fp8plan.model.calibrate.power is fitted to. Three seconds a point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from fp8plan.runtime.measure.grids.power import points
from fp8plan.runtime.measure.kernels import attention, elementwise, gemm, moe
from fp8plan.runtime.measure.kernels.gemm import model_config
from fp8plan.runtime.measure.kernels.sweep import Point, Prepare, Work, command, prepared
from fp8plan.runtime.measure.kernels.timing import sustained_seconds

BENCHES: dict[str, Callable[[], Prepare]] = {
    "gemm": cache(lambda: gemm.Bench().work),
    "attention": cache(lambda: attention.Bench().calls),
    "moe": cache(lambda: moe.Bench().work),
    "elementwise": lambda: elementwise.work,
}
FILES = {"gemm": "gemm", "quantise": "gemm", "attention_decode": "attention", "attention_prefill": "attention"}
FILES |= {"moe": "moe", "norm": "elementwise", "activation": "elementwise"}


def work(point: Point) -> Work:
    """The work of the script that times this kernel, timed for seconds."""
    bench = BENCHES[FILES[point.kernel.partition(".")[0]]]()
    return replace(prepared(point, bench), timer=sustained_seconds)


if __name__ == "__main__":
    compiled = ("gemm.fp8_block", "norm", "activation")
    raise SystemExit(command("power", __doc__, points, lambda: work, model_config, compiled=compiled))
