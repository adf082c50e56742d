"""The cost model's experts with expert parallelism against AIConfigurator's timings of vLLM's kernels.

    python -m benchmarks.expert_parallel             prints the table of docs/evidence/accuracy.md
    python -m benchmarks.expert_parallel --update    commits the timings again: pip install 'fp8plan[aic]'

No fit has seen the timings with several ranks: profiles take from the tables only what ran without expert parallelism.
A row is a GPU, a dtype and a number of ranks. A figure is the median of log(model / timing) over the models of a range
of tokens. Routing follows AIConfigurator's power law of exponent 1.01; even routing is the model's. Of each range some
numbers of tokens are committed. On Hopper a plan asks for Triton's kernels, and the tables have FlashInfer's for FP8 on
several ranks, so these are left out.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.tables.markdown import table as markdown
from fp8plan.model.architecture import Experts
from fp8plan.model.cost.moe import moe_cost
from fp8plan.model.hardware import find_gpu
from fp8plan.model.precision import PRESETS
from fp8plan.model.profile.library import load_profile
from tools.import_aic import SYSTEMS, find_data

RESULTS = Path(__file__).parent / "results" / "expert_parallel.csv"
GPUS, HOPPER = ("h100_sxm", "b200", "l40s"), ("h100_sxm",)
DTYPES = {"bfloat16": "bf16", "fp8_block": "fp8_block"}
NAMES = {
    "moe_dtype": "dtype",
    "moe_ep_size": "ranks",
    "num_experts": "experts",
    "topk": "top_k",
    "hidden_size": "hidden",
    "inter_size": "inner",
    "num_tokens": "tokens",
    "latency": "milliseconds",
}
RANKS = (1, 2, 4, 8)
LIMITS = (0, 8, 64, 512, 4096, 16384)  # of the ranges of tokens
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
VERSION = "0.26.0"


def from_package(gpu: str, data: Path) -> pd.DataFrame:
    """The rows of the newest vLLM whose experts are whole, by kernels that a plan asks for."""
    folder = data / SYSTEMS.get(gpu, gpu) / "moe" / "vllm"
    table = pd.read_parquet(max(folder.glob("*/moe*.parquet")))
    kept = table.moe_dtype.isin(DTYPES) & (table.moe_tp_size == 1) & table.moe_ep_size.isin(RANKS)
    kept &= (table.distribution == "power_law_1.01") & table.num_tokens.isin(TOKENS) & (table.num_experts >= 32)
    if gpu in HOPPER:
        kept &= table.kernel_source.str.contains("triton")
    rows = table[kept].rename(columns=NAMES)[list(NAMES.values())].sort_values(list(NAMES.values()))
    return rows.assign(gpu=gpu, dtype=rows.dtype.map(DTYPES))


def errors(timings: pd.DataFrame) -> pd.DataFrame:
    """The timings with column `error`, log(model / timing)."""
    judged = []
    for (gpu, dtype, ranks, *shape), rows in timings.groupby(list(["gpu", *NAMES.values()][:7]), sort=False):
        card, (experts, top_k, hidden, inner) = find_gpu(gpu), shape
        layer, precision, tokens = Experts(experts, top_k, inner), PRESETS[dtype], rows.tokens.to_numpy()
        profile = load_profile(card, VERSION)[0]
        seconds = moe_cost(tokens, layer, hidden, precision, ranks, card, profile, ranks=ranks).seconds
        judged.append(rows.assign(error=np.log(1e3 * seconds / rows.milliseconds)))
    return pd.concat(judged)


def medians() -> pd.DataFrame:
    """The median error of the committed timings: a row for a GPU, dtype and number of ranks, a column for a range."""
    judged = errors(pd.read_csv(RESULTS))
    names = [f"{low + 1:,}-{high:,}" for low, high in pairwise(LIMITS)]
    ranges = pd.cut(judged.tokens, LIMITS, labels=names)
    return judged.pivot_table("error", ["gpu", "dtype", "ranks"], ranges, "median", observed=True, sort=False)


def line() -> str:
    """The largest medians with several ranks, in a sentence of docs/limits.md."""
    shared = medians().query("ranks > 1").abs()
    few, *more = (float(shared[name].max()) for name in shared)
    return (
        f"From {LIMITS[1] + 1} tokens on, the medians of a GPU, dtype and number of ranks are off by at most "
        f"{max(more):.0%}, and up to {LIMITS[1]} tokens by {few:.0%}."
    )


def table() -> str:
    """The medians in Markdown."""
    found = medians()
    rows = [(*map(str, names), *map("{:+.0%}".format, row)) for names, row in found.iterrows()]
    return markdown(("GPU", "dtype", "ranks", *(f"{name} tokens" for name in found)), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the timings")
    if parser.parse_args().update:
        data, _ = find_data()
        rows = pd.concat([from_package(gpu, data) for gpu in GPUS])
        rows[["gpu", *NAMES.values()]].to_csv(RESULTS, index=False, float_format="%.6g")
    print(f"{table()}\n\n{line()}")


if __name__ == "__main__":
    main()
