"""Routed experts: a grouped GEMM over the experts that a step's tokens hit.

How many those are is in `routing`, for even routing. Real routing is skewed, which reads fewer at small m
(AIConfigurator's power-law tables: up to 40% less time at 16 tokens of Qwen3-30B-A3B) and waits longer for the busiest
expert at large m (up to 25% more); the sd of the profile's coefficients covers both.
Around the two GEMMs the routed activations are gathered, quantised, activated, written and summed by kernels of their
own, which wait for each other: `activation_passes` over them.
Tensor parallelism splits the intermediate size. With expert parallelism a rank has whole experts, and the layer lasts
as long as on the busiest rank. All ranks have all tokens, as without it (use_all2all_kernels of FusedMoEParallelConfig
is false where data_parallel_size is 1, in 0.26 and 0.30), so nothing else is exchanged. No fit has seen its kernels: a
decode step of Qwen3-Next on two H200s takes 12 to 16% longer, one that fills prompts 30% (profiles/h200_sxm, families).
`python -m benchmarks.expert_parallel` compares this with AIConfigurator's timings of them. The experts' biases are not
modelled.

How many experts a step's tokens hit, and how many of its rows fall on the GPU that gets the most of them.

A token picks k of E experts without replacement, so it misses a given one with probability 1 - k/E; for m independent
tokens and even routing, E (1 - (1 - k/E)^m) experts are hit in expectation.

With expert parallelism each of R ranks has E/R of the experts, and all wait for the busiest. What falls on a rank
(rows, or experts hit) is a sum over its experts. All experts are alike, so any two of these sums have the same
covariance, and where they are nearly normal the largest of R of them is expected at

    mean + sqrt(variance - covariance) * the expected largest of R standard normal variables,

with variance and covariance of the even routing above, which are exact. Of n rows on R ranks, n >> R log R, that is
n/R + O(sqrt(n/R log R)), as in Raab and Steger, "Balls into bins: a simple and tight analysis" (RANDOM 1998).
"""

from __future__ import annotations

from functools import cache
from math import erf, sqrt

import numpy as np

from fp8plan.model.architecture import Experts
from fp8plan.model.cost.base import Array, Cost, constant, norm2, times, traffic
from fp8plan.model.cost.gemm import peak_flops
from fp8plan.model.hardware import Gpu
from fp8plan.model.precision import BF16_BYTES, Precision
from fp8plan.model.profile.profile import Profile


def distinct_experts(m: Array, experts: Experts) -> Array:
    """The expected number of experts that m tokens read under even routing; shape of m."""
    return np.asarray(experts.num_experts * (1 - _missed(m, experts)))


def busiest_experts(m: Array, experts: Experts, ranks: int, hit: Array | None = None) -> Array:
    """The expected number of experts that m tokens hit on the busiest rank; shape of m.

    hit: how many they hit on all ranks, where it is known; None: as under even routing
    """
    mine, every, k = experts.most_on_a_rank(ranks), experts.num_experts, experts.experts_per_token
    if hit is None:
        missed = _missed(m, experts)
        both_missed = np.power(max(0.0, (1 - k / every) * (1 - k / max(1, every - 1))), m.astype(float))
        share, spread = 1 - missed, missed - both_missed  # variance less covariance of two experts
    else:
        share = hit / every
        spread = share * (1 - share) * every / max(1, every - 1)
    return np.minimum(mine, _busiest(mine, ranks, share, spread))


def busiest_rows(m: Array, experts: Experts, ranks: int) -> Array:
    """The expected number of rows that m tokens send to the busiest rank, shape of m."""
    mine, every, k = experts.most_on_a_rank(ranks), experts.num_experts, experts.experts_per_token
    spread = m * (k / every * (every - k) / max(1, every - 1))
    return np.minimum(m * float(min(k, mine)), _busiest(mine, ranks, m * (k / every), spread))


def _busiest(mine: int, ranks: int, mean: Array, spread: Array) -> Array:
    """The expected largest of `ranks` sums over `mine` experts each.

    mean:   of one expert
    spread: variance of one expert less the covariance of two
    """
    return np.asarray(mine * mean + largest_normal(ranks) * np.sqrt(mine * spread))


@cache
def largest_normal(count: int) -> float:
    """The expected largest of so many independent standard normal variables."""
    x = np.linspace(-10.0, 10.0, 8001)
    below = np.array([0.5 * (1 + erf(value / sqrt(2))) for value in x]) ** count
    # E = integral of 1 - F over the positive numbers, less that of F over the negative ones.
    return float(np.sum(np.where(x >= 0, 1 - below, -below)) * (x[1] - x[0]) - 0.5 * (x[1] - x[0]))


def _missed(m: Array, experts: Experts) -> Array:
    """The probability that m tokens miss a given expert, shape of m."""
    return np.asarray(np.power(1 - experts.experts_per_token / experts.num_experts, m.astype(float)))


# Rows of one expert's smallest tile in vLLM's Triton kernel; its larger tiles are chosen when they are filled.
# (AIConfigurator's tables: 15% error with 16, 16 to 18% with 64.)
TILE_ROWS = 16
# Block FP8 without a tuned configuration takes the larger tile above so many tokens, filled or not (get_default_config
# in fused_moe.py). 64 experts of 1,024, 8 a token, on an H200: 133 us with 64 tokens, 155 with 96. In BF16 the default
# grows as well, but the tensor cores keep up with memory: 222 and 223 us. With thousands of tokens they are slower than
# in a tuned kernel, `untuned_compute_efficiency` (AIConfigurator's tables of the H200: 0.64 of the peak, tuned 0.76).
UNTUNED_TILE_ROWS, UNTUNED_TOKENS = 64, 64

HOPPER, BLACKWELL = 9, 10  # the first number of the compute capability


def padded_rows(routed: Array, hit: Array, tile: float | Array = TILE_ROWS) -> Array:
    """Rows the tensor cores compute when `routed` rows fall on `hit` experts, each rounded up to whole tiles.

    tile: rows of one

    Loads differ between experts, so the last tile of each is half full on average; none has less than one tile.
    """
    return np.asarray(np.maximum(hit * tile, routed + hit * ((tile - 1) / 2)))


def tile_rows(m: Array, on_rank: int, inner: int, precision: Precision, gpu: Gpu) -> Array:
    """Rows of the smallest tile of `on_rank` experts of width `inner` at m tokens, shape of m."""
    larger = precision.weights != "bf16" and not is_tuned(on_rank, inner, precision, gpu)
    return np.where(larger & (m > UNTUNED_TOKENS), float(UNTUNED_TILE_ROWS), float(TILE_ROWS))


def is_tuned(on_rank: int, inner: int, precision: Precision, gpu: Gpu) -> bool:
    """Tell whether vLLM has a configuration tuned for `on_rank` experts of width `inner`, as far as is known."""
    shapes = gpu.tuned_bf16_experts if precision.weights == "bf16" else gpu.tuned_fp8_experts
    return shapes is None or (on_rank, inner) in shapes


def expert_bytes(experts: Experts, hidden: int, precision: Precision, slices: int) -> int:
    """Weight bytes of one expert on one rank: gate and up as one matrix, and down.

    hidden: the model's width
    slices: as EngineLimits.expert_slices
    """
    hidden, inner = stored_sizes(experts, hidden, precision, slices)
    first = precision.linear_bytes((1 + experts.gated) * inner, hidden, True)
    return first + precision.linear_bytes(hidden, inner, True)


def stored_sizes(experts: Experts, hidden: int, precision: Precision, slices: int) -> tuple[int, int]:
    """The model's width and one expert's on one rank, as the engine holds and computes them: vLLM pads both to whole
    scale blocks in FP8 (quantization/online/fp8.py, maybe_roundup_sizes).
    """
    inner = experts.intermediate_size // slices
    if precision.weights == "bf16":
        return hidden, inner
    rows, columns = precision.weight_block
    return -(-hidden // columns) * columns, -(-inner // rows) * rows


def expert_flops(experts: Experts, hidden: int, slices: int) -> int:
    """FLOPs of one token through one expert on one rank, without padding."""
    return 2 * (2 + experts.gated) * hidden * (experts.intermediate_size // slices)


def skips_other_rows(gpu: Gpu, precision: Precision) -> bool:
    """Tell whether the kernel that vLLM takes with expert parallelism activates the rows of its own experts only.

    Triton's writes zeros for those of other ranks, which are activated like all others (write_zeros_to_output in
    fused_moe.py). FlashInfer's, for block FP8 on Hopper and for all on Blackwell, do not (oracle/fp8.py and
    unquantized.py, alike in 0.26 and 0.30).
    """
    major = 0 if gpu.compute_capability is None else gpu.compute_capability[0]
    return major == BLACKWELL or (major == HOPPER and precision.weights == "fp8_block")


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
    hit:    distinct experts the tokens of each step go to, where it is known; None: as under even routing
    ranks:  those that share out whole experts, tensor_parallel with expert parallelism; 1: each has slices of all
    """
    slices = tensor_parallel // ranks
    dtype = precision.gemm_dtype
    parts = ("bandwidth_efficiency", "compute_efficiency", "launch_seconds", "activation_passes")
    hbm, math, launch, passes = (f"moe.{dtype}.{x}" for x in parts)
    untuned = f"moe.{dtype}.untuned_compute_efficiency"
    routed = computed = m * float(experts.experts_per_token)
    if ranks > 1:
        hit, computed = busiest_experts(m, experts, ranks, hit), busiest_rows(m, experts, ranks)
    elif hit is None:
        hit = distinct_experts(m, experts)
    width, inner = stored_sizes(experts, hidden, precision, slices)
    read = hit * expert_bytes(experts, hidden, precision, slices)
    matrices = 2 + experts.gated
    on_rank = experts.most_on_a_rank(ranks)
    if untuned in profile.coefficients and not is_tuned(on_rank, inner, precision, gpu):
        math = untuned
    tile = tile_rows(m, on_rank, inner, precision, gpu)
    flops = padded_rows(computed, hit, tile) * (2 * matrices * width * inner)
    grouped = norm2(
        traffic(read, gpu.memory_bandwidth, profile.named(hbm)),
        traffic(flops, peak_flops(gpu, dtype), profile.named(math)),
    )
    activated = computed if skips_other_rows(gpu, precision) else routed
    once = (routed * (2 * width) + activated * (matrices * inner)) * BF16_BYTES / gpu.memory_bandwidth
    around = times(once, *profile.named(passes))
    total = constant(*profile.named(launch), m) + grouped + around
    if ranks > 1:
        return total  # no rank's share of the experts was timed
    sizes = experts.num_experts, experts.experts_per_token, hidden, experts.intermediate_size // slices
    return total.scaled(profile.layer_factor(f"moe.{dtype}", sizes, m))
