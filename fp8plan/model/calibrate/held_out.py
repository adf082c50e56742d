"""The shapes whose kernels are measured but never fitted: on them a profile shows how far off it is elsewhere.

The shapes were named before the first measurement. Other models' layers of the same size are the same shape and are
left out as well. So are, since they were seen, decode batches of unequal contexts, whose imbalance is not modelled.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.parts import Attention, Experts
from fp8plan.model.cost.base import Array

LINEARS = {"Qwen/Qwen3-14B": ("qkv_proj", "gate_up_proj", "down_proj"), "meta-llama/Llama-3.2-1B": ("down_proj",)}
ATTENTION = ("Qwen/Qwen3-14B", "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.2-1B")
UNEQUAL = "lognormal"
MOE = ("Qwen/Qwen3-235B-A22B",)


def is_held_out(rows: pd.DataFrame) -> Array:
    """True for each timing of a held-out shape, shape (rows,)."""
    found = np.zeros(len(rows), dtype=bool)
    for columns, shapes in _shapes().items():
        if set(columns) <= set(rows.columns):
            found |= pd.MultiIndex.from_frame(rows[list(columns)]).isin(shapes)
    if {"kernel", "skew"} <= set(rows.columns):
        found |= rows.kernel.str.startswith("attention_decode").to_numpy() & (rows["skew"] == UNEQUAL).to_numpy()
    return found


def _shapes() -> dict[tuple[str, ...], list[tuple[int, ...]]]:
    linears = {model: {x.name: (x.n, x.k) for x in ModelShape.from_hf(model).linears()} for model in LINEARS}
    heads = [part for model in ATTENTION for part, _ in ModelShape.from_hf(model).parts_of(Attention)]
    experts = [(shape, part) for shape in map(ModelShape.from_hf, MOE) for part, _ in shape.parts_of(Experts)]
    return {
        ("n", "k"): [linears[model][name] for model, names in LINEARS.items() for name in names],
        ("heads", "kv_heads", "head_dim"): [(x.heads, x.kv_heads, x.head_dim) for x in heads],
        ("experts", "top_k", "hidden", "inner"): [
            (e.num_experts, e.experts_per_token, shape.hidden_size, e.intermediate_size) for shape, e in experts
        ],
    }
