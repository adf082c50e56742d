"""Linears of FP8 checkpoints without blocks, timed on an H100 with vLLM 0.26, beside the cost model.

A timing is one linear with BF16 in and out: vLLM's own quantisation of its input, then CUTLASS's GEMM. `tensor` has one
scale for each matrix, `channel` one for each row of the weights and each token. No profile has seen these timings.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.tables.markdown import table as markdown
from fp8plan import jsonl
from fp8plan.model.architecture import Linear
from fp8plan.model.cost.gemm import gemm_cost, quantise_cost
from fp8plan.model.hardware import find_gpu
from fp8plan.model.precision import find_precision
from fp8plan.model.profile.library import load_profile, with_kernels

RESULTS = Path(__file__).parents[1] / "results" / "fp8_linears_h100.jsonl"
RANGES = ((1, 64), (65, 512), (513, 4096))  # of rows
KINDS = ("tensor", "channel")


def table() -> str:
    """A line for each kind and range of rows: how far off the model is, as Markdown."""
    card = find_gpu("h100")
    profile = with_kernels(load_profile(card, "0.26.0")[0], card, ["gemm.fp8"])
    rows, lines = jsonl.rows(RESULTS), []
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
    return markdown(("scales", "rows", "timings", "median error", "median of its size", "worst"), lines)
