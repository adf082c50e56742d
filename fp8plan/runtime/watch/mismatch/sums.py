"""Sums that the figures of a batch are made of: a histogram of log ratios, segments, moments; and their exchange.

All of them add, so figures are the same for one process and for many. Quantiles, clipped mass and the robust KL are
read from the histogram. For each sign it has 32 bins for each factor of two in |log ratio|, from 2^-16 to 20. The bin
of a float32 is then some of its own bits (exponent and the first five of the mantissa), on every device.

Ranks are the processes that train together. `group` is theirs; None: all; ALONE: this process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import expm1, inf, log, nan, sqrt
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from fp8plan.errors import ConfigError

if TYPE_CHECKING:
    import torch

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
Numbers = TypeVar("Numbers", float, FloatArray, "torch.Tensor")

LIMIT: Final = 20.0  # as verl's SAFETY_BOUND; the last bin of each sign is all beyond it
TINY: Final = 1e-8  # verl adds this to counts and means before it divides
SMALLEST: Final = 2.0**-16  # the first bin of each sign is [0, 2^-16)
SHIFT: Final = 23 - 5  # of float32's 23 bits of mantissa, 5 count
FIRST: Final = int(np.float32(SMALLEST).view(np.int32)) >> SHIFT
SIDE: Final = (int(np.float32(LIMIT).view(np.int32)) >> SHIFT) - FIRST + 2  # bins of one sign
BINS: Final = 2 * SIDE

# k3_robust: this share of the tokens, and two at least, is winsorised: those with the largest |log ratio|.
WINSORISED, WINSORISED_TOKENS = 1e-3, 2

# Lower ends of the bins of one sign, in |log ratio|, and infinity.
_BITS = (np.arange(SIDE - 1, dtype=np.int32) + FIRST) << SHIFT
MAGNITUDES: Final[FloatArray] = np.concatenate([[0.0], _BITS.view(np.float32).astype(np.float64), [np.inf]])
# Ends of all bins, in log ratio, from -infinity to infinity.
EDGES: Final[FloatArray] = np.concatenate([-MAGNITUDES[:0:-1], MAGNITUDES])


def k3(log_ratio: Numbers) -> Numbers:
    """exp(x) - 1 - x, which is never negative: its mean over tokens estimates the KL. Not clamped."""
    if isinstance(log_ratio, float):
        return expm1(log_ratio) - log_ratio
    return (np.expm1(log_ratio) if isinstance(log_ratio, np.ndarray) else log_ratio.expm1()) - log_ratio


def bins(log_ratio: torch.Tensor) -> torch.Tensor:
    """[tokens] int32: the bin of each finite float32 log ratio, in the order of EDGES."""
    import torch

    index = log_ratio.abs().clamp_(max=LIMIT).view(torch.int32)
    index = index.bitwise_right_shift_(SHIFT).sub_(FIRST - 1).clamp_(min=0)
    # A negative one counts down from the middle: -1 - index, by the bits of a mask that is 0 or -1.
    index.bitwise_xor_(log_ratio.lt(0).to(torch.int32).neg_())
    return index.add_(SIDE)


def by_bin(where: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[BINS] sums of float64 `values` [tokens] by their bin, `where` [tokens]."""
    import torch

    if not values.is_cuda:  # three times as fast; on a GPU an error under use_deterministic_algorithms
        return torch.bincount(where, values, minlength=BINS)
    return values.new_zeros(BINS).index_add_(0, where, values)


def terms(log_ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log ratio, ratio (clamped to e^+-20) and k3 (not clamped) in float64: there, ratio - 1 cancels harmlessly."""
    exact = log_ratio.double()
    ratio = exact.clamp(-LIMIT, LIMIT).exp_()
    divergence = (ratio - 1).sub_(exact).clamp_(min=0)
    beyond = log_ratio > LIMIT
    if bool(beyond.any()):
        divergence[beyond] = k3(exact[beyond])
    return exact, ratio, divergence


def quantile(counts: FloatArray, rank: float) -> float:
    """The |log ratio| below which `rank` of the tokens lie. counts: [BINS]

    Linear within a bin; the lower end of the first and of the last bin. NaN without tokens.
    """
    below = np.cumsum(counts[SIDE:] + counts[SIDE - 1 :: -1])  # by |log ratio|
    bin_ = int(np.searchsorted(below, max(rank, np.finfo(float).tiny)))  # the first bin that reaches the rank
    if not below[-1]:
        return nan
    if bin_ in (0, SIDE - 1, SIDE):
        return 0.0 if bin_ == 0 else LIMIT
    low, high = MAGNITUDES[bin_ : bin_ + 2]
    inside = (rank - below[bin_ - 1]) / (below[bin_] - below[bin_ - 1])
    return float(low + (high - low) * min(max(inside, 0.0), 1.0))


def count_below(counts: FloatArray, log_ratio: FloatArray | float) -> FloatArray:
    """Number of tokens below each `log_ratio`, which is clipped to +-20; linear within a bin."""
    below = np.concatenate([[0.0], np.cumsum(counts)])
    return np.asarray(np.interp(np.clip(log_ratio, -LIMIT, LIMIT), EDGES[1:-1], below[1:-1]))


def kept(counts: FloatArray, low: float, highs: Sequence[float] | FloatArray) -> FloatArray:
    """Share of the tokens with low <= ratio <= high, for each of `highs`. NaN without tokens."""
    tokens = float(counts.sum())
    if not tokens:
        return np.full(len(highs), nan)
    ends = np.array([log(high) for high in highs])
    # A ratio of exactly 1 is common (tokens that both policies are sure of) and no ratio above 1.
    at_most = np.where((ends >= 0) & (ends < SMALLEST), SMALLEST, ends)
    above = np.where(ends >= LIMIT, 0.0, tokens - count_below(counts, at_most))
    end = log(low) if low > 0 else -inf
    below = count_below(counts, end) if end > -LIMIT else 0.0
    return np.maximum(tokens - above - below, 0.0) / tokens


def without_largest(counts: FloatArray, ratios: FloatArray, tokens: float) -> tuple[FloatArray, FloatArray]:
    """[BINS] counts and ratios without the `tokens` with the largest ratios; within a bin all are alike."""
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


def robust_k3(counts: FloatArray, sums: FloatArray) -> float:
    """Mean of k3 where tokens beyond a quantile q of |log ratio| count as if they lay at +-q; NaN without tokens.

    sums: [BINS] of k3
    """
    tokens = float(counts.sum())
    if not tokens:
        return nan
    beyond = max(WINSORISED * tokens, min(WINSORISED_TOKENS, tokens / 2))
    q = quantile(counts, tokens - beyond)
    ends = np.minimum(MAGNITUDES, LIMIT)
    width = np.diff(ends)  # the last bin, beyond the limit, has 0
    # The share of each bin's tokens that lies below q.
    below = np.clip((q - ends[:-1]) / np.where(width > 0, width, 1.0), 0.0, 1.0)
    total = 0.0
    for side, at_q in ((slice(SIDE, None), k3(q)), (slice(SIDE - 1, None, -1), k3(-q))):
        inside = below * np.where(below > 0, sums[side], 0.0)
        total += float(np.minimum(inside + at_q * (1 - below) * counts[side], sums[side]).sum())
    return total / tokens


class Segments:
    """The sum or maximum of each segment of packed tokens, which come in chunks and in order.

    cuts: [segments + 1] first token of each segment, and the end of the last; an empty segment gives 0 or -infinity
    """

    def __init__(self, cuts: IntArray, device: torch.device, reduce: Literal["sum", "max"] = "sum") -> None:
        import torch

        self._cuts, self._reduce, self._start = cuts, reduce, 0.0 if reduce == "sum" else -np.inf
        self._totals = torch.full((len(cuts) - 1,), self._start, dtype=torch.float64, device=device)

    def add(self, part: slice, values: torch.Tensor) -> None:
        """Add the values of the tokens in `part`, of any float dtype."""
        import torch

        first = int(np.searchsorted(self._cuts, part.start, side="right")) - 1
        last = int(np.searchsorted(self._cuts, part.stop, side="left"))
        offsets = torch.from_numpy(np.clip(self._cuts[first : last + 1], part.start, part.stop) - part.start)
        reduced = torch.segment_reduce(
            values.double(), self._reduce, offsets=offsets.to(values.device), initial=self._start
        )
        into = self._totals[first : first + len(reduced)]
        (torch.add if self._reduce == "sum" else torch.maximum)(into, reduced, out=into)

    def numpy(self) -> FloatArray:
        """[segments] float64: the sums or maxima so far."""
        return self._totals.cpu().numpy()


ALONE: Final = object()  # the group of a process that exchanges nothing, although torch.distributed may be up


def several(group: Any = None) -> bool:
    """True if torch.distributed is up, and the group is not ALONE."""
    from torch import distributed

    return group is not ALONE and bool(distributed.is_available() and distributed.is_initialized())


def rank(group: Any = None) -> int:
    """The number of this process; its launcher's RANK before torch.distributed is up; 0 alone."""
    from torch import distributed

    if group is ALONE:
        return 0
    return int(distributed.get_rank(group) if several() else os.environ.get("RANK") or 0)


def all_reduced(vector: FloatArray, group: Any = None) -> FloatArray:
    """The sum over the ranks of a float64 vector; itself without torch.distributed."""
    import torch
    from torch import distributed

    if not several(group):
        return vector
    device = "cuda" if distributed.get_backend(group) == "nccl" else "cpu"
    tensor = torch.from_numpy(vector).to(device)
    distributed.all_reduce(tensor, group=group)
    total: FloatArray = tensor.cpu().numpy()
    return total


def gathered(own: Any, settings: Mapping[str, Any], group: Any = None) -> list[Any]:
    """The `own` of each rank, in order; every rank must call it. Without torch.distributed: [own].

    Raises ConfigError, on all ranks, if a rank's settings differ from the first's; it names that rank and the setting.
    """
    from torch import distributed

    if not several(group):
        return [own]
    pairs: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(pairs, (settings, own), group=group)
    first = pairs[0][0]
    for number, (others, _) in enumerate(pairs):
        for name, value in others.items():
            if value != first[name]:
                raise ConfigError(
                    f"ranks correct with different settings: rank 0 has {name}={first[name]!r}, rank {number} "
                    f"{value!r}; give the same to all"
                )
    return [owned for _, owned in pairs]


def raise_first(refusal: Exception | None, group: Any = None) -> NoReturn:
    """Raise this rank's refusal, or a ConfigError that quotes the first refusal of another rank.

    Every rank must call it, and at least one must have a refusal.
    """
    texts = gathered(None if refusal is None else f"{type(refusal).__name__}: {refusal}", {}, group)
    if refusal is not None:
        raise refusal
    number, text = next((number, text) for number, text in enumerate(texts) if text is not None)
    raise ConfigError(f"rank {number} of the group refused its batch, so no rank takes this step: {text}")


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of some numbers: their count, sum, summed squared distances from the mean, and extremes.

    a + b has the moments of both together (variances by Chan, Golub and LeVeque, 1979: nothing cancels).
    """

    count: float = 0.0
    total: float = 0.0
    spread: float = 0.0
    least: float = inf
    largest: float = -inf

    @classmethod
    def of(cls, values: FloatArray, weights: NDArray[Any] | None = None) -> Moments:
        """Moments of an array. weights: how often each number counts; a number of weight 0 is no extreme either"""
        if weights is not None:
            values, weights = values[weights > 0], weights[weights > 0]
        if not len(values):
            return cls()
        weights = np.ones(len(values)) if weights is None else weights
        count, total = float(weights.sum()), float(weights @ values)
        spread = float(weights @ (values - total / count) ** 2)
        return cls(count, total, spread, float(values.min()), float(values.max()))

    @classmethod
    def of_sums(cls, count: float, total: float, square: float, least: float = inf, largest: float = -inf) -> Moments:
        """Moments from a count, a sum and the sum of squares, `square`."""
        return cls(count, total, max(square - total**2 / count, 0.0) if count else 0.0, least, largest)

    @classmethod
    def share(cls, hits: float, count: float) -> Moments:
        """Moments of zeros and ones, of which only the mean has a meaning: the share of ones."""
        return cls(float(count), float(hits))

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        apart = (self.mean - other.mean) ** 2 * self.count * other.count / count if count else 0.0
        return Moments(
            count,
            self.total + other.total,
            self.spread + other.spread + apart,
            min(self.least, other.least),
            max(self.largest, other.largest),
        )

    @property
    def mean(self) -> float:
        """The mean; 0 without numbers."""
        return self.total / self.count if self.count else 0.0

    @property
    def mean_square(self) -> float:
        return self.spread / self.count + self.mean**2 if self.count else 0.0

    def std(self, ddof: int = 0) -> float:
        """The standard deviation; 0 for fewer than two numbers."""
        return sqrt(self.spread / (self.count - ddof)) if self.count > ddof else 0.0


Sums = dict[str, Moments]


def of_sequences(shown: FloatArray, judged: FloatArray, low: float, high: float) -> Sums:
    """Moments of `shown` [sequences], and the shares of sequences with `judged` above `high` and below `low`."""
    return {
        "sequence": Moments.of(shown),
        "sequence_above": Moments.share((judged > high).sum(), len(judged)),
        "sequence_below": Moments.share((judged < low).sum(), len(judged)),
    }


def together(sums: list[Mapping[str, Moments]]) -> Sums:
    """Sums of several ranks added up, by name."""
    return {name: sum((rows[name] for rows in sums), Moments()) for name in sums[0]}
