"""Single kernels that were timed on an H200 and an H100, beside the law for GPUs that share a profile.

    python -m benchmarks.siblings        prints the table of docs/evidence/accuracy.md, and kernels of one model

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
OF_MODEL = {  # kernels of Qwen3-30B-A3B's sizes
    "experts in BF16": ("moe.bf16", "experts == 128 and hidden == 2048 and inner == 768 and skew == 'even'"),
    "experts in FP8": ("moe.fp8_block", "experts == 128 and hidden == 2048 and inner == 768 and skew == 'even'"),
    "decode attention over a BF16 cache": ("attention_decode.bf16", "kv_heads == 4"),
    "decode attention over an FP8 cache": ("attention_decode.fp8", "kv_heads == 4"),
    "sampling by model runner V1": ("sampling.v1", "vocabulary == 151936"),
    "sampling by model runner V2": ("sampling.v2", "vocabulary == 151936"),
}
RANGES = {"1 to 32 requests": (1, 32), "64 to 192": (64, 192), "256 to 512": (256, 512), "1,024 and more": (1024, 8192)}
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


def on_both(kernel: str, here: pd.DataFrame, there: pd.DataFrame) -> pd.DataFrame:
    """The H100's rows of a kernel with column `twin`, the H200's seconds at the same sizes."""
    shape, (rows_of, *_) = QUANTITIES[kernel.partition(".")[0]]
    sizes = [*shape, rows_of, *(["skew"] if kernel.startswith("moe") else [])]
    rows = here[(here.kernel == kernel) & (here[rows_of] >= MANY)]
    twin = there[there.kernel == kernel].groupby(sizes).seconds.median().rename("twin")
    return rows.join(twin, on=sizes, how="inner").reset_index(drop=True)


def ratios() -> Iterator[tuple[str, int, Sequence[float]]]:
    """Kernel, number of sizes, and the median ratios: timed, by the law, and by bandwidth."""
    profile = replace(load_profile(H200, VERSION)[0], layers={})
    by_law, by_bandwidth = profile.of_sibling(H100.name), replace(profile, gpu=H100.name)
    here, there = timings("h100"), timings("h200")
    for kernel in KERNELS:
        rows = on_both(kernel, here, there)
        twin = cost_alone(kernel, rows, H200, profile).seconds
        predicted = [cost_alone(kernel, rows, H100, each).seconds / twin for each in (by_law, by_bandwidth)]
        yield kernel, len(rows), [float(np.median(x)) for x in (rows.seconds / rows.twin, *predicted)]


def table() -> str:
    """The ratios in Markdown."""
    rows = [(KERNELS[kernel], str(sizes), *(f"{x:.2f}" for x in medians)) for kernel, sizes, medians in ratios()]
    return markdown(("kernel", "sizes", "H100 over H200, timed", "predicted", "by bandwidth"), rows)


def of_model() -> str:
    """The predicted over the timed seconds of OF_MODEL's kernels on the H100, in Markdown: medians of ranges."""
    profile, timed, lines = load_profile(H100, VERSION)[0], timings("h100"), []
    for name, (kernel, sizes) in OF_MODEL.items():
        rows = timed[timed.kernel == kernel].query(sizes).reset_index(drop=True)
        _, (requests, *_) = QUANTITIES[kernel.partition(".")[0]]
        errors = cost_alone(kernel, rows, H100, profile).seconds / rows.seconds - 1
        medians = (errors[rows[requests].between(*ends)].median() for ends in RANGES.values())
        lines.append((name, *("" if np.isnan(x) else f"{x:+.0%}" for x in medians)))
    return markdown(("kernel", *RANGES), lines)


if __name__ == "__main__":
    print(f"{table()}\n\n{of_model()}")
