"""Compile the FP8 GEMM kernels of several engines at once, so that the engines find them on the disk.

    python -m fp8plan.runtime.measure.kernels.compile --models A B@2 --processes 12        B@2: B on two GPUs

An engine compiles DeepGEMM's kernels one after the other at its start, for minutes. Here each process takes a share of
them. The caches are those that VLLM_CACHE_ROOT and TRTLLM_DG_CACHE_DIR name.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence

from fp8plan.errors import Fp8PlanError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.cost.gemm import rows_of_every_kernel
from fp8plan.model.hardware import find_gpu
from fp8plan.runtime.measure.calibrate import compilers, note
from fp8plan.runtime.measure.kernels.sweep import Point, compile_here, run_shares, select

FEW_ROWS = (1, 8, 16, 31)  # FlashInfer takes over below 32 rows

Weight = tuple[int, int]  # n, k


def main(words: Sequence[str] | None = None) -> int:
    """Entry point. 0: every kernel ran; 1: some did not, and an engine compiles them itself; 2: bad input."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", required=True, help="hub ids or folders; NAME@2: one rank of two")
    parser.add_argument("--processes", type=int, help="each takes some GB of the GPU; default: as the machine allows")
    parser.add_argument("--gpu", default="auto", help="of this machine")
    parser.add_argument("--rows", type=int, default=16384, help="most tokens of an engine's step")
    parser.add_argument("--part", metavar="I/N", help="in this process, every N-th kernel from the I-th")
    options = parser.parse_args(words)
    try:
        card = find_gpu(options.gpu)
        models = weights_of(options.models)
        kernels = points(set().union(*models.values()), options.rows, card.sm_count)
        if options.part:
            return _compile(select(kernels, (), options.part))
    except Fp8PlanError as error:
        note(f"{parser.prog}: {error}")
        return 2
    if not kernels:
        return 0
    note(f"compiling {len(kernels)} FP8 GEMM kernels")
    same = [sys.executable, "-m", __spec__.name, "--models", *models, "--gpu", card.name, "--rows", str(options.rows)]
    if run_shares(same, min(options.processes or compilers(card), len(kernels))):
        return 0
    note("some kernels are not compiled, and engines compile them; if memory was short: fewer --processes")
    return 1


def weights_of(models: Iterable[str]) -> dict[str, set[Weight]]:
    """(n, k) of the layers of one rank, by model. A model that fp8plan cannot read is left out, and a note says so."""
    weights: dict[str, set[Weight]] = {}
    for text in models:
        model, ranks = re.fullmatch(r"(.+?)(?:@(\d+))?", text).groups()  # type: ignore[union-attr]
        try:
            linears = ModelShape.from_hf(model).linears(int(ranks or 1))
        except Fp8PlanError as error:
            note(f"no kernels of {model} are compiled: {error}")
            continue
        weights[text] = {(x.n, x.k) for x in linears if x.quantised and x.n % 64 == 0 and x.k % 128 == 0}
    return weights


def points(weights: Iterable[Weight], most_rows: int, sm_count: int) -> list[Point]:
    """Layers with a few rows each; together every kernel of all weights, each once."""
    kernels: list[Point] = []
    for n, k in sorted(weights):
        rows = [m for m in rows_of_every_kernel([(n, k)], most_rows, sm_count) if m >= max(FEW_ROWS)]
        kernels += [Point("linear.fp8_block", {"m": m, "n": n, "k": k}) for m in (*rows, *FEW_ROWS)]
    return kernels


def _compile(kernels: Sequence[Point]) -> int:
    from fp8plan.runtime.measure.kernels.gemm import Bench, model_config

    with model_config():
        return compile_here(kernels, Bench().work)


if __name__ == "__main__":
    sys.exit(main())
