"""Dense linear layers: a wave-quantised roofline, and the kernel that quantises FP8 activations.

    a = math of one SM over its waves / (peak / SMs * compute_efficiency)
    b = bytes / (bandwidth * bandwidth_efficiency)
    c = bytes of one SM over its waves, into and out of shared memory / sm_bandwidth
    seconds = launch + (a^4 + b^4 + c^4)^(1/4) + waves * wave_seconds + split_seconds where K is split,
              the cheapest of the backend's tiles (fp8plan.model.cost.linears.tiles)

Form: wave quantisation as in the fit to pipeweave's 10k FP8 GEMMs per GPU (held-out error 4.4% on H200 against 17%
without waves). The exponent is 4 rather than 2: tiled kernels overlap loads and math almost fully; 2 over-predicts the
ridge by 20% in AIConfigurator 0.12's tables. cuBLAS splits K of a grid smaller than the GPU and adds the parts up in
another kernel: without its time, narrow layers are 10 to 30% too fast on an H200. DeepGEMM on Hopper does not split, so
that few tiles leave SMs idle and each SM's own bandwidth decides (c, where a profile has sm_bandwidth; with 16 thread
blocks 2048 x 8192 takes as long as 6144 x 4096).
Not modelled: L2 hits of weights (a layer's weights are evicted before its next use). Clock and card:
fp8plan.model.cost.sustained.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import Linear
from fp8plan.model.cost.base import Array, Cost, constant, norm4, times, traffic, zero
from fp8plan.model.cost.linears.tiles import gemm_backend, tiling
from fp8plan.model.hardware import Gpu
from fp8plan.model.precision import BF16_BYTES, FP8_BYTES, FP32_BYTES, Precision
from fp8plan.model.profile.profile import Profile


def peak_flops(gpu: Gpu, dtype: str) -> float:
    """Dense FLOP/s for a weight or KV dtype. Raises ConfigError when the GPU has no FP8.

    A CPU computes in BF16 whatever its KV cache is stored in.
    """
    if dtype == "bf16" or gpu.is_cpu:
        return gpu.bf16_flops
    if gpu.fp8_flops is None:
        raise ConfigError(
            f"W8A8 GEMMs multiply in FP8, and {gpu.name} has no FP8 tensor cores; allowed there: BF16 weights "
            "(--precision bf16, fp8_kv)"
        )
    return gpu.fp8_flops


def gemm_cost(m: Array, linears: Sequence[Linear], precision: Precision, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of all `linears` (each times its layer count) at `m` rows, shape (steps,), without quantisation."""
    total = zero(m)
    for dtype in ("bf16", "fp8_block", "fp8"):
        chosen = [linear for linear in linears if linear_dtype(linear, precision) == dtype]
        if chosen:
            total = total + _same_dtype(m, chosen, dtype, precision, gpu, profile)
    return total


def linear_dtype(linear: Linear, precision: Precision) -> str:
    return precision.gemm_dtype if linear.quantised else "bf16"


def _same_dtype(
    m: Array, linears: Sequence[Linear], dtype: str, precision: Precision, gpu: Gpu, profile: Profile
) -> Cost:
    rows = np.maximum(m, 1).astype(float)  # arrays below: (linears, steps), and (tiles, linears, steps) from tiling
    n, k, layers = np.array([(x.n, x.k, x.layers) for x in linears], dtype=float).T[:, :, None]
    weights = np.array([precision.linear_bytes(x.n, x.k, x.quantised) for x in linears], dtype=float)[:, None]
    tiles = tiling(gemm_backend(profile, dtype), rows, n, k, gpu.sm_count)

    def coefficient(part: str) -> tuple[str, float]:
        return profile.named(f"gemm.{dtype}.{part}")

    bytes_ = weights + rows * k * _activation_bytes(dtype) + rows * n * BF16_BYTES
    peak = peak_flops(gpu, dtype) / gpu.sm_count
    limits = [
        traffic(2 * k * tiles.math, peak, coefficient("compute_efficiency")),
        traffic(np.broadcast_to(bytes_, tiles.waves.shape), gpu.memory_bandwidth, coefficient("bandwidth_efficiency")),
    ]
    if f"gemm.{dtype}.sm_bandwidth" in profile.coefficients:
        limits.append(traffic(k * tiles.loads * _element_bytes(dtype), 1.0, coefficient("sm_bandwidth")))
    each = norm4(*limits) + times(tiles.waves, *coefficient("wave_seconds"))
    if f"gemm.{dtype}.split_seconds" in profile.coefficients:
        each = each + times(np.where(tiles.splits > 1, 1.0, 0.0), *coefficient("split_seconds"))
    shapes = [profile.layer_factor(f"gemm.{dtype}", (x.n, x.k), rows) for x in linears]
    each = each + times(np.ones_like(tiles.waves), *coefficient("launch_seconds"))
    return _cheapest(each, layers * np.array(shapes))


def _cheapest(each: Cost, layers: Array) -> Cost:
    """The cost of the best of the tiles on axis 0, times `layers` (linears, steps), summed over the linears: shape
    (steps,).
    """
    best = np.argmin(each.seconds, axis=0)[None]

    def chosen(x: Array) -> Array:
        return np.asarray((np.take_along_axis(x, best, axis=0)[0] * layers).sum(axis=0))

    return Cost(chosen(each.seconds), {name: chosen(x) for name, x in each.partials.items()})


def _element_bytes(dtype: str) -> float:
    return BF16_BYTES if dtype == "bf16" else FP8_BYTES


def _activation_bytes(dtype: str) -> float:
    """Bytes of one input element as the GEMM reads it; FP8 in blocks has one FP32 scale per 128 elements of a row."""
    return _element_bytes(dtype) + (FP32_BYTES / 128 if dtype == "fp8_block" else 0)


def quantise_cost(m: Array, linears: Sequence[Linear], precision: Precision, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds to quantise the inputs of the FP8 linears: each reads BF16 and writes E4M3 and scales."""
    chosen = [linear for linear in linears if linear_dtype(linear, precision) != "bf16"]
    if not chosen:
        return zero(m)
    elements = float(sum(linear.layers * linear.k for linear in chosen))
    name, efficiency = "quantise.launch_seconds", "quantise.bandwidth_efficiency"
    moved = m * elements * (BF16_BYTES + _activation_bytes(precision.gemm_dtype))
    fixed = constant(name, profile.coefficient(name) * sum(linear.layers for linear in chosen), m)
    return fixed + traffic(moved, gpu.memory_bandwidth, profile.named(efficiency))
