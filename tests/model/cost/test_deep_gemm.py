"""DeepGEMM's choice of tiles, against kernels that it compiled, and against the rule written once more, in scalars.

The rule is the one that fp8plan/model/cost/gemm.py names. The kernels were compiled on an H200.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest

from fp8plan.model.cost.gemm import (
    FLASHINFER_DEEP_GEMM,
    LAYOUTS,
    SWAPPED_ROWS,
    Tiling,
    choose,
    rows_of_every_kernel,
    tiling,
)
from fp8plan.model.profile.library import profiles_path

H20, H200 = 78, 132  # SMs


class Tile(NamedTuple):
    """A candidate's cycles, its tile, cluster and waves."""

    cycles: float
    block_m: int
    block_n: int
    cluster: int
    waves: int


def rounded(size: int, to: int) -> int:
    return -(-size // to) * to


def fits(block_m: int, block_n: int) -> bool:
    """True if the scales of a tile's columns, and its accumulators, fit the registers."""
    if block_m == 256 and block_n > 128:
        return False
    return block_n <= 128 or block_n in (144, 160, 192)


def stages(block_m: int, block_n: int, k: int) -> int:
    """The stages of K that 227 KiB of shared memory hold beside the output tile, the barriers and the scales."""
    scales = rounded((4 if 128 % block_n == 0 else 8) * -(-k // 128), 8)
    beside = rounded(2 * block_m * block_n, 1024) + 256 + scales
    return (227 * 1024 - beside) // (128 * block_m + 128 * block_n + rounded(4 * block_m, 128))


def tile(m: int, n: int, k: int, sms: int, cluster_m: int, cluster_n: int, block_m: int, block_n: int) -> Tile:
    blocks = -(-m // block_m) * -(-n // block_n)
    waves = -(-blocks // sms)
    output = 2 * block_m * block_n
    l2 = (k * (block_m // cluster_n + block_n // cluster_m) + output) * blocks // min(64 * sms, int(8e6 / 1.3e3))
    l1 = (k * (block_m + 2 * block_n + max(64, block_m)) + 2 * output) * blocks // (128 * sms)
    full = np.float32(blocks) / np.float32(waves * sms)
    return Tile(float(np.trunc(np.float32(max(l1, l2)) / full)), block_m, block_n, cluster_m * cluster_n, waves)


def chosen(m: int, n: int, k: int, sms: int) -> Tile:
    best = None
    for (cluster_m, cluster_n), block_m, block_n in product(
        ((1, 1), (1, 2), (2, 1)), (64, 128, 16, 32, 256), range(16, 208, 16)
    ):
        held = stages(block_m, block_n, k)
        if not fits(block_m, block_n) or held < 3 or (held == 3 and block_m * block_n < 128 * 192):
            continue
        candidate = tile(m, n, k, sms, cluster_m, cluster_n, block_m, block_n)
        if (block_m < 64 and m > block_m) or (candidate.cluster > 1 and candidate.waves <= 1):
            continue
        if best is None or candidate.cycles < best.cycles:  # the first of equally good ones
            best = candidate
    assert best is not None
    return best


def swapped_rows(m: int, n: int, sms: int) -> int:
    """The rows of a tile of FlashInfer's kernel, which swaps A and B: a tile has 128 of the n columns.

    get_best_gemm_config of FlashInfer (csrc/nv_internal/tensorrt_llm/deep_gemm/jit_utils.cuh) takes the tile with
    the fewest waves, then with the fullest last wave, then the smallest one.
    """

    def rank(rows: int) -> tuple[int, int, int]:
        blocks = -(-m // rows) * -(-n // 128)
        return -(-blocks // sms), -(blocks % sms or sms), rows

    return min(range(16, 129, 8), key=rank)


def flashinfer(m: int, n: int, k: int) -> Tiling:
    return Tiling(*(x.item() for x in tiling(FLASHINFER_DEEP_GEMM, *np.array([[[m]], [[n]], [[k]]], float), H200)))


@pytest.mark.parametrize("sms", [H20, H200])
def test_tiles_are_those_of_the_rule(sms: int) -> None:
    rows = [
        1, 15, 16, 17, 32, 33, 63, 64, 65, 100, 128, 129, 200, 256, 257, 384, 500, 777, 1024, 2000,
        3400, 4096, 9000, 16384,
    ]  # fmt: skip
    shapes = [
        (128, 128), (576, 2048), (1024, 4096), (2112, 7168), (4096, 1536), (6144, 4096), (7168, 18432), (24576, 4096),
    ]  # fmt: skip
    for n, k in shapes:
        found = choose(np.array(rows), np.array(n), np.array(k), sms)
        expected = [chosen(m, n, k, sms)[1:] for m in rows]
        assert list(zip(*(column.tolist() for column in found), strict=True)) == expected


def test_deep_gemm_compiles_the_kernels_that_the_rule_names() -> None:
    """n, k, block_m, block_n and cluster size of every kernel compiled for the FP8 rows of an H200, and no other."""
    compiled = np.loadtxt(Path(__file__).parents[2] / "data" / "deep_gemm_kernels.txt", dtype=int)
    rows = pd.read_json(profiles_path() / "h200_sxm/vllm-0.26.0/kernels/gemm.jsonl", lines=True)
    rows = rows[rows.kernel.isin(["gemm.fp8_block", "linear.fp8_block"]) & (rows.m >= SWAPPED_ROWS)]
    m, n, k = (rows[x].to_numpy(np.int64) for x in ("m", "n", "k"))
    chosen = choose(m, n, k, H200)
    named = np.stack([n, k, chosen.block_m, chosen.block_n, chosen.cluster], axis=1)
    assert {*map(tuple, named.tolist())} == {*map(tuple, compiled.tolist())}


def test_a_few_numbers_of_rows_run_every_kernel_of_deep_gemm() -> None:
    shapes, most = [(4096, 2048), (2048, 6144)], 3000
    found = rows_of_every_kernel(shapes, most, H200)

    def kernels(rows: object) -> set[tuple[int, ...]]:
        m = np.asarray(rows)
        chosen = [(n, k, choose(m, np.array(n), np.array(k), H200)) for n, k in shapes]
        return {
            (n, k, *x)
            for n, k, c in chosen
            for x in zip(*(a.tolist() for a in (c.block_m, c.block_n, c.cluster)), strict=True)
        }

    assert kernels(found) == kernels(np.arange(1, most + 1))
    assert len(found) < 40
    assert max(found) <= most


def test_every_number_of_rows_is_looked_at() -> None:
    assert rows_of_every_kernel([(4096, 4096)], 1, H200) == [1]
    rows = rows_of_every_kernel([(4096, 4096)], 300, H200)
    kernels = choose(np.arange(1, 301), np.array(4096), np.array(4096), H200)[:3]
    first = {tuple(kernel): m for m, kernel in reversed(list(enumerate(zip(*kernels, strict=True), 1)))}
    assert rows == sorted(first.values())
    assert rows_of_every_kernel([(4096, 4096)], rows[-1] - 1, H200) == rows[:-1]


def test_a_choice_is_kept_and_cannot_be_changed() -> None:
    found = choose(np.array([64]), np.array(4096), np.array(4096), H200)
    with pytest.raises(ValueError, match="read-only"):
        found.block_m[0] = 1


def test_shared_memory_has_the_stages_for_every_tile_of_any_layer() -> None:
    """So `choose` leaves that rule out. The deepest layer of Llama 3.1 405B has a K of 53,248."""
    deepest = 241664
    assert all(stages(x.block_m, x.block_n, deepest) >= 3 for x in LAYOUTS)
    assert all(stages(x.block_m, x.block_n, deepest) >= 4 for x in LAYOUTS if x.block_m * x.block_n < 128 * 192)
    assert stages(256, 80, deepest + 1) < 4


@pytest.mark.parametrize(("n", "waves"), [(12288, 1), (16896, 1), (16960, 2), (37888, 3)])
def test_below_32_rows_a_kernel_with_swapped_operands_runs(n: int, waves: int) -> None:
    """One tile holds all rows if tiles of half as many rows would take more waves. Both operands are loaded twice."""
    for m, rows in {1: 16, 16: 16, 17: 24, 24: 24, 25: 32, 31: 32}.items():
        assert rows == swapped_rows(m, n, H200)
        assert flashinfer(m, n, 4096) == (waves * rows * 128, waves * 2 * (rows + 128), waves, 1)


@pytest.mark.parametrize(
    ("m", "n", "tile", "waves", "loads"),
    [
        (32, 4096, (32, 32), 1, (1 + 0.55 * 32 / 64) * (32 + 32 + 64 + 32)),  # a tensor core multiplies 64 rows
        (33, 4096, (64, 32), 1, (1 + 0.55 * 31 / 64) * 192),
        (65, 4096, (64, 64), 1, (1 + 0.55 * 63 / 64) * 256),  # 1 row in the last tile
        (96, 4096, (64, 64), 1, (1 + 0.55 * 32 / 64) * 256),
        (128, 4096, (64, 64), 1, 256),
        (512, 4096, (128, 128), 1, 512),
        (640, 4096, (128, 160), 1, 1.3 * 576),  # wider than 128
        (448, 4096, (64, 112), 2, 1.3 * 2 * 352),  # no multiple of 32 wide
        (416, 4096, (64, 112), 2, 1.3 * (2 + 0.55 * 32 / 64) * 352),
        (192, 6144, (64, 144), 1, 1.3 * 416),
        (896, 12288, (256, 128), 3, (3 + 0.55 * 128 / 256) * 768),
        (1024, 12288, (256, 128), 3, 3 * 768),
    ],
)
def test_loads_count_wide_tiles_and_empty_rows_for_more(
    m: int, n: int, tile: tuple[int, int], waves: int, loads: float
) -> None:
    best = chosen(m, n, 4096, H200)
    assert (best.block_m, best.block_n, best.waves) == (*tile, waves)
    work = flashinfer(m, n, 4096)
    assert work == (waves * max(tile[0], 64) * tile[1], pytest.approx(loads), waves, 1)
