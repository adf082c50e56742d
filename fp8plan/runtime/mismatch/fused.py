"""The passes over a batch on a GPU, each as one Triton kernel; torch's operations in tokens.py, measure.py and
weights.py are the reference, and the only way on a CPU.

Sequences are cut into tiles, one for each program. Sums over a tile are float64 and are added up in one order: a
GPU gives the same figures each time, but for the histogram's k3 of ratios beyond e^20. Weights are within 2 ulps of
torch's, sums of log ratios and k3 equal to rtol 1e-9, sums of weights to 3e-7.

What they take on an H200, for 10.5 million tokens of 1,536 x 20,480 (benchmarks/results/correction_h200.jsonl):

weighed   8 bytes a token, 28 us: 78% of the rate of a copy of as many bytes
packed    two bytes of mask for each place of the padded form, 20 bytes for each kept token: 20 us to count, 76 (77%) to
          gather; and the wait for the number of tokens between the two
unpacked  4 bytes for each place that is filled, a byte of mask twice, 8 bytes for each kept token: 20 and 43 us (68%)
measured  8 bytes a token, 211 us (10%). Most of it brings three numbers of each token to the histogram, which is in L2,
          as Triton has no atomics in shared memory: without a mismatch, so with nothing to add there, it takes 170 us
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fp8plan.runtime.mismatch import fused_kernels as kernels
from fp8plan.runtime.mismatch.histogram import BINS, SIDE, FloatArray, IntArray


class Launch(NamedTuple):
    """Launch settings. block: most tokens of a tile, a power of two; warps: of a program."""

    block: int
    warps: int


MEASURE, WEIGH, PACK = Launch(256, 2), Launch(512, 1), Launch(1024, 2)
COPIES = 64  # of the histogram; programs share them, so that few meet at one address


class Tiles:
    """Segments in tiles of at most `block` tokens; empty segments have none.

    cuts: [segments + 1] where segments begin, and where the last one ends
    """

    def __init__(self, cuts: IntArray, launch: Launch, device: torch.device) -> None:
        lengths = np.diff(cuts)
        numbers = -(-lengths // launch.block)
        self._segments, self._launch = len(lengths), launch
        self._segment = np.repeat(np.arange(len(lengths)), numbers)  # of each tile
        within = np.arange(len(self._segment)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
        ends = np.append(cuts[:-1][self._segment] + within * launch.block, cuts[-1])
        self.cuts = torch.from_numpy(ends).to(device)

    def __len__(self) -> int:
        return len(self._segment)

    def run(self, kernel: Any, *args: Any, **settings: Any) -> None:
        """Launch a kernel, a program for each tile, on the current stream of the tiles' device."""
        device = self.cuts.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            if len(self):
                block, warps = self._launch
                kernel[(len(self),)](*args, **settings, BLOCK=block, num_warps=warps)

    def per_segment(self, per_tile: FloatArray) -> FloatArray:
        """Add up sums of tiles, [tiles], to sums of segments, [segments]."""
        sums: FloatArray = np.bincount(self._segment, per_tile, self._segments).astype(np.float64, copy=False)
        return sums


def measured(log_ratio: Tensor, train: Tensor, pieces: IntArray) -> tuple[FloatArray, float, FloatArray]:
    """measure.by_torch, fused into one kernel."""
    device = log_ratio.device
    tiles = Tiles(pieces, MEASURE, device)
    copies = torch.zeros(COPIES, BINS, kernels.ROW, dtype=torch.float64, device=device)
    sums = torch.empty(10, len(tiles), dtype=torch.float64, device=device)
    tiles.run(
        kernels.measure, log_ratio.contiguous(), train.contiguous(), tiles.cuts, len(tiles), copies, sums, COPIES=COPIES
    )
    per_tile = sums[:3].cpu().numpy()
    squares, *near = sums[3:].sum(1).tolist()
    histogram = copies.sum(0)[:, :3].T.cpu().numpy().copy()
    histogram[:, SIDE - 1], histogram[:, SIDE] = near[:3], near[3:]
    return histogram, squares, np.array([tiles.per_segment(row) for row in per_tile])


def weighed(
    log_ratio: Tensor, offsets: IntArray, low: float, high: float, band: bool
) -> tuple[Tensor, Tensor | None, FloatArray, FloatArray]:
    """weights.by_torch, fused into one kernel."""
    log_ratio = log_ratio.contiguous()
    tiles = Tiles(offsets, WEIGH, log_ratio.device)
    weights = torch.empty_like(log_ratio)
    inside = torch.empty(len(log_ratio), dtype=torch.bool, device=log_ratio.device) if band else None
    sums = torch.empty(7, len(tiles), dtype=torch.float64, device=log_ratio.device)
    flags = weights if inside is None else inside.view(torch.uint8)
    ends = float(low), float(high)  # an integer would be another kernel
    tiles.run(kernels.weigh, log_ratio, tiles.cuts, len(tiles), *ends, weights, flags, sums, BAND=band)
    per_tile = sums.cpu().numpy()
    totals = np.array([*per_tile[2:5].sum(1), per_tile[5].min(), per_tile[6].max()])
    return weights, inside, np.array([tiles.per_segment(row) for row in per_tile[:2]]), totals


def packed(train: Tensor, rollout: Tensor, kept: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """tokens.by_torch on tiles of the flat log-probs and mask; no tile crosses the end of a sequence."""
    tiles, flags, counted = _counted(kept, ends.numpy())
    before = np.append(0, counted.cpu().numpy())
    number = int(before[-1])
    a, b, log_ratio = (torch.empty(number, dtype=torch.float32, device=train.device) for _ in range(3))
    tiles.run(kernels.gather, train.contiguous(), rollout.contiguous(), flags, tiles.cuts, counted, a, b, log_ratio)
    lengths = tiles.per_segment(np.diff(before)).astype(np.int64)
    return a, b, log_ratio, torch.from_numpy(np.append(0, np.cumsum(lengths)))


def unpack(values: Tensor, kept: Tensor, out: Tensor) -> None:
    """Write values, one after the other, to where `kept` is true in `out`, which is contiguous and has their dtype."""
    tiles, flags, counted = _counted(kept, np.array([0, kept.numel()]))
    values, out = (x.view(torch.uint8) if x.dtype == torch.bool else x for x in (values.contiguous(), out))
    tiles.run(kernels.scatter, values, flags, tiles.cuts, counted, out)


def _counted(kept: Tensor, cuts: IntArray) -> tuple[Tiles, Tensor, Tensor]:
    """Tiles, the mask as bytes, and [tiles] int64 the number of tokens kept up to each tile's end."""
    tiles = Tiles(cuts, PACK, kept.device)
    flags = kept.reshape(-1).contiguous().view(torch.uint8)
    counts = torch.empty(len(tiles), dtype=torch.int32, device=kept.device)
    tiles.run(kernels.count, flags, tiles.cuts, counts)
    return tiles, flags, counts.cumsum(0)
