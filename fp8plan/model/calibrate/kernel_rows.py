"""Observations for `calibrate.fit` from timings of single kernels: the cost functions at the measured shapes.

A row is a timing of one kernel in one layer; `QUANTITIES` lists the columns of each kernel. Rows of one weight shape,
head layout or number of GPUs are one group: a cost function has the same error at every batch size of a shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import Experts, Linear
from fp8plan.model.architecture.parts import Attention
from fp8plan.model.calibrate.fit import Observations
from fp8plan.model.cost.attention import attention_cost, key_block, kv_write_cost, quantise_query_cost
from fp8plan.model.cost.base import Array, Cost, StepBatch
from fp8plan.model.cost.collective import all_reduce_cost
from fp8plan.model.cost.gemm import gemm_cost, quantise_cost
from fp8plan.model.cost.host import activation_cost, norm_cost, rotary_cost, sampler_cost
from fp8plan.model.cost.moe import moe_cost
from fp8plan.model.cost.power import CLOCK, sustained, with_sustained
from fp8plan.model.hardware import Gpu
from fp8plan.model.precision import BF16, FP8_BLOCK, FP8_KV
from fp8plan.model.profile.profile import Profile, layer_name

# Kernel, without its dtype -> (columns that name a group, columns that vary within it).
QUANTITIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gemm": (("n", "k"), ("m",)),
    "linear": (("n", "k"), ("m",)),  # the GEMM and the quantisation of its input
    "quantise": (("k",), ("m",)),
    "attention_decode": (("heads", "kv_heads", "head_dim"), ("batch", "context")),
    "attention_prefill": (("heads", "kv_heads", "head_dim"), ("chunks", "chunk", "context")),
    "moe": (("experts", "top_k", "hidden", "inner"), ("tokens",)),
    "kv_write": (("heads", "kv_heads", "head_dim"), ("tokens",)),  # BF16 or FP8 KV
    "quantise_query": (("heads", "kv_heads", "head_dim"), ("tokens",)),
    "norm": (("hidden",), ("m",)),
    "rotary": (("heads", "kv_heads", "head_dim"), ("m",)),
    "activation": (("inner",), ("m",)),
    "sampling": (("vocabulary",), ("m",)),  # by vLLM's model runner v1 or v2
    "all_reduce": (("gpus",), ("bytes",)),
}
PRECISIONS = {"bf16": BF16, "fp8_block": FP8_BLOCK, "fp8": FP8_KV}
# Kernels bound by math, and the least seconds of a timing in which the power cap lowers the clock.
MATH, LONG_S = ("gemm", "linear", "moe", "attention_prefill"), 4e-3
# Kernel of a layer -> the rows that time it; with fewer numbers of rows, the coefficients time it.
LAYERS = {f"gemm.{x}": f"{kind}.{x}" for x, kind in (("bf16", "gemm"), ("fp8_block", "linear"))}
LAYERS |= {f"moe.{x}": f"moe.{x}" for x in ("bf16", "fp8_block")}
FEWEST_ROWS = 8
RUNNERS = ("v1", "v2")  # vLLM's model runners, each with a sampler of its own


def read_all(paths: Iterable[Path]) -> pd.DataFrame:
    """The timings in several files; empty, with its columns, without any."""
    return pd.concat([pd.DataFrame({"kernel": [], "seconds": []}), *map(read_rows, paths)], ignore_index=True)


def read_rows(path: Path) -> pd.DataFrame:
    """The timings in a file, one JSON object a line, of the kernels that have a cost function.

    Rows whose mode is "eager" are left out. Samplers were timed in a CUDA graph, and launched one by one ("eager"). An
    engine launches them while the GPU is still busy with the layers, so a step takes the time of the graph.
    """
    rows = pd.read_json(path, lines=True)
    missing = {"kernel", "seconds"} - set(rows.columns)
    if missing:
        raise ConfigError(f"{path}: no field {min(missing)!r}; allowed: rows of kernel, seconds and its quantities")
    known = rows.kernel.str.partition(".")[0].isin(list(QUANTITIES)) & rows.seconds.notna()
    return rows[known & (rows["mode"] != "eager")] if "mode" in rows else rows[known]


def observe(rows: pd.DataFrame, card: Gpu) -> list[Observations]:
    """One `Observations` per kernel of `rows` (columns kernel, seconds and the kernel's quantities).

    Raises ConfigError for a kernel that has no cost function.
    """
    return [_observe(str(kernel), group, card) for kernel, group in rows.groupby("kernel")]


def cost_alone(kernel: str, rows: pd.DataFrame, card: Gpu, profile: Profile) -> Cost:
    """The cost of each row of `kernel` by `profile` as it is, with the layers that were timed."""
    rows = rows.reset_index(drop=True)
    shapes = rows.groupby(list(QUANTITIES[kernel.partition(".")[0]][0]), sort=False)
    return _scattered([(part.index.to_numpy(), _cost(kernel, part, card, profile)) for _, part in shapes], len(rows))


def layer_residuals(rows: pd.DataFrame, card: Gpu, profile: Profile) -> dict[str, dict[str, list[list[float]]]]:
    """The error that the coefficients of `profile` leave on each layer in `rows`, as the profile's field `layers`.

    A linear layer's quantisation is not part of its GEMM, and experts were timed for even routing.
    """
    layers: dict[str, dict[str, list[list[float]]]] = {}
    for kernel, name in LAYERS.items():
        timed = rows[rows.kernel == name]
        if kernel.startswith("moe") and "skew" in timed:
            timed = timed[timed["skew"] == "even"]
        if timed.empty:
            continue
        (observation,) = observe(timed, card)
        predicted, rest = observation.predict(profile).seconds, np.zeros(len(timed))
        if name.startswith("linear"):
            rest = observe(timed.assign(kernel="quantise"), card)[0].predict(profile).seconds
        missed = np.log(np.maximum(timed.seconds - rest, 0.1 * timed.seconds) / (predicted - rest))
        groups, quantity = QUANTITIES[name.partition(".")[0]]
        table = timed.assign(missed=missed).groupby([*groups, *quantity], sort=True).missed.mean().reset_index()
        shapes = {layer_name(shape): part for shape, part in table.groupby(list(groups)) if len(part) >= FEWEST_ROWS}
        layers[kernel] = {
            shape: [part[quantity[0]].tolist(), part.missed.round(4).tolist()] for shape, part in shapes.items()
        }
    return layers


def hull(rows: pd.DataFrame) -> dict[str, dict[str, tuple[float, float]]]:
    """Kernel -> quantity -> (lowest, highest) in `rows`, with StepModel's names of quantities.

    A GEMM timed alone and one timed with the quantisation of its input are one kernel here, and so are both samplers.
    """
    ranges: dict[str, dict[str, tuple[float, float]]] = {}
    names = rows.kernel.astype(str).str.replace(r"^linear\.", "gemm.", regex=True)
    names = names.str.replace(r"^sampling\..*", "sampling", regex=True)
    for kernel, group in rows.groupby(names):
        if quantities := _quantities(str(kernel), group):
            ranges[str(kernel)] = {name: (float(v.min()), float(v.max())) for name, v in quantities.items()}
    return ranges


def _quantities(kernel: str, rows: pd.DataFrame) -> dict[str, pd.Series]:
    if kernel.startswith("gemm"):
        return {name: rows[name] for name in ("m", "n", "k")}
    if kernel.startswith("attention_decode"):
        return {"decode_requests": rows.batch, "decode_kv_tokens": rows.batch * rows.context}
    if kernel.startswith("attention_prefill"):
        tokens, last = rows.chunks * rows.chunk, rows.context + rows.chunk
        pairs = tokens * (rows.context + (rows.chunk + 1) / 2)
        counts = {"prefill_tokens": tokens, "prefill_requests": rows.chunks, "prefill_kv_tokens": rows.chunks * last}
        return counts | {"prefill_pairs": pairs}
    if kernel == "sampling":
        return {"sampled_requests": rows.m}
    return {}


def _observe(kernel: str, rows: pd.DataFrame, card: Gpu) -> Observations:
    name, _, dtype = kernel.partition(".")
    if name not in QUANTITIES or dtype not in (RUNNERS if name == "sampling" else ("", *PRECISIONS)):
        raise ConfigError(f"kernel {kernel!r} has no cost function; allowed: {', '.join(QUANTITIES)}, with .DTYPE")
    rows = rows.reset_index(drop=True)
    shapes = rows.groupby(list(QUANTITIES[name][0]), sort=False)
    long = (rows.seconds > LONG_S) & (name in MATH)
    parts = [(part.index.to_numpy(), bool(slow), part) for _, shape in shapes for slow, part in shape.groupby(long)]

    def predict(profile: Profile) -> Cost:
        profile = replace(profile, layers={}, log_covariance={})  # by the coefficients alone
        slowed, costs = sustained(profile, CLOCK), []
        for index, slow, part in parts:
            cost = _cost(kernel, part, card, slowed if slow else profile)
            costs.append((index, with_sustained(cost, profile, CLOCK) if slow else cost))
        return _scattered(costs, len(rows))

    return Observations(kernel, rows.seconds.to_numpy(), shapes.ngroup().to_numpy(), predict)


def _scattered(parts: list[tuple[Array, Cost]], size: int) -> Cost:
    """One cost of shape (size,), put together from the costs of disjoint rows."""
    seconds = np.zeros(size)
    partials: dict[str, Array] = {}
    for index, cost in parts:
        seconds[index] = cost.seconds
        for name, values in cost.partials.items():
            partials.setdefault(name, np.zeros(size))[index] = values
    return Cost(seconds, partials)


def decode_batch(rows: pd.DataFrame) -> StepBatch:
    """The steps that rows of attention_decode time."""
    batch, none = rows.batch.to_numpy(), np.zeros(len(rows))
    return StepBatch(batch, batch * rows.context.to_numpy(), none, none, none, none, batch)


def prefill_batch(rows: pd.DataFrame) -> StepBatch:
    """The steps that rows of attention_prefill time."""
    chunks, chunk, context = (rows[name].to_numpy() for name in ("chunks", "chunk", "context"))
    tokens, none = chunks * chunk, np.zeros(len(rows))
    pairs = tokens * context + chunks * chunk * (chunk + 1) / 2
    return StepBatch(none, none, tokens, chunks, tokens + chunks * context, pairs, chunks)


def attention_of(rows: pd.DataFrame) -> Attention:
    """The heads of rows of one layout."""
    heads, kv_heads, head_dim = (_size(rows, name) for name in ("heads", "kv_heads", "head_dim"))
    return Attention(heads, kv_heads, head_dim)


def experts_of(rows: pd.DataFrame) -> tuple[Experts, int]:
    """The experts of rows of one layer, and the model's width."""
    experts, top_k, hidden, inner = (_size(rows, name) for name in ("experts", "top_k", "hidden", "inner"))
    return Experts(experts, top_k, inner), hidden


def _size(rows: pd.DataFrame, column: str) -> int:
    """The value of a column that is the same in all rows."""
    return int(rows[column].iloc[0])


def _cost(kernel: str, rows: pd.DataFrame, card: Gpu, profile: Profile) -> Cost:
    """The cost of rows of one kernel and one shape, by the cost function of the kernel."""
    name, _, dtype = kernel.partition(".")
    if name == "sampling":
        return sampler_cost(rows.m.to_numpy(), _size(rows, "vocabulary"), dtype, card, profile)
    precision: Any = PRECISIONS.get(dtype)  # None for a kernel without a dtype
    number = rows[QUANTITIES[name][1][0]].to_numpy()  # rows, tokens, requests or bytes
    match name:
        case "gemm" | "linear" | "quantise":
            n = 1 if name == "quantise" else _size(rows, "n")
            linear = [Linear("measured", n, _size(rows, "k"), 1, True, False)]
            if name == "quantise":
                return quantise_cost(number, linear, FP8_BLOCK, card, profile)
            gemm = gemm_cost(number, linear, precision, card, profile)
            return gemm if name == "gemm" else gemm + quantise_cost(number, linear, precision, card, profile)
        case "attention_decode":
            attention = attention_of(rows)
            block = key_block(attention.head_dim)
            edge = -rows.context.to_numpy() % block  # equal contexts; the others end anywhere in a block
            if "skew" in rows:
                edge = np.where(rows["skew"] == "even", edge, block / 2)
            return attention_cost(decode_batch(rows), attention, precision, 1, card, profile, edge)
        case "attention_prefill":
            return attention_cost(prefill_batch(rows), attention_of(rows), precision, 1, card, profile)
        case "moe":
            experts, hidden = experts_of(rows)
            # The experts that the timed tokens really hit.
            hit = rows.hit.to_numpy() if "hit" in rows and rows.hit.notna().all() else None
            return moe_cost(number, experts, hidden, precision, 1, card, profile, hit)
        case "kv_write":
            width = 2 * _size(rows, "kv_heads") * _size(rows, "head_dim")
            return kv_write_cost(number, width, precision, card, profile)
        case "quantise_query":
            return quantise_query_cost(number, _size(rows, "heads") * _size(rows, "head_dim"), card, profile)
        case "norm":
            return norm_cost(number, _size(rows, "hidden"), card, profile)
        case "rotary":
            return rotary_cost(number, attention_of(rows), 1, card, profile)
        case "activation":
            return activation_cost(number, _size(rows, "inner"), card, profile)
        case _:
            return all_reduce_cost(number, _size(rows, "gpus"), card, profile)
