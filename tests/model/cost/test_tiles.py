"""Tiles of kernels that choose among a few, the waves in which they run, and the parts into which they cut K."""

from __future__ import annotations

from collections import Counter
from math import ceil
from re import findall

import numpy as np
import pytest

from fp8plan.model.cost.gemm import TILE_POLICIES, Tiling, tiling
from fp8plan.model.profile.library import profiles_path

# Rows x columns. nvjet: see `test_engines_run_such_tiles`. cublas: five of the eight in NVIDIA's guide "Matrix
# Multiplication Background". deep_gemm: block_m of csrc/jit_kernels/heuristics/sm100.hpp. cutlass: vLLM's
# scaled_mm_sm90_fp8_dispatch.cuh has the first two, the third is assumed. triton: vLLM's configurations of
# w8a8_block_fp8_matmul for N=10240,K=5120 on an L40S, the most frequent of each height.
TILES = {
    "nvjet": " ".join(f"{rows}x{16 * sixteens}" for rows in (64, 128) for sixteens in range(4, 21)),
    "cublas": "64x64 64x128 128x128 128x256 256x128",
    "deep_gemm": "64x128 128x128 256x128",
    "cutlass": "64x128 128x128 128x256",
    "triton": "16x128 32x128 64x128 128x128",
    "onednn": "1x16",
}
SHAPES = {backend: [tuple(map(int, name.split("x"))) for name in names.split()] for backend, names in TILES.items()}


def of(backend: str, tile: str, m: int, n: int, k: int, sms: int) -> Tiling:
    choice = TILES[backend].split().index(tile)
    return Tiling(*(x[choice].item() for x in tiling(backend, *np.array([[[m]], [[n]], [[k]]], float), sms)))


@pytest.mark.parametrize("backend", TILE_POLICIES)
def test_a_row_or_column_more_than_a_tile_takes_another_tile(backend: str) -> None:
    """One SM runs all tiles, one after the other: so its waves count them."""
    heights, widths = map(np.unique, zip(*SHAPES[backend], strict=True))
    m, n = np.concatenate([heights, heights + 1.0]), np.concatenate([widths, widths + 1.0])[:, None]
    math, loads, waves, splits = tiling(backend, m, n, np.full_like(n, 128), 1)
    assert len(waves) == len(SHAPES[backend])
    for choice, (rows, columns) in enumerate(SHAPES[backend]):
        tiles = [[ceil(height / rows) * ceil(width / columns) for height in m] for width in n[:, 0]]
        np.testing.assert_array_equal(waves[choice], tiles)
        np.testing.assert_array_equal(math[choice], np.multiply(tiles, rows * columns))
        np.testing.assert_array_equal(loads[choice], np.multiply(tiles, 2 * (rows + columns)))
    assert (splits == 1).all()


@pytest.mark.parametrize(("backend", "least"), [("nvjet", 8), ("cublas", 16), ("deep_gemm", 0)])
def test_below_64_rows_cublas_has_lower_tiles(backend: str, least: int) -> None:
    """They are the lowest multiple of `least` that holds the rows. With tiles of 64, a single row costs as 64 do."""
    m = np.arange(1, 66)
    math, loads, _, _ = tiling(backend, m.astype(float), np.array([[64.0]]), np.array([[128.0]]), 132)
    for choice, (rows, columns) in enumerate(SHAPES[backend]):
        heights = [min(rows, least * ceil(few / least)) if least and few < 64 else rows for few in m]
        # Few tiles run in one wave, so an SM has one of them.
        np.testing.assert_array_equal(math[choice, 0], np.multiply(heights, columns))
        np.testing.assert_array_equal(loads[choice, 0], 2 * (np.array(heights) + columns))


def test_engines_run_such_tiles() -> None:
    """Most kernels of cuBLAS with sides of 64 and more have one side of 64 or 128; the widest has 320."""
    text = (profiles_path() / "h200_sxm/vllm-0.26.0/families/step_kernels.jsonl").read_text(encoding="utf-8")
    named = Counter((int(a), int(b)) for a, b in findall(r"nvjet_sm90_\w+?_(\d+)x(\d+)_", text))
    large = {sides: number for sides, number in named.items() if min(sides) >= 64}
    assert max(max(sides) for sides in large) == 320
    usual = sum(number for sides, number in large.items() if {64, 128} & set(sides))
    assert usual > 0.8 * sum(large.values()) > 80


@pytest.mark.parametrize(
    ("backend", "sms", "tile", "grid", "k", "waves", "splits"),
    [
        # A100, 108 SMs: cuBLAS cuts K into parts of 1,024 and more.
        ("cublas", 108, "128x128", (1, 1), 2047, 1, 1),
        ("cublas", 108, "128x128", (1, 1), 2048, 1, 2),
        ("cublas", 108, "128x128", (1, 1), 1024 * 107, 1, 107),
        ("cublas", 108, "64x64", (1, 1), 1024 * 200, 1, 108),  # no more parts than SMs
        ("cublas", 108, "256x128", (2, 18), 4096, 1, 3),
        ("cublas", 108, "256x128", (2, 19), 4096, 1, 2),  # 76 of 108 SMs
        ("cublas", 108, "128x256", (54, 1), 4096, 1, 2),
        ("cublas", 108, "128x256", (55, 1), 4096, 1, 1),
        ("cublas", 108, "64x128", (4, 27), 4096, 1, 1),
        ("cublas", 108, "64x128", (1, 109), 4096, 2, 1),
        ("cublas", 108, "64x128", (7, 31), 1000, 3, 1),
        ("nvjet", 132, "64x176", (1, 44), 3071, 1, 2),
        ("nvjet", 132, "64x176", (1, 44), 3072, 1, 3),
        ("deep_gemm", 148, "256x128", (1, 1), 1023, 1, 1),
        ("deep_gemm", 148, "256x128", (1, 1), 1024, 1, 2),
        ("cutlass", 132, "128x256", (1, 1), 1023, 1, 1),
        ("cutlass", 132, "128x256", (1, 1), 1024, 1, 2),
        ("triton", 142, "16x128", (1, 1), 1023, 1, 1),
        ("triton", 142, "16x128", (1, 1), 1024, 1, 2),
        ("onednn", 16, "1x16", (1, 1), 1023, 1, 1),
        ("onednn", 16, "1x16", (1, 1), 1024, 1, 2),
        ("onednn", 16, "1x16", (3, 16), 1024, 3, 1),
    ],
)
def test_k_is_cut_until_the_gpu_is_full(
    backend: str, sms: int, tile: str, grid: tuple[int, int], k: int, waves: int, splits: int
) -> None:
    """A part has the math and the loads of a tile, over its share of K."""
    rows, columns = map(int, tile.split("x"))
    work = of(backend, tile, rows * grid[0], columns * grid[1], k, sms)
    assert work[2:] == (waves, splits)
    assert work.math * splits == pytest.approx(waves * rows * columns)
    assert work.loads * splits == pytest.approx(waves * 2 * (rows + columns))
