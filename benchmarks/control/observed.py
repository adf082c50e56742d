"""A simulated batch as controllers see it: the fields of runtime.mismatch.metrics.Mismatch that they read.

They are computed exactly, from all ratios; the real one works from sums and a histogram, and tests compare the two.
Token level only.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fp8plan.runtime.mismatch.metrics import LARGEST, Ratios

Floats = NDArray[np.float64]
WINSORISED = 1e-3  # share of tokens, the farthest, that count in k3_robust as if they lay at its edge


class Observed:
    """log_ratio: (tokens,) train - rollout of one batch."""

    def __init__(self, log_ratio: Floats) -> None:
        order = np.sort(np.asarray(log_ratio, np.float64).ravel())
        self.log_ratio = order
        self.ratio = np.exp(np.clip(order, -20.0, 20.0))
        self._above = np.concatenate([np.cumsum(self.ratio[::-1])[::-1], [0.0]])  # sum of ratio from here on
        self._kept: dict[tuple[float, float], float] = {}  # several controllers ask for the same
        self.tokens = order.size

    @cached_property
    def k1(self) -> float:
        return float(-np.mean(self.log_ratio))

    @cached_property
    def k3(self) -> float:
        return float(np.mean(np.expm1(self.log_ratio) - self.log_ratio))

    @cached_property
    def k3_robust(self) -> float:
        beyond = max(WINSORISED, min(2, self.tokens / 2) / self.tokens)  # two tokens at least
        edge = np.quantile(np.abs(self.log_ratio), 1.0 - beyond)
        held = np.clip(self.log_ratio, -edge, edge)
        return float(np.mean(np.expm1(held) - held))

    @cached_property
    def chi2_token(self) -> float:
        return float(np.mean(self.ratio**2) - 1.0)

    @cached_property
    def ess_raw(self) -> float:
        return float(np.mean(self.ratio) ** 2 / np.mean(self.ratio**2))

    @cached_property
    def mean_ratio(self) -> float:
        return float(np.mean(self.ratio))

    @cached_property
    def mean_ratio_error(self) -> float:
        return float(np.std(self.ratio) / np.sqrt(self.tokens))

    invalid_share = placeholder_share = 0.0

    def clipped_mass(self, c: float) -> float:
        """The share of the weight that token TIS at c would cut away."""
        first = int(np.searchsorted(self.ratio, c, side="right"))
        return float((self._above[first] - c * (self.tokens - first)) / self._above[0])

    def cut_share(self, c: float, level: Ratios = "token") -> float:
        """clipped_mass of ratios up to LARGEST, without the two largest."""
        counted = np.minimum(self.ratio[: max(self.tokens - 2, 0)], LARGEST)
        return float(np.maximum(counted - c, 0.0).sum() / counted.sum())

    def unit(self, level: Ratios) -> float:
        """Tokens that share one ratio."""
        return 1.0

    def kept_fraction(self, low: float, high: float, level: Ratios = "token") -> float:
        """The share of tokens with low <= ratio <= high."""
        if (low, high) not in self._kept:
            first = np.searchsorted(self.ratio, low, side="left")
            last = np.searchsorted(self.ratio, high, side="right")
            self._kept[low, high] = float((last - first) / self.tokens)
        return self._kept[low, high]

    def tail(self, bounds: Floats) -> Floats:
        """The share of tokens with a ratio above each of `bounds`."""
        return np.array([1.0 - self.kept_fraction(0.0, float(c)) for c in bounds])
