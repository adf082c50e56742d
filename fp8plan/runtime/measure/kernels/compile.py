"""Compile the FP8 GEMM kernels of several engines at once, so that the engines find them on the disk.

    python -m fp8plan.runtime.measure.kernels.compile --models A B@2 --processes 12        B@2: B on two GPUs

An engine compiles DeepGEMM's kernels one after the other at its start, for minutes. Here each process takes a share of
the layers. The caches are those that VLLM_CACHE_ROOT and TRTLLM_DG_CACHE_DIR name.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context

from fp8plan.errors import Fp8PlanError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.cost.gemm import rows_of_every_kernel
from fp8plan.model.hardware import find_gpu
from fp8plan.runtime.measure.calibrate import compilers, note
from fp8plan.runtime.measure.kernels.sweep import Point

FEW_ROWS = (1, 8, 16, 31)  # FlashInfer takes over below 32 rows
LARGEST_SHARE = 3  # kernels one task compiles, so that the processes end at about the same time

Task = tuple[int, int, tuple[int, ...]]  # n, k, rows


def main(words: Sequence[str] | None = None) -> int:
    """Entry point. 0: every kernel ran; 1: some did not, and an engine compiles them itself; 2: bad input."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", required=True, help="hub ids or folders; NAME@2: one rank of two")
    parser.add_argument("--processes", type=int, help="each takes some GB of the GPU; default: as the machine allows")
    parser.add_argument("--gpu", default="auto", help="of this machine")
    parser.add_argument("--rows", type=int, default=16384, help="most tokens of an engine's step")
    options = parser.parse_args(words)
    try:
        card = find_gpu(options.gpu)
    except Fp8PlanError as error:
        note(f"{parser.prog}: {error}")
        return 2
    work = tasks(options.models, options.rows, card.sm_count)
    note(f"compiling {sum(len(rows) for *_, rows in work)} FP8 GEMM kernels")
    try:
        with ProcessPoolExecutor(options.processes or compilers(card), get_context("spawn")) as pool:
            failures = [text for text in pool.map(run, work) if text]
    except BrokenProcessPool:
        note("a process was killed, probably for memory; engines compile the rest; allowed: fewer --processes")
        return 1
    note(f"compiled; {len(failures)} of {len(work)} tasks failed")
    for failure in failures[:5]:
        note(failure)
    return 1 if failures else 0


def tasks(models: Iterable[str], most_rows: int, sm_count: int) -> list[Task]:
    """Layers of one rank with a few rows each; together every kernel of all models, each once.

    A model that fp8plan cannot read has none, and a note says so.
    """
    shapes: set[tuple[int, int]] = set()
    for text in models:
        model, ranks = re.fullmatch(r"(.+?)(?:@(\d+))?", text).groups()  # type: ignore[union-attr]
        try:
            linears = ModelShape.from_hf(model).linears(int(ranks or 1))
        except Fp8PlanError as error:
            note(f"no kernels of {model} are compiled: {error}")
            continue
        in_blocks = (linear for linear in linears if linear.quantised)
        shapes |= {(linear.n, linear.k) for linear in in_blocks if linear.n % 64 == 0 and linear.k % 128 == 0}
    work: list[Task] = []
    for n, k in sorted(shapes):
        rows = [m for m in rows_of_every_kernel([(n, k)], most_rows, sm_count) if m >= max(FEW_ROWS)]
        rows += FEW_ROWS
        parts = max(1, len(rows) // LARGEST_SHARE)
        work += [(n, k, tuple(rows[i::parts])) for i in range(parts)]
    return work


def run(task: Task) -> str | None:
    """Run each kernel of a task once. Return the failure's text."""
    from fp8plan.runtime.measure.kernels.gemm import Bench, model_config

    n, k, rows = task
    try:
        import torch

        with model_config():
            bench = Bench()
            for m in rows:
                bench.work(Point("linear.fp8_block", {"m": m, "n": n, "k": k})).calls[0]()
                torch.cuda.synchronize()
    except Exception as error:
        return f"{task}: {type(error).__name__}: {error}"[:300]
    finally:
        with suppress(Exception):
            torch.cuda.empty_cache()
    return None


if __name__ == "__main__":
    sys.exit(main())
