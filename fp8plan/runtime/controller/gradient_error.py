"""The law of LeastErrorThresholds: the threshold with the least mean squared error of a batch's gradient.

Write b(C) for the share of the weight that token TIS at C cuts away, m2(C) for the mean of min(ratio, C)^2, and nu for
the noise of this batch's gradient relative to its size, squared: (noise scale in tokens) / (tokens of the batch), as
in arXiv 1812.06162. The error, relative to the squared gradient, is

    J(C) = BIAS_WEIGHT b(C)^2 + nu m2(C)                          squared bias + variance

With P the share of ratios above C, b' = -P and m2' = 2 C P. P cancels in J' = 0, which leaves the law:

    b(C) = C nu / BIAS_WEIGHT          cut until the weight lost is C times the noise of the batch

The left side falls with C and the right side rises, so there is exactly one such C. It rises with the mismatch (more
lies above every C) and with the batch (less noise to save). For a mask that drops ratios above h the same steps, with
B(h) the share of the weight that lies above h, give B(h) = h nu / (2 BIAS_WEIGHT).

Both sides come from the tail P(ratio > c) on a fixed grid, which is a mean over tokens: tails of several batches
average, and one token moves P by 1 / tokens however large its ratio. Still, OUTLIER tokens are taken off the tail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from fp8plan.runtime.mismatch.sums import FloatArray

if TYPE_CHECKING:
    from fp8plan.runtime.mismatch.metrics import Mismatch

# Bounds on pi_train / pi_rollout at which the tail is kept: close to 1, for small mismatch, and far out.
GRID: Final[FloatArray] = np.exp(np.concatenate([[0.0], np.geomspace(2.0**-10, np.log(20.0), 47)]))

# The bias of a cut counts more than its square. It adds to the bias of token-level weights (prefixes and continuations
# are the rollout policy's), and the square of a sum has a cross term. Tuned in benchmarks/control; between 1 and 5 the
# error hardly changes.
BIAS_WEIGHT: Final = 2.5

OUTLIER: Final = 1.5  # tokens taken off the tail, so that one of any ratio moves nothing
LOWEST: Final = 1e-3  # smallest lower end of a band


def tail(mismatch: Mismatch) -> FloatArray:
    """Share of tokens with a ratio above each bound of GRID, less that of OUTLIER tokens; needs a token."""
    return np.maximum(mismatch.tail(GRID) - OUTLIER / mismatch.tokens, 0.0)


def cut_away(above: FloatArray, upper: float) -> FloatArray:
    """The share b at each bound of GRID, of weights up to `upper`: the integral of `above` from the bound on."""
    end = np.interp(upper, GRID, above)
    inside = np.minimum(GRID, upper)
    height = np.where(upper > GRID, above, end)
    steps = np.diff(inside) * (height[1:] + height[:-1]) / 2
    return np.concatenate([np.cumsum(steps[::-1])[::-1], [0.0]])


def cut_share(above: FloatArray, cap: float) -> float:
    """The share b at `cap`, of weights up to the end of GRID: no token moves it by more than 20 / tokens."""
    return float(np.interp(cap, GRID, cut_away(above, float(GRID[-1]))))


def best_cap(above: FloatArray, noise: float, upper: float) -> float:
    """The law's C for token TIS, in [GRID[0], upper]."""
    return _root(cut_away(above, upper) - GRID * noise / BIAS_WEIGHT, upper)


def best_mask(above: FloatArray, noise: float, upper: float) -> float:
    """The law's h for a mask that drops ratios above h, in [GRID[0], upper]."""
    dropped = cut_away(above, upper) + GRID * above
    return _root(dropped - GRID * noise / (2 * BIAS_WEIGHT), upper)


def cap_of_share(above: FloatArray, share: float, upper: float) -> float:
    """The smallest bound in [GRID[0], upper] that at most `share` of the tokens exceed."""
    return _root(above - share, upper)


def low_end(mismatch: Mismatch, low: float, high: float, kept: float) -> float:
    """`low`, lowered in steps of a tenth until [low, high] keeps the share `kept` of the tokens.

    It stops at LOWEST, and once no token is below it. Small ratios carry little variance, so dropping them does not
    lower the mean squared error: a lower end only expresses distrust of tokens that the trainer finds unlikely.
    """
    while low > LOWEST and mismatch.kept_fraction(low, high) < kept and mismatch.kept_fraction(0.0, low):
        low = max(low / 1.1, LOWEST)
    return low


def _root(falling: FloatArray, upper: float) -> float:
    """The zero of a falling function on log GRID, linear between the points; an end of the grid if there is none."""
    if falling[0] <= 0.0:
        return float(GRID[0])
    after = int(np.argmax(falling <= 0.0))
    if not after:
        return upper
    part = falling[after - 1] / (falling[after - 1] - falling[after])
    return min(float(GRID[after - 1] * (GRID[after] / GRID[after - 1]) ** part), upper)
