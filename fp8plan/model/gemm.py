"""Dense linear layers: a wave-quantised roofline, and the kernel that quantises FP8 activations.

    tiles = ceil(m/tm) ceil(n/tn);   waves = ceil(tiles * split / SMs)
    a = waves * SMs * tm * tn * 2k / split / (peak * compute_efficiency)
    b = bytes / (bandwidth * bandwidth_efficiency)
    seconds = launch + (a^4 + b^4)^(1/4) + waves * wave_seconds,   the cheapest of the backend's tiles

Form: wave quantisation as in the fit to pipeweave's 10k FP8 GEMMs per GPU (held-out error 4.4% on H200 against 17%
without waves). Two changes, both from AIConfigurator 0.12's tables: the exponent is 4 rather than 2 (tiled kernels
overlap loads and math almost fully; 2 over-predicts the ridge by 20%), and `split`: a grid smaller than the GPU
splits K, because with 16 busy SMs no kernel could reach the bandwidth that is measured there.
Not modelled: L2 hits of weights (a layer's weights are evicted before its next use), clock changes under load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fp8plan.errors import ConfigError, ProfileError
from fp8plan.model.architecture import Linear
from fp8plan.model.batch import Array
from fp8plan.model.cost import Cost, constant, traffic, zero
from fp8plan.model.hardware import Gpu
from fp8plan.model.precision import BF16_BYTES, FP8_BYTES, FP32_BYTES, Precision
from fp8plan.model.profile import Profile


class TilePolicy(NamedTuple):
    """Output tiles (rows of m, columns of n) a kernel backend chooses from, and the least K of one split."""

    tiles: tuple[tuple[int, int], ...]
    split_k: int


# Which tile is chosen is a property of the kernel, not of the GPU, so it is named by the profile's backend.
# cublas: CTA tiles NVIDIA documents for Hopper and Ampere BF16. deep_gemm: block_m candidates of DeepGEMM's sm90
# heuristics with block_n 128. flashinfer_deep_gemm: swapAB below m = 32, hence the 16-row tile; DeepGEMM above.
# onednn: a CPU's cores share rows and vectors of 16, too finely for waves to matter.
TILE_POLICIES: dict[str, TilePolicy] = {
    "cublas": TilePolicy(((64, 64), (64, 128), (128, 128), (128, 256), (256, 128)), 512),
    "deep_gemm": TilePolicy(((64, 128), (128, 128), (256, 128)), 512),
    "flashinfer_deep_gemm": TilePolicy(((16, 128), (32, 128), (64, 128), (128, 128), (256, 128)), 512),
    "cutlass": TilePolicy(((64, 128), (128, 128), (128, 256)), 512),
    "triton": TilePolicy(((16, 128), (32, 128), (64, 128), (128, 128)), 512),
    "onednn": TilePolicy(((1, 16),), 512),
}


def peak_flops(gpu: Gpu, dtype: str) -> float:
    """Dense FLOP/s for a weight or KV dtype. Raises ConfigError when the GPU has no FP8.

    A CPU computes in BF16 whatever its KV cache is stored in.
    """
    if dtype == "bf16" or gpu.is_cpu:
        return gpu.bf16_flops
    if gpu.fp8_flops is None:
        raise ConfigError(f"{gpu.name} has no FP8 tensor cores; allowed there: bf16 (--precision bf16)")
    return gpu.fp8_flops


def tile_policy(profile: Profile, dtype: str) -> TilePolicy:
    backend = profile.backend(f"gemm.{dtype}")
    if backend not in TILE_POLICIES:
        raise ProfileError(
            f"profile {profile.label} names GEMM backend {backend!r}, whose tiles are not known; "
            f"known: {', '.join(TILE_POLICIES)}"
        )
    return TILE_POLICIES[backend]


def gemm_cost(m: Array, linears: Sequence[Linear], precision: Precision, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of all `linears` (each times its layer count) at `m` rows, shape (steps,), without quantisation."""
    total = zero(m)
    for dtype in ("bf16", "fp8_block"):
        chosen = [linear for linear in linears if linear_dtype(linear, precision) == dtype]
        if chosen:
            total = total + _same_dtype(m, chosen, dtype, precision, gpu, profile)
    return total


def linear_dtype(linear: Linear, precision: Precision) -> str:
    return precision.gemm_dtype if linear.quantised else "bf16"


def _same_dtype(
    m: Array, linears: Sequence[Linear], dtype: str, precision: Precision, gpu: Gpu, profile: Profile
) -> Cost:
    names = [f"gemm.{dtype}.{part}" for part in ("compute_efficiency", "bandwidth_efficiency", "wave_seconds")]
    compute, bandwidth, wave = (profile.coefficient(name) for name in names)
    rows = np.maximum(m, 1).astype(float)  # arrays below: (linears, steps), and (tiles, linears, steps) from _tiled
    n, k, layers = np.array([(x.n, x.k, x.layers) for x in linears], dtype=float).T[:, :, None]
    weights = np.array([precision.linear_bytes(x.n, x.k, x.quantised) for x in linears], dtype=float)[:, None]
    b = (weights + rows * k * _activation_bytes(dtype) + rows * n * BF16_BYTES) / (gpu.memory_bandwidth * bandwidth)
    a, waves = _tiled(rows, n, k, tile_policy(profile, dtype), gpu.sm_count, peak_flops(gpu, dtype) * compute)
    a4, b4 = _fourth(a), _fourth(b)
    roof = np.sqrt(np.sqrt(a4 + b4))
    best = np.argmin(roof + waves * wave, axis=0)[None]
    a4, roof, waves = (np.take_along_axis(x, best, axis=0)[0] for x in (a4, roof, waves))
    share = a4 / (a4 + b4)  # d log(roof) / d log(a)
    columns = (layers * roof * -share, layers * roof * (share - 1), layers * waves * wave)
    partials = {name: column.sum(axis=0) for name, column in zip(names, columns, strict=True)}
    launch = f"gemm.{dtype}.launch_seconds"
    fixed = constant(launch, profile.coefficient(launch) * float(layers.sum()), m)
    return fixed + Cost((layers * (roof + waves * wave)).sum(axis=0), partials)


def _tiled(rows: Array, n: Array, k: Array, policy: TilePolicy, sm_count: int, flops: float) -> tuple[Array, Array]:
    """Seconds of math at `flops` FLOP/s, and waves, per tile candidate: each of shape (tiles, linears, steps)."""
    tile_m, tile_n = (np.array(side, dtype=float)[:, None, None] for side in zip(*policy.tiles, strict=True))
    tiles = np.ceil(rows / tile_m) * np.ceil(n / tile_n)
    most = np.maximum(1, np.floor(k / policy.split_k))
    split = np.minimum(np.maximum(np.floor(sm_count / tiles), 1), most)
    waves = np.ceil(tiles * split / sm_count)
    one_wave = k * (sm_count * tile_m * tile_n * 2 / flops)
    return waves / split * one_wave, waves


def _fourth(x: Array) -> Array:
    """x^4 by two multiplications: numpy's power is twenty times slower."""
    square = x * x
    return np.asarray(square * square)


def _activation_bytes(dtype: str) -> float:
    """Bytes of one input element as the GEMM reads it; FP8 has one FP32 scale per 128 elements of a row."""
    return BF16_BYTES if dtype == "bf16" else FP8_BYTES + FP32_BYTES / 128


def quantise_cost(m: Array, linears: Sequence[Linear], precision: Precision, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds to quantise the inputs of the FP8 linears: each reads BF16 and writes E4M3 and scales."""
    chosen = [linear for linear in linears if linear_dtype(linear, precision) == "fp8_block"]
    if not chosen:
        return zero(m)
    elements = float(sum(linear.layers * linear.k for linear in chosen))
    name, efficiency = "quantise.launch_seconds", "quantise.bandwidth_efficiency"
    moved = m * elements * (BF16_BYTES + _activation_bytes("fp8_block"))
    fixed = constant(name, profile.coefficient(name) * sum(linear.layers for linear in chosen), m)
    return fixed + traffic(moved, gpu.memory_bandwidth, (efficiency, profile.coefficient(efficiency)))
