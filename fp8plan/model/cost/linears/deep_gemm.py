"""The tiles that DeepGEMM takes on Hopper, by its own rule for given sizes.

DeepGEMM compiles a kernel for the tile that its estimate of cache traffic likes best (deepseek-ai/DeepGEMM, which vLLM
0.26 bundles: csrc/jit_kernels/heuristics/sm90.hpp). The rule has cliffs that no smooth formula has: 4096 x 12288 takes
36, 56, 41 and 74 us with 256, 288, 384 and 448 rows on an H200. tests/data/deep_gemm_kernels.txt lists the kernels
that were compiled there while profiles/h200_sxm was measured; the rule below names the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from fp8plan.model.cost.base import IntArray

SHARED_MEMORY = 232448  # bytes of an SM that a kernel may use
BLOCK_K = 128
MOST_STAGES = 16
L1_BYTES, L2_BYTES, L2_TOTAL = 128, 64, 8e6 / 1.3e3  # per cycle: of an SM, of an SM's share of L2, of all of L2


class Layout(NamedTuple):
    """The tile of one thread block. Layouts are in the order in which DeepGEMM tries them: the first of equals is
    taken.
    """

    cluster_m: int
    cluster_n: int
    block_m: int
    block_n: int


def _fits_registers(layout: Layout) -> bool:
    over = layout.block_n - BLOCK_K  # the columns that need a second scale of the weights
    scales = over <= 0 or layout.block_n % over == 0 or BLOCK_K % over == 0
    return scales and not (layout.block_m > 128 and layout.block_n > 128)


AT_ONCE = 256  # numbers of rows for which all layouts are compared in one go, in arrays that a CPU's cache holds
ArrayKey = tuple[bytes, tuple[int, ...]]  # values and shape of an int64 array: as a cache can hold them
LAYOUTS = tuple(
    layout
    for layout in (
        Layout(m, n, rows, columns)
        for (m, n), rows, columns in product(((1, 1), (1, 2), (2, 1)), (64, 128, 16, 32, 256), range(16, 193, 16))
    )
    if _fits_registers(layout)
)


class Chosen(NamedTuple):
    """The kernel of each GEMM: tile sizes, cluster size and waves of thread blocks. Every field has the shape that was
    asked for.
    """

    block_m: IntArray
    block_n: IntArray
    cluster: IntArray
    waves: IntArray


def choose(m: IntArray, n: IntArray, k: IntArray, sm_count: int) -> Chosen:
    """The layouts DeepGEMM takes for blockwise FP8 GEMMs of m rows, n columns and depth k, which broadcast together."""
    sizes = tuple(np.ascontiguousarray(x, dtype=np.int64) for x in np.atleast_1d(m, n, k))
    chosen = _choose(*((x.tobytes(), x.shape) for x in sizes), sm_count)
    return Chosen(*(x.reshape(np.broadcast(m, n, k).shape) for x in chosen))


def rows_of_every_kernel(shapes: Iterable[tuple[int, int]], most_rows: int, sm_count: int) -> list[int]:
    """The numbers of rows that run every kernel there is for `shapes` (n, k) and at most `most_rows` rows.

    DeepGEMM compiles a kernel for seconds when it first needs it. Once these are run, it compiles none later.
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
    # Arrays below: layouts, and as many axes as the sizes have together. What depends on a few sizes stays small.
    axes = np.broadcast(m, n, k).ndim
    cluster_m, cluster_n, block_m, block_n = np.array(LAYOUTS, dtype=np.int64).T.reshape(4, -1, *[1] * axes)
    blocks = -(-m // block_m) * -(-n // block_n)
    waves = -(-blocks // sm_count)
    stored = 2 * block_m * block_n
    from_l2 = k * (block_m // cluster_n + block_n // cluster_m) + stored
    through_l1 = k * (block_m + block_n + np.maximum(64, block_m) + block_n) + 2 * stored
    l2_cycles = from_l2 * blocks // int(min(L2_BYTES * sm_count, L2_TOTAL))
    l1_cycles = through_l1 * blocks // (L1_BYTES * sm_count)
    full = blocks.astype(np.float32) / (waves * sm_count).astype(np.float32)
    cycles = np.trunc(np.maximum(l1_cycles, l2_cycles).astype(np.float32) / full)
    forbidden = ~_pipelined(block_m, block_n, k) | (
        (block_m < 64) & (m > block_m)
    )  # tiles of 16 and 32 are for few rows
    cycles[forbidden | ((cluster_m * cluster_n > 1) & (waves <= 1))] = np.inf
    best = np.argmin(cycles, axis=0)
    waves = np.take_along_axis(waves, best[None], axis=0)[0]
    return Chosen(block_m.ravel()[best], block_n.ravel()[best], (cluster_m * cluster_n).ravel()[best], waves)


def _pipelined(block_m: IntArray, block_n: IntArray, k: IntArray) -> IntArray:
    """True where shared memory holds enough stages of K to hide their loading, shape (layouts, sizes)."""
    scales = np.where(BLOCK_K % block_n == 0, 1, 2) * 4 * -(-k // BLOCK_K)
    fixed = _aligned(2 * block_m * block_n, 1024) + 16 * MOST_STAGES + _aligned(scales, 8)
    stage = BLOCK_K * (block_m + block_n) + _aligned(4 * block_m, 128)
    stages = np.minimum((SHARED_MEMORY - fixed) // stage, MOST_STAGES)
    return np.asarray((stages >= 3) & ((stages >= 4) | (block_m * block_n >= 128 * 192)))


def _aligned(size: IntArray, to: int) -> IntArray:
    return np.asarray(-(-size // to) * to)
