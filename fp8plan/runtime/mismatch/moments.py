"""Moments that the figures of a batch are made of. Those of several ranks add up to those of all their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8plan.runtime.mismatch.histogram import FloatArray
from fp8plan.runtime.mismatch.ranks import gathered


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
        """Moments of an array. weights: how often each number counts; one that counts 0 times is no extreme either."""
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
        """Moments from a count, a sum, and `square`, the sum of squares."""
        return cls(count, total, max(square - total**2 / count, 0.0) if count else 0.0, least, largest)

    @classmethod
    def share(cls, hits: float, count: float) -> Moments:
        """Moments of zeros and ones. Only `mean` is meaningful: the share of ones."""
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
    """Moments of `shown` [sequences], and the shares of sequences whose `judged` is out of bounds."""
    return {
        "sequence": Moments.of(shown),
        "sequence_above": Moments.share((judged > high).sum(), len(judged)),
        "sequence_below": Moments.share((judged < low).sum(), len(judged)),
    }


def together(sums: list[Mapping[str, Moments]]) -> Sums:
    """Sums of several ranks added up, by name."""
    return {name: sum((one[name] for one in sums), Moments()) for name in sums[0]}


def reduced(sums: Sums, settings: Mapping[str, Any], group: Any = None) -> Sums:
    """Sums over all ranks of `group` (None: all), each of which must call it; unchanged without torch.distributed.

    Raises ConfigError, on all ranks, if their sums were made with different settings.
    """
    return together(gathered(sums, settings, group))
