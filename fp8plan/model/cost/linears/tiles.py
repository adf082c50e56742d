"""The tiles into which a GEMM kernel cuts its output, one thread block each, and the waves of them that the SMs run.

Which tile is taken is a property of the kernel, not of the GPU, so it is named by the profile's backend.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np

from fp8plan.errors import ProfileError
from fp8plan.model.cost.base import FloatArray, IntArray
from fp8plan.model.cost.linears import deep_gemm
from fp8plan.model.profile.profile import Profile


class TilePolicy(NamedTuple):
    """The output tiles (rows of m, columns of n) that a kernel backend chooses from, and the least K of one split."""

    tiles: tuple[tuple[int, int], ...]
    split_k: int


# nvjet: cuBLAS's kernels for Hopper, named after their tiles (nvjet_sm90_tst_176x128_...). With 96 rows and more these
# are mostly 64 or 128 rows high, and as wide as fills the SMs: 64 to 320 columns in families/step_kernels.jsonl of
# profiles/h200_sxm, multiples of 8, of which those of 16 are here. 21 timings with 96 to 1,024 rows that no fit has
# seen are 3.2% off (median); by the five tiles of cublas, fitted to the same others (7283815), 6.0%.
# cublas: CTA tiles that NVIDIA documents. onednn: a CPU's cores share rows and vectors of 16, too finely for waves to
# matter. deep_gemm: block_m candidates on other GPUs than Hopper, with block_n 128.
TILE_POLICIES: dict[str, TilePolicy] = {
    "nvjet": TilePolicy(tuple(product((64, 128), range(64, 321, 16))), 1024),
    "cublas": TilePolicy(((64, 64), (64, 128), (128, 128), (128, 256), (256, 128)), 1024),
    "deep_gemm": TilePolicy(((64, 128), (128, 128), (256, 128)), 512),
    "cutlass": TilePolicy(((64, 128), (128, 128), (128, 256)), 512),
    "triton": TilePolicy(((16, 128), (32, 128), (64, 128), (128, 128)), 512),
    "onednn": TilePolicy(((1, 16),), 512),
}
# On Hopper: below SWAPPED_ROWS rows FlashInfer's, which swaps A and B; then DeepGEMM.
FLASHINFER_DEEP_GEMM = "flashinfer_deep_gemm"
SWAPPED_ROWS = 32
LEAST_ROWS = 64  # of one tensor core instruction; smaller tiles cost as much
# Tiles wider than 128 need two scales of the weights in the inner loop, and widths of odd 16s store in short rows:
# fitted to the FP8 rows of profiles/h200_sxm.
UNEVEN, EVEN = 1.3, 32
# So much more in the wave whose last tile holds no more than half its rows: in tiles of 64 x 64, 4096 x 12288 takes
# 18.4 us with 112 rows and 25.7 with 80. Fitted to the same rows; why it is so is not known.
SPARSE = 1.2


class Tiling(NamedTuple):
    """Choices of tiles, each array of shape (choices, linears, rows).

    math:   multiply-adds of one SM, over all waves, per element of K
    loads:  elements that one SM moves into and out of shared memory, over all waves, per element of K
    waves:  of thread blocks
    splits: parts into which K is cut, so that few tiles fill the GPU
    """

    math: FloatArray
    loads: FloatArray
    waves: FloatArray
    splits: FloatArray


def tiling(backend: str, m: FloatArray, n: FloatArray, k: FloatArray, sm_count: int) -> Tiling:
    """The tiles among which `backend` chooses for GEMMs of `m` rows, `n` columns and depth `k`, which broadcast."""
    if backend == FLASHINFER_DEEP_GEMM:
        return _flashinfer_deep_gemm(m.astype(np.int64), n.astype(np.int64), k.astype(np.int64), sm_count)
    policy = TILE_POLICIES[backend]
    tile_m, tile_n = (np.array(side, dtype=float)[:, None, None] for side in zip(*policy.tiles, strict=True))
    tiles = np.ceil(m / tile_m) * np.ceil(n / tile_n)
    most = np.maximum(1, np.floor(k / policy.split_k))
    splits = np.minimum(np.maximum(np.floor(sm_count / tiles), 1), most)
    waves = np.ceil(tiles * splits / sm_count)
    return Tiling(waves / splits * tile_m * tile_n, waves / splits * 2 * (tile_m + tile_n), waves, splits)


def _flashinfer_deep_gemm(m: IntArray, n: IntArray, k: IntArray, sm_count: int) -> Tiling:
    """The one tiling of DeepGEMM. Its loads go into shared memory, and from there to the tensor cores."""
    chosen = deep_gemm.choose(m, n, k, sm_count)
    swapped = m < SWAPPED_ROWS
    few = np.where(m <= 16, 16, np.where(m <= 24, 24, 32))
    swapped_waves = np.ceil(np.ceil(n / 128) / sm_count)
    rows, columns = np.where(swapped, few, chosen.block_m), np.where(swapped, 128, chosen.block_n)
    waves = np.where(swapped, swapped_waves, chosen.waves)
    math_rows = np.where(swapped, few, np.maximum(chosen.block_m, LEAST_ROWS))
    loads = rows + columns + math_rows + columns
    last = m % chosen.block_m
    sparse = np.where(~swapped & (last > 0) & (2 * last <= chosen.block_m), waves - 1 + SPARSE, waves)
    uneven = np.where(~swapped & ((columns > 128) | (columns % EVEN > 0)), UNEVEN, 1.0)
    found = (waves * math_rows * columns, sparse * loads * uneven, waves, np.ones_like(waves))
    return Tiling(*(np.asarray(x, dtype=float)[None] for x in found))


def gemm_backend(profile: Profile, dtype: str) -> str:
    """The GEMM backend of `profile`. Raises ProfileError for one whose tiles are not known."""
    backend = profile.backend(f"gemm.{dtype}")
    known = (*TILE_POLICIES, FLASHINFER_DEEP_GEMM)
    if backend not in known:
        raise ProfileError(
            f"profile {profile.label} names GEMM backend {backend!r}, whose tiles are not known; "
            f"known: {', '.join(known)}"
        )
    return backend
