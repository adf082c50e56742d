"""Time linears of FP8 checkpoints without blocks as vLLM runs them, and compare the cost model with the timings.

    python -m benchmarks.gpu.fp8_linears OUTPUT.jsonl                 on a GPU with vLLM: time every point
    python -m benchmarks.gpu.fp8_linears --compare OUTPUT.jsonl       anywhere: the model's errors, as a table

A timing is one linear with BF16 in and out: vLLM's own quantisation of its input, then CUTLASS's GEMM. `tensor` has one
scale for each matrix, `channel` one for each row of the weights and each token. Weights are cold, activations warm. No
profile has seen these timings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.tables import markdown
from fp8plan import jsonl
from fp8plan.model.architecture import Linear
from fp8plan.model.cost.gemm import gemm_cost, quantise_cost
from fp8plan.model.hardware import find_gpu
from fp8plan.model.precision import find_precision
from fp8plan.model.profile.library import load_profile, with_kernels

# Layers of Qwen3-8B, Llama 3.1 8B and Qwen3-32B: outputs and inputs.
SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (28672, 4096), (51200, 5120), (5120, 25600))
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
RANGES = ((1, 64), (65, 512), (513, 4096))
KINDS = ("tensor", "channel")


def measure(output: Path) -> None:
    """Time every point on this machine's GPU. Appends rows to `output`."""
    import torch
    from vllm import _custom_ops as ops

    from fp8plan.runtime.measure.kernels import timing
    from fp8plan.runtime.measure.kernels.timing import l2_bytes, random_normal, random_pool
    from fp8plan.runtime.measure.machine import machine_facts

    facts, pool, l2 = machine_facts(), random_pool(10**9, "fp8", 0.3, 100.0), l2_bytes()
    for n, k in SHAPES:
        number = min(timing.copies(n * k, l2), len(pool) // (n * k))
        weights = [weight.t() for weight in pool[: number * n * k].view(number, n, k)]
        for kind in KINDS:
            scale = torch.full((1,) if kind == "tensor" else (1, n), 1e-3, device="cuda")
            for m in ROWS:
                x = random_normal(m, k)
                calls: list[Callable[[], Any]] = [partial(linear, ops, x, w, scale, kind) for w in weights]
                timed = timing.graph_seconds(calls)
                row = {"kind": kind, "m": m, "n": n, "k": k, "seconds": timed.seconds, "spread": timed.spread}
                with output.open("ab") as file:
                    file.write(jsonl.line(row | {"sm_mhz": timed.sm_mhz} | facts))
        print(f"{n} x {k}", file=sys.stderr)


def linear(ops: Any, x: Any, weight: Any, scale: Any, kind: str) -> Any:
    """One linear, as CutlassFP8ScaledMMLinearKernel runs it. x: [m, k] BF16; weight: [k, n] E4M3; returns [m, n]"""
    quantised, scales = ops.scaled_fp8_quant(x, None, use_per_token_if_dynamic=kind == "channel")
    return ops.cutlass_scaled_mm(quantised, weight, scales, scale, x.dtype)


def compare(path: Path, gpu: str) -> str:
    """A line for each kind and range of rows: how far off the model is, as Markdown."""
    card = find_gpu(gpu)
    profile = with_kernels(load_profile(card, "0.26.0")[0], card, ["gemm.fp8"])
    rows, lines = jsonl.rows(path), []
    for kind in KINDS:
        form = find_precision(f"fp8_{kind}")
        for low, high in RANGES:
            errors = []
            for row in (row for row in rows if row["kind"] == kind and low <= row["m"] <= high):
                m, part = np.array([row["m"]]), [Linear("measured", row["n"], row["k"], 1, True, False)]
                cost = gemm_cost(m, part, form, card, profile) + quantise_cost(m, part, form, card, profile)
                errors.append(float(cost.seconds[0]) / row["seconds"] - 1)
            off = (median(errors), median(map(abs, errors)), max(errors, key=abs))
            lines.append((kind, f"{low} to {high}", str(len(errors)), *(f"{x:+.1%}" for x in off)))
    return markdown.table(("scales", "rows", "timings", "median error", "median of its size", "worst"), lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--gpu", default="h200")
    options = parser.parse_args()
    if options.compare:
        print(compare(options.output, options.gpu))
    else:
        measure(options.output)
