"""The cost model's experts with expert parallelism against AIConfigurator's timings of vLLM's kernels.

    pip install 'fp8plan[aic]'
    python -m benchmarks.expert_parallel [GPU ...]

No fit has seen these timings: profiles take from the tables only what ran without expert parallelism. A line is a dtype
and a number of ranks; a figure is the median of log(model / timing) over the models of a range of tokens. Routing
follows AIConfigurator's power law of exponent 1.01; even routing is the model's.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd

from fp8plan.model.architecture import Experts
from fp8plan.model.calibrate.aic import SYSTEMS, find_data
from fp8plan.model.cost.moe import moe_cost
from fp8plan.model.hardware import find_gpu
from fp8plan.model.precision import PRESETS
from fp8plan.model.profile.library import load_profile

GPUS = ("h100_sxm", "b200", "l40s")
DTYPES = {"bfloat16": "bf16", "fp8_block": "fp8_block"}
SHAPE = ["num_experts", "topk", "hidden_size", "inter_size"]
RANKS = (1, 2, 4, 8)
TOKENS = (0, 8, 64, 512, 4096, 16384)  # limits of the ranges


def timings(gpu: str, data: Path) -> pd.DataFrame:
    """The rows of the newest vLLM whose experts are whole."""
    folder = data / SYSTEMS.get(gpu, gpu) / "moe" / "vllm"
    table = pd.read_parquet(max(folder.glob("*/moe*.parquet")))
    kept = table.moe_dtype.isin(DTYPES) & (table.moe_tp_size == 1) & table.moe_ep_size.isin(RANKS)
    kept &= (table.distribution == "power_law_1.01") & (table.num_tokens <= TOKENS[-1]) & (table.num_experts >= 32)
    return table[kept]


def errors(gpu: str, table: pd.DataFrame) -> pd.DataFrame:
    """log(model / timing) of each row, beside its dtype, ranks and tokens."""
    card = find_gpu(gpu)
    profile, found = load_profile(card, "0.26.0", False)[0], []
    for (dtype, ranks, *shape), rows in table.groupby(["moe_dtype", "moe_ep_size", *SHAPE]):
        experts, hidden, tokens = Experts(shape[0], shape[1], shape[3]), shape[2], rows.num_tokens.to_numpy()
        seconds = moe_cost(tokens, experts, hidden, PRESETS[DTYPES[dtype]], ranks, card, profile, ranks=ranks).seconds
        error = np.log(seconds * 1e3 / rows.latency.to_numpy())  # theirs are milliseconds
        found.append(pd.DataFrame({"dtype": dtype, "ranks": ranks, "tokens": tokens, "error": error}))
    return pd.concat(found)


def main(names: list[str]) -> None:
    data, _ = find_data()
    for gpu in names or GPUS:
        found = errors(gpu, timings(gpu, data))
        ranges = pd.cut(found.tokens, TOKENS, labels=[f"{low + 1}-{high}" for low, high in pairwise(TOKENS)])
        table = found.pivot_table("error", ["dtype", "ranks"], ranges, "median", observed=True)
        print(f"{gpu}: {len(found)} timings\n{table.map('{:+.0%}'.format).to_string()}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
