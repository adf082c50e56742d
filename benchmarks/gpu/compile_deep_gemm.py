"""Compile the DeepGEMM kernels of several models at once, so that their engines find them on the disk.

    python -m benchmarks.gpu.compile_deep_gemm --models A B@2 ... --processes 28        B@2: B on two GPUs

An engine compiles them one after the other at its start, for minutes. Here each process takes a share of the layers.
The caches are those that VLLM_CACHE_ROOT and TRTLLM_DG_CACHE_DIR name.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing import get_context

from fp8plan.model.architecture import ModelShape
from fp8plan.model.cost.gemm import rows_of_every_kernel
from fp8plan.model.hardware import find_gpu

MOST_ROWS, FEW_ROWS = 16384, (1, 8, 16, 31)  # the few are FlashInfer's: it takes over below 32 rows
LARGEST_SHARE = 3  # kernels one task compiles, so that the processes end at about the same time

Task = tuple[int, int, tuple[int, ...]]  # n, k, rows


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--processes", type=int, default=8)
    given = parser.parse_args(words)
    work, begun = tasks(given.models), time.monotonic()
    print(f"{len(work)} tasks, {sum(len(rows) for *_, rows in work)} kernels", flush=True)
    with get_context("spawn").Pool(given.processes) as pool:
        failed = [text for text in pool.imap_unordered(run, work) if text]
    print(f"done in {time.monotonic() - begun:.0f} s, {len(failed)} failed", *failed[:5], sep="\n", flush=True)


def tasks(models: Iterable[str]) -> list[Task]:
    """Layers of one rank with a few rows each; together every kernel of all models, each once."""
    shapes = {
        (linear.n, linear.k)
        for model, _, ranks in (text.partition("@") for text in models)
        for linear in ModelShape.from_hf(model).linears(int(ranks or 1))
        if linear.quantised and linear.n % 64 == 0 and linear.k % 128 == 0
    }
    found: list[Task] = []
    for n, k in sorted(shapes):
        rows = rows_of_every_kernel([(n, k)], MOST_ROWS, find_gpu("h200").sm_count)
        rows = [*(m for m in rows if m >= max(FEW_ROWS)), *FEW_ROWS]
        parts = max(1, len(rows) // LARGEST_SHARE)
        found += [(n, k, tuple(rows[i::parts])) for i in range(parts)]
    return found


def run(task: Task) -> str | None:
    """Run each kernel of a task once. Returns what went wrong."""
    from fp8plan.runtime.measure.kernels.gemm import Bench, model_config
    from fp8plan.runtime.measure.kernels.sweep import Point

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
