"""Routed experts: a grouped GEMM over the experts that a step's tokens hit.

A token picks k of E experts without replacement, so it misses a given expert with probability 1 - k/E. For m
independent tokens and even routing, E (1 - (1 - k/E)^m) experts are hit in expectation. Real routing is skewed: it hits
fewer at small m, and waits longer for the busiest expert at large m. The sd of the profile's coefficients covers both.
Around the two GEMMs other kernels gather, quantise, activate, write and sum the routed activations, one after the
other. They count as `activation_passes` over these. Biases of experts are not modelled.

Tensor parallelism splits the intermediate size. With expert parallelism each of R ranks has E/R whole experts, and all
wait for the busiest. All ranks have all tokens, as without it. So nothing else is exchanged (use_all2all_kernels of
FusedMoEParallelConfig is false if data_parallel_size is 1). Its kernels are in no fit
(benchmarks/expert_parallel.py compares them with AIConfigurator's timings).
The load of a rank (rows, or experts hit) is a sum over its experts. All experts are alike, so any two of these sums
have the same covariance. If they are nearly normal, the largest of R is expected at

    mean + sqrt(variance - covariance) * the expected largest of R standard normal variables,

with the exact variance and covariance of even routing. For n rows on R ranks, n >> R log R, that is n/R + O(sqrt(n/R
log R)), as in Raab and Steger, "Balls into bins: a simple and tight analysis" (RANDOM 1998).
"""

from __future__ import annotations

from functools import cache
from math import erf, sqrt

import numpy as np

from fp8plan.model.architecture import Experts
from fp8plan.model.cost.base import Array, Cost, constant, p_norm, times, traffic
from fp8plan.model.cost.gemm import peak_flops
from fp8plan.model.hardware import Gpu
from fp8plan.model.precision import BF16_BYTES, Precision
from fp8plan.model.profile.profile import Profile


def distinct_experts(m: Array, experts: Experts) -> Array:
    """The expected number of experts that m tokens read under even routing; shape of m."""
    return np.asarray(experts.num_experts * (1 - _missed(m, experts)))


def busiest_experts(m: Array, experts: Experts, ranks: int, hit: Array | None = None) -> Array:
    """The expected number of experts that m tokens hit on the busiest rank; shape of m.

    hit: the number hit on all ranks; None: as under even routing
    """
    local, every, k = experts.most_on_a_rank(ranks), experts.num_experts, experts.experts_per_token
    if hit is None:
        missed = _missed(m, experts)
        both_missed = np.power(max(0.0, (1 - k / every) * (1 - k / max(1, every - 1))), m.astype(float))
        share, spread = 1 - missed, missed - both_missed  # variance less covariance of two experts
    else:
        share = hit / every
        spread = share * (1 - share) * every / max(1, every - 1)
    return np.minimum(local, _busiest(local, ranks, share, spread))


def busiest_rows(m: Array, experts: Experts, ranks: int) -> Array:
    """The expected number of rows that m tokens send to the busiest rank, shape of m."""
    local, every, k = experts.most_on_a_rank(ranks), experts.num_experts, experts.experts_per_token
    spread = m * (k / every * (every - k) / max(1, every - 1))
    return np.minimum(m * float(min(k, local)), _busiest(local, ranks, m * (k / every), spread))


def _busiest(local: int, ranks: int, mean: Array, spread: Array) -> Array:
    """The expected largest of `ranks` sums over `local` experts each.

    mean:   mean of one expert's summand
    spread: variance of one expert's summand less the covariance of two
    """
    return np.asarray(local * mean + largest_normal(ranks) * np.sqrt(local * spread))


@cache
def largest_normal(count: int) -> float:
    """The expected largest of `count` independent standard normal variables."""
    grid = np.linspace(-10.0, 10.0, 8001)
    below = np.array([0.5 * (1 + erf(value / sqrt(2))) for value in grid]) ** count
    # E = integral of 1 - F over the positive numbers, less that of F over the negative ones.
    return float(np.sum(np.where(grid >= 0, 1 - below, -below)) * (grid[1] - grid[0]) - 0.5 * (grid[1] - grid[0]))


def _missed(m: Array, experts: Experts) -> Array:
    """The probability that m tokens miss a given expert, shape of m."""
    return np.asarray(np.power(1 - experts.experts_per_token / experts.num_experts, m.astype(float)))


TILE_ROWS = 16  # rows of the smallest tile in vLLM's Triton kernel, which uses larger tiles if an expert fills them
# Block FP8 without a tuned configuration uses the larger tile above this number of tokens, filled or not
# (get_default_config in fused_moe.py). In BF16 the tensor cores keep up with memory in any tile. With thousands of
# tokens the untuned kernel is slower (`untuned_compute_efficiency`).
UNTUNED_TILE_ROWS, UNTUNED_TOKENS = 64, 64


def padded_rows(routed: Array, hit: Array, tile: float | Array = TILE_ROWS) -> Array:
    """Rows that the tensor cores compute for `routed` rows on `hit` experts, in whole tiles of each expert.

    tile: rows of one tile

    Loads differ, so each expert's last tile is half full on average. Each has at least one tile.
    """
    return np.asarray(np.maximum(hit * tile, routed + hit * ((tile - 1) / 2)))


def tile_rows(m: Array, on_rank: int, inner: int, precision: Precision, gpu: Gpu) -> Array:
    """Rows of the smallest tile of `on_rank` experts of width `inner` at m tokens, shape of m."""
    fp8 = precision.weights != "bf16"
    larger = fp8 and not gpu.has_tuned_experts(on_rank, inner, fp8)
    return np.where(larger & (m > UNTUNED_TOKENS), float(UNTUNED_TILE_ROWS), float(TILE_ROWS))


def expert_flops(experts: Experts, hidden: int, slices: int) -> int:
    """FLOPs of one token through one expert on one rank, without padding."""
    return 2 * (2 + experts.gated) * hidden * (experts.intermediate_size // slices)


def skips_other_rows(gpu: Gpu) -> bool:
    """True if the kernel of a plan with expert parallelism activates only the rows of its own experts.

    Triton's kernel writes zeros for other ranks' rows, and activates them too (write_zeros_to_output in fused_moe.py).
    On Hopper a plan asks for it (`moe_backend`). FlashInfer's kernels, which Blackwell has, skip these rows
    (oracle/fp8.py and unquantized.py).
    """
    return gpu.is_blackwell_data_center


def moe_cost(
    m: Array,
    experts: Experts,
    hidden: int,
    precision: Precision,
    tensor_parallel: int,
    gpu: Gpu,
    profile: Profile,
    hit: Array | None = None,
    ranks: int = 1,
) -> Cost:
    """Seconds of routing, permuting and the grouped GEMMs of one MoE layer at m tokens, shape (steps,).

    hidden: the model's width
    hit:    distinct experts that the tokens of each step go to; None: as under even routing
    ranks:  GPUs that share whole experts: tensor_parallel with expert parallelism; 1: each has slices of all
    """
    slices, precision = tensor_parallel // ranks, experts.run_in(precision)
    dtype = precision.gemm_dtype
    parts = ("bandwidth_efficiency", "compute_efficiency", "launch_seconds", "activation_passes")
    hbm, math, launch, passes = (f"moe.{dtype}.{x}" for x in parts)
    untuned = f"moe.{dtype}.untuned_compute_efficiency"
    routed = computed = m * float(experts.experts_per_token)
    if ranks > 1:
        hit, computed = busiest_experts(m, experts, ranks, hit), busiest_rows(m, experts, ranks)
    elif hit is None:
        hit = distinct_experts(m, experts)
    first, _ = experts.stored_linears(hidden, precision, slices)
    width, inner = first.k, first.n // (1 + experts.gated)
    read = hit * experts.stored_bytes(hidden, precision, slices)
    matrices = 2 + experts.gated
    on_rank = experts.most_on_a_rank(ranks)
    if untuned in profile.coefficients and not gpu.has_tuned_experts(on_rank, inner, precision.weights != "bf16"):
        math = untuned
    tile = tile_rows(m, on_rank, inner, precision, gpu)
    flops = padded_rows(computed, hit, tile) * (2 * matrices * width * inner)
    grouped = p_norm(
        2,
        traffic(read, gpu.memory_bandwidth, profile.named(hbm)),
        traffic(flops, peak_flops(gpu, dtype), profile.named(math)),
    )
    activated = computed if skips_other_rows(gpu) else routed
    once = (routed * (2 * width) + activated * (matrices * inner)) * BF16_BYTES / gpu.memory_bandwidth
    around = times(once, *profile.named(passes))
    total = constant(*profile.named(launch), m) + grouped + around
    if ranks > 1:
        return total  # no timing covers a rank's share of the experts
    sizes = experts.num_experts, experts.experts_per_token, hidden, experts.intermediate_size // slices
    return total.scaled(profile.layer_factor(f"moe.{dtype}", sizes, m))
