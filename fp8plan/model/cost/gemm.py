"""Dense linear layers: a wave-quantised roofline over each kernel's tiles, and the quantisation of FP8 activations.

    a = math of one SM over its waves / (peak / SMs * compute_efficiency)
    b = bytes / (bandwidth * bandwidth_efficiency)
    c = bytes of one SM over its waves, into and out of shared memory / sm_bandwidth
    seconds = launch + (a^4 + b^4 + c^4)^(1/4) + waves * wave_seconds + split_seconds where K is split,
              for the cheapest of the backend's tiles

A tile is one thread block's part of the output. The SMs run tiles in waves, as in the fit to pipeweave's FP8 GEMMs. The
choice of a tile is a property of the kernel, so the profile's backend names it.
The exponent is 4, because tiled kernels overlap loads and math almost fully. cuBLAS splits K of a grid smaller than the
GPU and adds up the parts in another kernel. DeepGEMM on Hopper does not split, so few tiles leave SMs idle and each
SM's own bandwidth decides (c, if a profile has sm_bandwidth).
DeepGEMM compiles a kernel for the tile with the best estimate of cache traffic (deepseek-ai/DeepGEMM, which vLLM
bundles: csrc/jit_kernels/heuristics/sm90.hpp). The rule has steps that no smooth formula has.
tests/data/deep_gemm_kernels.txt lists the kernels that were compiled on an H200; the rule below gives the same.
Two limits of the rule are left out. Up to a K of 241,664 shared memory holds the stages of every tile. An SM's share of
L2, 64 bytes per cycle, takes no longer than L1, through which all of it goes twice at 128.

Shared experts are an MLP for every token. Up to STREAM_TOKENS tokens vLLM runs it on its own stream beside the routed
experts (VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD; fused_moe/runner/shared_experts.py). Routed experts wait for
memory and leave SMs free, so only the reading of the shared weights adds to the step. With more tokens, and in families
without that stream (`Experts.shared_stream`), the MLP runs before them.
Not modelled: L2 hits of weights (a layer's weights are evicted before its next use). `power` has the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from fp8plan.errors import ConfigError, ProfileError
from fp8plan.model.architecture import Linear
from fp8plan.model.architecture.parts import Experts
from fp8plan.model.cost.base import (
    Array,
    Cost,
    FloatArray,
    IntArray,
    constant,
    norm_seconds,
    p_norm,
    times,
    traffic,
    zero,
)
from fp8plan.model.cost.host import activation_cost, runs_beside
from fp8plan.model.hardware import Gpu
from fp8plan.model.precision import BF16_BYTES, FP8_BYTES, FP32_BYTES, Precision
from fp8plan.model.profile.profile import Profile

STREAM_TOKENS = 256  # most tokens for which shared experts run on their own stream
BLOCK_K = 128
L1_BYTES, L2_BYTES = 128, 8e6 / 1.3e3  # per cycle: of an SM, of all of L2


class Layout(NamedTuple):
    """The tile of one thread block. LAYOUTS has DeepGEMM's order, in which the first of equally good ones wins."""

    cluster_m: int
    cluster_n: int
    block_m: int
    block_n: int


def _fits_registers(layout: Layout) -> bool:
    over = layout.block_n - BLOCK_K  # columns that need a second scale of the weights
    return (over <= 0 or BLOCK_K % over == 0) and min(layout.block_m, layout.block_n) <= 128


AT_ONCE = 256  # numbers of rows compared at once, in arrays that fit a CPU's cache
ArrayKey = tuple[bytes, tuple[int, ...]]  # values and shape of an int64 array, as the key of a cache
CLUSTERS = ((1, 1), (1, 2), (2, 1))
LAYOUTS = tuple(
    layout
    for layout in (
        Layout(m, n, rows, columns)
        for (m, n), rows, columns in product(CLUSTERS, (64, 128, 16, 32, 256), range(16, 193, 16))
    )
    if _fits_registers(layout)
)


class Chosen(NamedTuple):
    """The kernel of each GEMM: tile sizes, cluster size and waves of thread blocks, of the broadcast sizes' shape."""

    block_m: IntArray
    block_n: IntArray
    cluster: IntArray
    waves: IntArray


def choose(m: IntArray, n: IntArray, k: IntArray, sm_count: int) -> Chosen:
    """DeepGEMM's layouts for blockwise FP8 GEMMs of m rows, n columns and depth k, which broadcast together."""
    sizes = tuple(np.ascontiguousarray(x, dtype=np.int64) for x in np.atleast_1d(m, n, k))
    chosen = _choose(*((x.tobytes(), x.shape) for x in sizes), sm_count)
    return Chosen(*(x.reshape(np.broadcast(m, n, k).shape) for x in chosen))


def rows_of_every_kernel(shapes: Iterable[tuple[int, int]], most_rows: int, sm_count: int) -> list[int]:
    """Numbers of rows that together use every kernel for `shapes` (n, k) and at most `most_rows` rows.

    DeepGEMM takes seconds to compile a kernel at its first use. After these rows it compiles none.
    """
    rows, first = np.arange(1, most_rows + 1), set()
    for n, k in shapes:
        chosen = choose(rows, np.array(n), np.array(k), sm_count)
        kernels = np.stack([chosen.block_m, chosen.block_n, chosen.cluster])
        first |= set(rows[np.unique(kernels, axis=1, return_index=True)[1]].tolist())
    return sorted(first)


@lru_cache(maxsize=256)
def _choose(m_key: ArrayKey, n_key: ArrayKey, k_key: ArrayKey, sm_count: int) -> Chosen:
    sizes = [np.frombuffer(values, dtype=np.int64).reshape(shape) for values, shape in (m_key, n_key, k_key)]
    columns = np.broadcast(*sizes).shape[-1]
    parts = [
        _choose_part([x if x.shape[-1] == 1 else x[..., start : start + AT_ONCE] for x in sizes], sm_count)
        for start in range(0, columns, AT_ONCE)
    ]
    chosen = Chosen(*(np.concatenate(arrays, axis=-1) for arrays in zip(*parts, strict=True)))
    for array in chosen:
        array.setflags(write=False)  # it is in the cache
    return chosen


def _choose_part(sizes: Sequence[IntArray], sm_count: int) -> Chosen:
    m, n, k = sizes
    # Arrays below have axes of clusters and of tiles before those of the sizes; most lack the first.
    axes = np.broadcast(m, n, k).ndim
    lowest = min(LEAST_ROWS, m.min())
    layouts = [layout for layout in LAYOUTS if layout.block_m >= lowest]  # without those with `few_rows` everywhere
    columns = np.array(layouts, dtype=np.int64).T.reshape(4, len(CLUSTERS), -1, *[1] * axes)
    (cluster_m, cluster_n), (block_m, block_n) = columns[:2, :, :1], columns[2:, 0]
    blocks = -(-m // block_m) * -(-n // block_n)
    waves = -(-blocks // sm_count)
    stored = 2 * block_m * block_n
    from_l2 = k * (block_m // cluster_n + block_n // cluster_m) + stored
    through_l1 = k * (block_m + block_n + np.maximum(64, block_m) + block_n) + 2 * stored
    l2_cycles = from_l2 * blocks // int(L2_BYTES)
    l1_cycles = through_l1 * blocks // (L1_BYTES * sm_count)
    full = blocks.astype(np.float32) / (waves * sm_count).astype(np.float32)
    cycles = np.trunc(np.maximum(l1_cycles, l2_cycles).astype(np.float32) / full)
    few_rows = (block_m < LEAST_ROWS) & (m > block_m)  # tiles of 16 and 32 are for few rows
    np.copyto(cycles, np.inf, where=few_rows | ((cluster_m * cluster_n > 1) & (waves <= 1)))
    cluster, tile = np.divmod(np.argmin(cycles.reshape(-1, *cycles.shape[2:]), axis=0), len(block_m))
    waves = np.take_along_axis(waves, tile[None], axis=0)[0]
    return Chosen(block_m.ravel()[tile], block_n.ravel()[tile], (cluster_m * cluster_n).ravel()[cluster], waves)


FEW_ROWS = 64  # from here on cuBLAS's tiles are the listed ones


class TilePolicy(NamedTuple):
    """The output tiles (rows, columns) that a kernel backend chooses from, and the least K of one split.

    least_rows: below FEW_ROWS rows, tile heights are multiples of this; None: they are not
    """

    tiles: tuple[tuple[int, int], ...]
    split_k: int
    least_rows: int | None = None

    def blocks(self, rows: FloatArray) -> FloatArray:
        """The last of each block of row counts that fill the same tiles, whichever is chosen. Blocks end after `rows`.

        They are as long as the lowest tile is high.
        """
        lowest = min(height for height, _ in self.tiles)
        least = self.least_rows or lowest
        few = np.arange(least, lowest, least)
        return np.append(few, np.arange(lowest, rows.max(initial=0) + lowest, lowest)).astype(float)


# nvjet: cuBLAS's kernels for Hopper, named after their tiles (nvjet_sm90_tst_176x128_...). From 96 rows on most tiles
# are 64 or 128 rows high, and as wide as fills the SMs. A few rows have tiles of 8, 16, 24 and so on
# (families/step_kernels.jsonl of profiles/h200_sxm). cublas: CTA tiles that NVIDIA documents; 16 for a few rows is
# assumed. onednn: a CPU's cores share rows and vectors of 16, too finely for waves. deep_gemm: block_m candidates on
# GPUs other than Hopper, with block_n 128.
TILE_POLICIES: dict[str, TilePolicy] = {
    "nvjet": TilePolicy(tuple(product((64, 128), range(64, 321, 16))), 1024, least_rows=8),
    "cublas": TilePolicy(((64, 64), (64, 128), (128, 128), (128, 256), (256, 128)), 1024, least_rows=16),
    "deep_gemm": TilePolicy(((64, 128), (128, 128), (256, 128)), 512),
    "cutlass": TilePolicy(((64, 128), (128, 128), (128, 256)), 512),
    "triton": TilePolicy(((16, 128), (32, 128), (64, 128), (128, 128)), 512),
    "onednn": TilePolicy(((1, 16),), 512),
}
# On Hopper FlashInfer's kernel swaps A and B, and runs below SWAPPED_ROWS rows; else DeepGEMM runs.
FLASHINFER_DEEP_GEMM = "flashinfer_deep_gemm"
SWAPPED_ROWS = 32
LEAST_ROWS = 64  # rows of one tensor core instruction; smaller tiles cost as much
# Factors fitted to the FP8 rows of profiles/h200_sxm. Tiles wider than 128 need two scales of the weights in the inner
# loop, and widths that are no multiple of 32 store in short rows.
UNEVEN, EVEN = 1.3, 32
# A tile's empty rows cost this part of its wave. The reason is not known: kernels of 32, 40, 48 and 80 rows show it.
EMPTY_ROWS = 0.55


class Tiling(NamedTuple):
    """Choices of tiles, each array of shape (choices, linears, rows).

    math:   multiply-adds of one SM, over all waves, per element of K
    loads:  elements that one SM moves into and out of shared memory, over all waves, per element of K
    waves:  waves of thread blocks
    splits: parts into which K is cut, so that few tiles fill the GPU
    """

    math: FloatArray
    loads: FloatArray
    waves: FloatArray
    splits: FloatArray


def tiling(backend: str, m: FloatArray, n: FloatArray, k: FloatArray, sm_count: int) -> Tiling:
    """The tiles that `backend` chooses from for GEMMs of `m` rows, `n` columns and depth `k`, which broadcast."""
    if backend == FLASHINFER_DEEP_GEMM:
        return _flashinfer_deep_gemm(m.astype(np.int64), n.astype(np.int64), k.astype(np.int64), sm_count)
    policy = TILE_POLICIES[backend]
    tile_m, tile_n = np.array(policy.tiles, dtype=float).T[:, :, None, None]
    if policy.least_rows is not None:
        needed = policy.least_rows * np.ceil(m / policy.least_rows)
        tile_m = np.minimum(tile_m, np.where(m < FEW_ROWS, needed, np.inf))
    tiles = np.ceil(m / tile_m) * np.ceil(n / tile_n)
    splits = np.maximum(np.minimum(np.floor(sm_count / tiles), k // policy.split_k), 1)
    waves = np.ceil(tiles / sm_count)  # K is split only if all parts fit in one wave
    return Tiling(waves / splits * tile_m * tile_n, waves / splits * 2 * (tile_m + tile_n), waves, splits)


def _flashinfer_deep_gemm(m: IntArray, n: IntArray, k: IntArray, sm_count: int) -> Tiling:
    """The one tiling of DeepGEMM. Its loads go into shared memory, and from there to the tensor cores."""
    sixteens = -(-m // 16)  # every tile is a multiple of 16 rows high, so these decide
    every = 16 * np.arange(1, sixteens.max() + 1)
    chosen = Chosen(*(x[..., sixteens - 1] for x in choose(every, n, k, sm_count)))
    swapped = m < SWAPPED_ROWS
    few = np.maximum(-(-m // 8) * 8, 16)  # the tiles of the swapped kernel are 16, 24, ... rows high
    swapped_waves = np.ceil(np.ceil(n / 128) / sm_count)
    rows, columns = np.where(swapped, few, chosen.block_m), np.where(swapped, 128, chosen.block_n)
    waves = np.where(swapped, swapped_waves, chosen.waves)
    math_rows = np.where(swapped, few, np.maximum(chosen.block_m, LEAST_ROWS))
    loads = rows + columns + math_rows + columns
    last = (m - 1) % chosen.block_m + 1  # rows of the last tile
    empty = np.where(swapped, 0.0, 1 - last / math_rows)
    uneven = np.where((columns > 128) | (columns % EVEN > 0), UNEVEN, 1.0)
    tiles = (waves * math_rows * columns, (waves + EMPTY_ROWS * empty) * loads * uneven, waves, np.ones_like(waves))
    return Tiling(*(np.asarray(x, dtype=float)[None] for x in tiles))


def gemm_backend(profile: Profile, dtype: str) -> str:
    """The GEMM backend of `profile`. Raises ProfileError if its tiles are not known."""
    backend = profile.backend(f"gemm.{dtype}")
    known = (*TILE_POLICIES, FLASHINFER_DEEP_GEMM)
    if backend not in known:
        raise ProfileError(
            f"profile {profile.label} names GEMM backend {backend!r}, whose tiles are not known; "
            f"known: {', '.join(known)}"
        )
    return backend


def peak_flops(gpu: Gpu, dtype: str) -> float:
    """Dense FLOP/s for a weight or KV dtype. Raises ConfigError for FP8 on a GPU without it.

    A CPU computes in BF16 for every dtype of its KV cache.
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
    """Seconds of all `linears`, each times its layers, at `m` rows without quantisation, shape (steps,)."""
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
    backend, peak = gemm_backend(profile, dtype), peak_flops(gpu, dtype) / gpu.sm_count

    def coefficient(part: str) -> tuple[str, float]:
        return profile.named(f"gemm.{dtype}.{part}")

    def limits(rows: FloatArray, tiles: Tiling) -> Iterator[Cost]:
        yield traffic(2 * k * tiles.math, peak, coefficient("compute_efficiency"))
        bytes_ = weights + rows * k * _activation_bytes(dtype) + rows * n * BF16_BYTES
        yield traffic(bytes_[None], gpu.memory_bandwidth, coefficient("bandwidth_efficiency"))
        if f"gemm.{dtype}.sm_bandwidth" in profile.coefficients:
            yield traffic(k * tiles.loads * _element_bytes(dtype), 1.0, coefficient("sm_bandwidth"))

    def added(tiles: Tiling) -> Iterator[Cost]:
        yield times(tiles.waves, *coefficient("wave_seconds"))
        if f"gemm.{dtype}.split_seconds" in profile.coefficients:
            yield times(np.where(tiles.splits > 1, 1.0, 0.0), *coefficient("split_seconds"))
        yield times(np.ones_like(tiles.waves), *coefficient("launch_seconds"))

    def cheapest(rows: FloatArray) -> Tiling:
        tiles = tiling(backend, rows, n, k, gpu.sm_count)
        seconds = norm_seconds(4, [cost.seconds for cost in limits(rows, tiles)])
        best = np.argmin(sum((cost.seconds for cost in added(tiles)), seconds), axis=0)[None]
        return Tiling(*(np.take_along_axis(x, best, axis=0) for x in tiles))

    if backend == FLASHINFER_DEEP_GEMM:
        tiles = tiling(backend, rows, n, k, gpu.sm_count)
    else:
        tiles = _in_blocks(rows, TILE_POLICIES[backend].blocks(rows), cheapest)
    each = sum(added(tiles), p_norm(4, *limits(rows, tiles)))
    factors = layers * np.array([profile.layer_factor(f"gemm.{dtype}", (x.n, x.k), rows) for x in linears])

    def of_all(values: Array) -> Array:
        return np.asarray((values[0] * factors).sum(axis=0))

    return Cost(of_all(each.seconds), {name: of_all(x) for name, x in each.partials.items()})


def _in_blocks(rows: FloatArray, ends: FloatArray, cheapest: Callable[[FloatArray], Tiling]) -> Tiling:
    """The tilings that are the cheapest for whole numbers of `rows`, from those at both ends of each block.

    ends: the result of `TilePolicy.blocks`

    Within a block only the bytes grow with the rows. As they grow, a tiling with more other work gains on one with
    less, so their seconds cross at most once. A tiling that is the cheapest at both ends is so between them.
    """
    if rows.size <= 2 * ends.size:
        return cheapest(rows)
    at_first, at_last = cheapest(np.append(1, ends[:-1] + 1)), cheapest(ends)
    block = np.searchsorted(ends, rows)
    tiles = Tiling(*(values[..., block] for values in at_first))
    differ = [low != high for low, high in zip(at_first, at_last, strict=True)]
    unsure = np.any(differ, axis=(0, 1, 2))[block]
    for values, own in zip(tiles, cheapest(rows[unsure]), strict=True):
        values[..., unsure] = own
    return tiles


def _element_bytes(dtype: str) -> float:
    return BF16_BYTES if dtype == "bf16" else FP8_BYTES


def _activation_bytes(dtype: str) -> float:
    """Bytes of one input element; FP8 in blocks has one FP32 scale per 128 elements of a row."""
    return _element_bytes(dtype) + (FP32_BYTES / 128 if dtype == "fp8_block" else 0)


def quantise_cost(m: Array, linears: Sequence[Linear], precision: Precision, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds to quantise the inputs of FP8 linears: read in BF16, written in E4M3 with scales."""
    chosen = [linear for linear in linears if linear_dtype(linear, precision) != "bf16"]
    if not chosen:
        return zero(m)
    elements = float(sum(linear.layers * linear.k for linear in chosen))
    name, efficiency = "quantise.launch_seconds", "quantise.bandwidth_efficiency"
    moved = m * elements * (BF16_BYTES + _activation_bytes(precision.gemm_dtype))
    fixed = constant(name, profile.coefficient(name) * sum(linear.layers for linear in chosen), m)
    return fixed + traffic(moved, gpu.memory_bandwidth, profile.named(efficiency))


def overlapped(linears: Sequence[Linear], gpu: Gpu, experts: Sequence[Experts]) -> list[Linear]:
    """The matrices of shared experts that can run beside the routed ones."""
    if not all(runs_beside(x, gpu) for x in experts):
        return []
    return [linear for linear in linears if linear.name.startswith("shared_")]


def shared_cost(m: Array, linears: Sequence[Linear], precision: Precision, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds that the `overlapped` matrices of all layers add to steps of m tokens, shape (steps,)."""
    alone = gemm_cost(m, linears, precision, gpu, profile) + quantise_cost(m, linears, precision, gpu, profile)
    for linear in linears:
        if linear.name == "shared_down_proj":
            alone = alone + activation_cost(m, linear.k, gpu, profile).scaled(linear.layers)
    read = sum(precision.linear_bytes(x.n, x.k, x.quantised) * x.layers for x in linears)
    efficiency = profile.named(f"moe.{precision.gemm_dtype}.bandwidth_efficiency")
    beside = traffic(np.full(m.shape, float(read)), gpu.memory_bandwidth, efficiency)
    few = m <= STREAM_TOKENS
    return alone.scaled(np.where(few, 0.0, 1.0)) + beside.scaled(np.where(few, 1.0, 0.0))
