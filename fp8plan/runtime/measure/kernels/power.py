"""Run kernels for seconds, each by itself, and read the GPU's power and clock.

    python -m fp8plan.runtime.measure.kernels.power --output FOLDER [--grid quick|full] [--seconds N] [--compile [N]]

Kernels of gemm, attention, moe and elementwise beside this file, a row of FOLDER/power.jsonl each, three seconds a
point. `seconds` is the time of one call under the power limit. It is no timing for a fit of kernels.
fp8plan.model.calibrate.power is fitted to `power_w`.

Layers are those of Qwen3-8B, experts those of Qwen3-30B-A3B. With few rows a kernel moves bytes, and with many it
multiplies. So the fit can tell both kinds of watts apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product

from fp8plan.runtime.measure.kernels import attention, elementwise, gemm, moe
from fp8plan.runtime.measure.kernels.gemm import model_config
from fp8plan.runtime.measure.kernels.sweep import Point, Prepare, Work, command
from fp8plan.runtime.measure.kernels.timing import sustained_seconds

MODEL, EXPERTS = "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"
LINEARS = ("gate_up_proj", "down_proj")
ROWS = {"quick": (64, 4096), "full": (64, 512, 2048, 16384)}
DECODE = {"quick": ((256, 512),), "full": ((512, 256), (128, 2048))}  # requests, tokens of each
PREFILL = {"quick": ((1, 4096),), "full": ((64, 256), (4, 4096))}  # prompts, tokens of each


def points(grid: str) -> list[Point]:
    """All points of the "quick" or the "full" grid."""
    return list(_points(grid))


def _points(grid: str) -> Iterator[Point]:
    rows, heads = ROWS[grid], attention.heads_of(MODEL)
    weights = gemm.weights_of({MODEL: LINEARS})
    for m, (n, k), kernel in product(rows, weights, ("gemm.bf16", "gemm.fp8_block")):
        yield Point(kernel, {"m": m, "n": n, "k": k})
    for (batch, context), kv in product(DECODE[grid], attention.KV_DTYPES):
        shape = {"batch": batch, "context": context, "skew": "even"} | heads
        yield Point(f"attention_decode.{kv}", shape | {"num_splits": attention.MAX_GRAPH_SPLITS})
    for (chunks, chunk), kv in product(PREFILL[grid], attention.KV_DTYPES):
        yield Point(
            f"attention_prefill.{kv}", {"chunks": chunks, "chunk": chunk, "context": 0} | heads | {"num_splits": 0}
        )
    experts = dict(zip(("experts", "top_k", "hidden", "inner"), moe.experts_of(EXPERTS), strict=True))
    for m, dtype in product(rows, moe.DTYPES):
        yield Point(f"moe.{dtype}", {"tokens": m} | experts | {"skew": "even"})
    hidden, inner = weights[1]
    for m in rows[1:]:
        yield Point("norm", {"m": m, "hidden": hidden})
        yield Point("activation", {"m": m, "inner": inner})
        yield Point("quantise", {"m": m, "k": inner})


BENCHES: dict[str, Callable[[], Prepare]] = {
    "gemm": cache(lambda: gemm.Bench().work),
    "attention": cache(lambda: attention.Bench().work),
    "moe": cache(lambda: moe.Bench().work),
    "elementwise": lambda: elementwise.work,
}
FILES = {"gemm": "gemm", "quantise": "gemm", "attention_decode": "attention", "attention_prefill": "attention"}
FILES |= {"moe": "moe", "norm": "elementwise", "activation": "elementwise"}


def work(point: Point) -> Work:
    """The work of the kernel's own script, timed for seconds."""
    bench = BENCHES[FILES[point.kernel.partition(".")[0]]]()
    return replace(bench(point), timer=sustained_seconds)


if __name__ == "__main__":
    compiled = ("gemm.fp8_block", "norm", "activation")
    raise SystemExit(command("power", __doc__, points, lambda: work, model_config, compiled=compiled))
