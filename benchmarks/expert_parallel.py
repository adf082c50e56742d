"""The cost model's experts with expert parallelism against AIConfigurator's timings of vLLM's kernels.

    python -m benchmarks.expert_parallel     prints a table, and the sentence of docs/limits.md

No fit has seen the timings with several ranks: profiles take from the tables only what ran without expert parallelism.
A row is a GPU, a dtype and a number of ranks. A figure is the median of log(model / timing) over the models of a range
of tokens. Routing follows AIConfigurator's power law of exponent 1.01; even routing is the model's. Of each range some
numbers of tokens are committed. On Hopper a plan asks for Triton's kernels, and the tables have FlashInfer's for FP8 on
several ranks, so these are left out.
"""

from __future__ import annotations

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

RESULTS = Path(__file__).parent / "results" / "expert_parallel.csv"
SHAPE = ("experts", "top_k", "hidden", "inner")
LIMITS = (0, 8, 64, 512, 4096, 16384)  # of the ranges of tokens
VERSION = "0.26.0"


def errors(timings: pd.DataFrame) -> pd.DataFrame:
    """The timings with column `error`, log(model / timing)."""
    judged = []
    for (gpu, dtype, ranks, *shape), rows in timings.groupby(["gpu", "dtype", "ranks", *SHAPE], sort=False):
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
    errors_by_range = medians()
    rows = [(*map(str, names), *map("{:+.0%}".format, row)) for names, row in errors_by_range.iterrows()]
    return markdown(("GPU", "dtype", "ranks", *(f"{name} tokens" for name in errors_by_range)), rows)


if __name__ == "__main__":
    print(f"{table()}\n\n{line()}")
