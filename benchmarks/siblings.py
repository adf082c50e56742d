"""Single kernels that were timed on an H200 and an H100, beside the law for GPUs that share a profile.

    python -m benchmarks.siblings        prints the table

A row is a kernel, over the sizes of at least MANY rows that were timed on both. The figures are medians of its seconds
on the H100 over those on the H200. "By bandwidth" takes the H200's share of the datasheet's bandwidth for the H100's.
No fit has seen the H100's timings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from benchmarks.tables.markdown import table as markdown
from fp8plan.model.calibrate.kernel_rows import QUANTITIES, cost_alone, read_all
from fp8plan.model.hardware import find_gpu
from fp8plan.model.profile.library import load_profile, profiles_path

VERSION, MANY = "0.26.0", 256
H200, H100 = find_gpu("h200"), find_gpu("h100")
FOLDERS = {"h200": "h200_sxm/vllm-0.26.0/kernels", "h100": "h100_sxm/vllm-0.26.0/calibrate/kernels"}
FILES = ("attention", "elementwise", "gemm", "moe")
KERNELS = {
    "norm": "norm",
    "activation": "activation",
    "quantise_query.fp8": "quantise Q for an FP8 cache",
    "kv_write.bf16": "write to a BF16 cache",
    "kv_write.fp8": "write to an FP8 cache",
    "quantise": "quantise activations for FP8 weights",
    "sampling.v1": "sampling by model runner V1",
    "sampling.v2": "sampling by model runner V2",
    "linear.fp8_block": "a linear layer in FP8, with its quantisation",
    "moe.bf16": "experts in BF16",
    "moe.fp8_block": "experts in FP8",
}


def timings(gpu: str) -> pd.DataFrame:
    """The committed timings of a GPU."""
    folder = profiles_path() / FOLDERS[gpu]
    return read_all(folder / f"{name}.jsonl" for name in FILES)


def on_both(kernel: str, h100: pd.DataFrame, h200: pd.DataFrame) -> pd.DataFrame:
    """The H100's rows of a kernel with column `twin`, the H200's seconds at the same sizes."""
    shape, (rows_of, *_) = QUANTITIES[kernel.partition(".")[0]]
    sizes = [*shape, rows_of, *(["skew"] if kernel.startswith("moe") else [])]
    rows = h100[(h100.kernel == kernel) & (h100[rows_of] >= MANY)]
    twin = h200[h200.kernel == kernel].groupby(sizes).seconds.median().rename("twin")
    return rows.join(twin, on=sizes, how="inner").reset_index(drop=True)


def ratios() -> Iterator[tuple[str, int, Sequence[float]]]:
    """Kernel, number of sizes, and the median ratios: timed, by the law, and by bandwidth."""
    profile = replace(load_profile(H200, VERSION)[0], layers={})
    by_law, by_bandwidth = profile.of_sibling(H100.name), replace(profile, gpu=H100.name)
    h100, h200 = timings("h100"), timings("h200")
    for kernel in KERNELS:
        rows = on_both(kernel, h100, h200)
        twin = cost_alone(kernel, rows, H200, profile).seconds
        predicted = [cost_alone(kernel, rows, H100, each).seconds / twin for each in (by_law, by_bandwidth)]
        yield kernel, len(rows), [float(np.median(x)) for x in (rows.seconds / rows.twin, *predicted)]


def table() -> str:
    """The ratios in Markdown."""
    rows = [(KERNELS[kernel], str(sizes), *(f"{x:.2f}" for x in medians)) for kernel, sizes, medians in ratios()]
    return markdown(("kernel", "sizes", "H100 over H200, timed", "predicted", "by bandwidth"), rows)


if __name__ == "__main__":
    print(table())
