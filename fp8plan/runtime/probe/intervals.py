"""Intervals of a mismatch's figures, by resampling prompts.

Tokens of one sequence share its text, and sequences their prompt, so they are not independent samples; prompts are. A
resample draws as many prompts as there are, with replacement (bootstrap, 5th and 95th percentile). Every figure is made
of sums over tokens, so a resample is one row of a matrix product of counts and sums. Heavy tails are what it cannot
see: a token that is rarer than once in the sample is in no resample.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import inf, log
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fp8plan.runtime.mismatch.histogram import k3

Array = NDArray[np.float64]

RESAMPLES: Final = 4000
LEVEL: Final = 0.90
MAX_EXPONENT: Final = 20.0  # of weights, as everywhere in fp8plan; k3 itself is not clamped
WANTED: Final = 0.1  # relative half-width that `tokens_needed` is about

# Shares of tokens: name -> (of the log ratio) lowest and highest that count.
TAILS: Final = {
    "ratio_above_2": (log(2.0), inf),  # what token TIS at C = 2 cuts
    "ratio_below_half": (-inf, -log(2.0)),
}


class Interval(NamedTuple):
    """A figure and its 90% interval."""

    value: float
    low: float
    high: float


def sequence_sums(log_ratios: Sequence[ArrayLike]) -> Array:
    """Sums over the tokens of each sequence: 1, log ratio, k3, weight, weight^2, then TAILS.

    Shape (sequences, 5 + tails). Tokens that are not finite are left out.
    """
    rows = []
    for values in log_ratios:
        x = np.asarray(values, np.float64)
        x = x[np.isfinite(x)]
        weight = np.exp(np.clip(x, -MAX_EXPONENT, MAX_EXPONENT))
        tails = [((x > low) & (x < high)).sum() for low, high in TAILS.values()]
        rows.append([len(x), x.sum(), k3(x).sum(), weight.sum(), (weight**2).sum(), *tails])
    return np.array(rows, np.float64).reshape(-1, 5 + len(TAILS))


def figures(sums: Array) -> dict[str, Any]:
    """Figures kl_k3, k1, ess_raw and TAILS from sums (..., 5 + tails), each of shape (...)."""
    tokens, log_ratio, k3, weight, squares = (sums[..., i] for i in range(5))
    found = {"kl_k3": k3 / tokens, "k1": -log_ratio / tokens, "ess_raw": weight**2 / (tokens * squares)}
    return found | {name: sums[..., 5 + i] / tokens for i, name in enumerate(TAILS)}


def intervals(
    log_ratios: Sequence[ArrayLike],
    seed: int = 0,
    resamples: int = RESAMPLES,
    prompts: Sequence[Hashable] | None = None,
) -> dict[str, Interval]:
    """The figures of some sequences [tokens of each], with their intervals; the same seed gives the same ones.

    prompts: of each sequence; None: all differ

    A share that is 0 in the sample has an upper end of 2.3 / tokens, above which none of so many independent tokens
    would be found with a probability of less than 10%. Raises ValueError without a token.
    """
    sums = _by_prompt(sequence_sums(log_ratios), prompts)
    sums = sums[sums[:, 0] > 0]
    if not len(sums):
        raise ValueError("no tokens with finite log-probs")
    counts = np.random.default_rng(seed).multinomial(len(sums), np.full(len(sums), 1 / len(sums)), resamples)
    resampled = figures(counts @ sums)
    total = sums.sum(0)
    found = {}
    for name, value in figures(total).items():
        low, high = np.quantile(resampled[name], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        if name in TAILS and value == 0:
            high = -np.log(1 - LEVEL) / total[0]
        found[name] = Interval(float(value), float(low), float(high))
    return found


def _by_prompt(sums: Array, prompts: Sequence[Hashable] | None) -> Array:
    if prompts is None:
        return sums
    number = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    found = np.zeros((len(number), sums.shape[1]))
    np.add.at(found, [number[prompt] for prompt in prompts], sums)
    return found


def tokens_needed(tokens: int, kl: Interval) -> int | None:
    """The number of tokens of such sequences that would give a relative half-width of WANTED.

    Intervals shrink with the square root of that number. None if the interval says nothing (one prompt, or no mismatch
    at all).
    """
    half = (kl.high - kl.low) / 2
    return round(tokens * (half / (WANTED * kl.value)) ** 2) if kl.value > 0 and half > 0 else None
