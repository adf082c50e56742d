"""A fixed histogram over log ratios: what quantiles, clipped mass and the robust KL are read from.

Sums over its bins are additive, so these figures are the same for one process and for many. A bin is 1/32 to 1/64 of
the distance to zero wide: 32 bins for each factor of two in |log ratio|, from 2^-16 to 20, for each sign. The bin of a
float32 is then some of its own bits (exponent and the first five of the mantissa): no search, no logarithm, the same
on every device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from fp8plan.model.arrays import FloatArray

if TYPE_CHECKING:
    import torch

LIMIT: Final = 20.0  # as verl's SAFETY_BOUND; the last bin of each sign is all beyond it
SMALLEST: Final = 2.0**-16  # the first bin of each sign is [0, 2^-16)
SHIFT: Final = 23 - 5  # of float32's 23 bits of mantissa, 5 count
FIRST: Final = int(np.float32(SMALLEST).view(np.int32)) >> SHIFT
SIDE: Final = (int(np.float32(LIMIT).view(np.int32)) >> SHIFT) - FIRST + 2  # bins of one sign
BINS: Final = 2 * SIDE

# Lower ends of the bins of one sign, in |log ratio|, and infinity.
MAGNITUDES: Final[FloatArray] = np.concatenate(
    [
        [0.0],
        ((np.arange(SIDE - 1, dtype=np.int32) + FIRST) << SHIFT).view(np.float32).astype(np.float64),
        [np.inf],
    ]
)
# Ends of all bins, in log ratio, from -infinity to infinity.
EDGES: Final[FloatArray] = np.concatenate([-MAGNITUDES[:0:-1], MAGNITUDES])


def bins(log_ratio: torch.Tensor) -> torch.Tensor:
    """[tokens] int32: the bin of each finite float32 log ratio, in the order of EDGES."""
    import torch

    index = log_ratio.abs().clamp_(max=LIMIT).view(torch.int32)
    index = index.bitwise_right_shift_(SHIFT).sub_(FIRST - 1).clamp_(min=0)
    # A negative one counts down from the middle: -1 - index, by the bits of a mask that is 0 or -1.
    index.bitwise_xor_(log_ratio.lt(0).to(torch.int32).neg_())
    return index.add_(SIDE)


def magnitudes(counts: FloatArray) -> FloatArray:
    """[SIDE] counts by |log ratio| from [BINS] counts by log ratio."""
    return counts[SIDE:] + counts[SIDE - 1 :: -1]


def quantile(counts: FloatArray, rank: float) -> float:
    """|log ratio| that `rank` of the tokens lie below; linear within a bin, the lower end of the first and the last."""
    below = np.cumsum(magnitudes(counts))
    bin_ = int(np.searchsorted(below, max(rank, np.finfo(float).tiny)))  # the first one that reaches the rank
    if bin_ in (0, SIDE - 1, SIDE):
        return 0.0 if bin_ == 0 or not below[-1] else LIMIT
    low, high = MAGNITUDES[bin_ : bin_ + 2]
    inside = (rank - below[bin_ - 1]) / (below[bin_] - below[bin_ - 1])
    return float(low + (high - low) * min(max(inside, 0.0), 1.0))


def count_below(counts: FloatArray, log_ratio: float) -> float:
    """Tokens whose log ratio is below `log_ratio`, which is clipped to +-20; linear within a bin."""
    below = np.concatenate([[0.0], np.cumsum(counts)])
    return float(np.interp(np.clip(log_ratio, -LIMIT, LIMIT), EDGES[1:-1], below[1:-1]))


def without_largest(counts: FloatArray, ratios: FloatArray, tokens: float) -> tuple[FloatArray, FloatArray]:
    """[BINS] counts and ratios of all but the `tokens` with the largest ratios; within a bin all are alike."""
    above = np.maximum(np.cumsum(counts[::-1])[::-1] - tokens, 0.0)
    left = above - np.append(above[1:], 0.0)
    return left, ratios * (left / np.where(counts > 0, counts, 1.0))


def excess(counts: FloatArray, ratios: FloatArray, c: float) -> float:
    """Sum over tokens of max(ratio - c, 0): exact at the ends of bins, linear (so never too small) between them."""
    ends = np.exp(EDGES[1:-1])
    above = np.cumsum(ratios[::-1])[::-1][1:] - ends * np.cumsum(counts[::-1])[::-1][1:]
    total = float(ratios.sum() - c * counts.sum())
    if c <= ends[0]:
        return max(total, 0.0)
    return max(float(np.interp(c, ends, above)), total, 0.0)
