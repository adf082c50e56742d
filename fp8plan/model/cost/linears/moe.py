"""Routed experts: a grouped GEMM over the experts that a step's tokens hit.

A token picks k of E experts without replacement, so it misses a given one with probability 1 - k/E; for m independent
tokens and even routing, E (1 - (1 - k/E)^m) experts are read in expectation. Real routing is skewed, which reads fewer
at small m (AIConfigurator's power-law tables: up to 40% less time at 16 tokens of Qwen3-30B-A3B) and waits longer for
the busiest expert at large m (up to 25% more); the sd of the profile's coefficients covers both.
Around the two GEMMs the routed activations are gathered, quantised, activated, written and summed by kernels of their
own, which wait for each other: `activation_passes` over them.
Tensor parallelism splits the intermediate size. Expert parallelism is not modelled, nor are the experts' biases.
"""

from __future__ import annotations

import numpy as np

from fp8plan.model.architecture import Experts
from fp8plan.model.cost.base import Array, Cost, constant, norm2, times, traffic
from fp8plan.model.cost.linears.gemm import peak_flops
from fp8plan.model.hardware import Gpu
from fp8plan.model.precision import BF16_BYTES, Precision
from fp8plan.model.profile.profile import Profile

# Rows of one expert's smallest tile in vLLM's Triton kernel; its larger tiles are chosen when they are filled.
# (AIConfigurator's tables: 15% error with 16, 16 to 18% with 64.)
TILE_ROWS = 16


def distinct_experts(m: Array, experts: Experts) -> Array:
    """The expected number of experts that m tokens read under even routing; shape of m."""
    miss = 1 - experts.experts_per_token / experts.num_experts
    return np.asarray(experts.num_experts * (1 - np.power(miss, m.astype(float))))


def padded_rows(routed: Array, hit: Array) -> Array:
    """Rows the tensor cores compute when `routed` rows fall on `hit` experts, each rounded up to whole tiles.

    Loads differ between experts, so the last tile of each is half full on average; none has less than one tile.
    """
    return np.asarray(np.maximum(hit * TILE_ROWS, routed + hit * ((TILE_ROWS - 1) / 2)))


def expert_bytes(experts: Experts, hidden: int, precision: Precision, tensor_parallel: int) -> int:
    """Weight bytes of one expert on one rank: gate and up as one matrix, and down. hidden: the model's width"""
    hidden, inner = stored_sizes(experts, hidden, precision, tensor_parallel)
    first = precision.linear_bytes((1 + experts.gated) * inner, hidden, True)
    return first + precision.linear_bytes(hidden, inner, True)


def stored_sizes(experts: Experts, hidden: int, precision: Precision, tensor_parallel: int) -> tuple[int, int]:
    """The model's width and one expert's on one rank, as the engine holds and computes them: vLLM pads both to whole
    scale blocks in FP8 (quantization/online/fp8.py, maybe_roundup_sizes).
    """
    inner = experts.intermediate_size // tensor_parallel
    if precision.weights == "bf16":
        return hidden, inner
    rows, columns = precision.weight_block
    return -(-hidden // columns) * columns, -(-inner // rows) * rows


def expert_flops(experts: Experts, hidden: int, tensor_parallel: int) -> int:
    """FLOPs of one token through one expert on one rank, without padding."""
    return 2 * (2 + experts.gated) * hidden * (experts.intermediate_size // tensor_parallel)


def moe_cost(
    m: Array,
    experts: Experts,
    hidden: int,
    precision: Precision,
    tensor_parallel: int,
    gpu: Gpu,
    profile: Profile,
    hit: Array | None = None,
) -> Cost:
    """Seconds of routing, permuting and the grouped GEMMs of one MoE layer at m tokens, shape (steps,).

    hidden: the model's width
    hit:    distinct experts the tokens of each step go to, where it is known; None: as under even routing
    """
    dtype = precision.gemm_dtype
    parts = ("bandwidth_efficiency", "compute_efficiency", "launch_seconds", "activation_passes")
    hbm, math, launch, passes = (f"moe.{dtype}.{x}" for x in parts)
    if hit is None:
        hit = distinct_experts(m, experts)
    routed = m * float(experts.experts_per_token)
    width, inner = stored_sizes(experts, hidden, precision, tensor_parallel)
    read = hit * expert_bytes(experts, hidden, precision, tensor_parallel)
    matrices = 2 + experts.gated
    flops = padded_rows(routed, hit) * (2 * matrices * width * inner)
    grouped = norm2(
        traffic(read, gpu.memory_bandwidth, profile.named(hbm)),
        traffic(flops, peak_flops(gpu, dtype), profile.named(math)),
    )
    once = routed * (2 * width + matrices * inner) * BF16_BYTES / gpu.memory_bandwidth
    around = times(once, *profile.named(passes))
    sizes = experts.num_experts, experts.experts_per_token, hidden, experts.intermediate_size // tensor_parallel
    factor = profile.layer_factor(f"moe.{dtype}", sizes, m)
    return (constant(*profile.named(launch), m) + grouped + around).scaled(factor)
