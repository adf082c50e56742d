"""How many experts a step's tokens hit, and how many of its rows fall on the GPU that gets the most of them.

A token picks k of E experts without replacement, so it misses a given one with probability 1 - k/E; for m independent
tokens and even routing, E (1 - (1 - k/E)^m) experts are hit in expectation.

With expert parallelism each of R ranks has E/R of the experts, and all wait for the busiest. What falls on a rank
(rows, or experts hit) is a sum over its experts. All experts are alike, so any two of these sums have the same
covariance, and where they are nearly normal the largest of R of them is expected at

    mean + sqrt(variance - covariance) * the expected largest of R standard normal variables,

with variance and covariance of the even routing above, which are exact. Of n rows on R ranks, n >> R log R, that is
n/R + O(sqrt(n/R log R)), as in Raab and Steger, "Balls into bins: a simple and tight analysis" (RANDOM 1998).
"""

from __future__ import annotations

from functools import cache
from math import erf, sqrt

import numpy as np

from fp8plan.model.architecture import Experts
from fp8plan.model.cost.base import Array


def distinct_experts(m: Array, experts: Experts) -> Array:
    """The expected number of experts that m tokens read under even routing; shape of m."""
    return np.asarray(experts.num_experts * (1 - _missed(m, experts)))


def busiest_experts(m: Array, experts: Experts, ranks: int, hit: Array | None = None) -> Array:
    """The expected number of experts that m tokens hit on the busiest rank; shape of m.

    hit: how many they hit on all ranks, where it is known; None: as under even routing
    """
    mine, every, k = experts.most_on_a_rank(ranks), experts.num_experts, experts.experts_per_token
    if hit is None:
        missed = _missed(m, experts)
        both_missed = np.power(max(0.0, (1 - k / every) * (1 - k / max(1, every - 1))), m.astype(float))
        share, spread = 1 - missed, missed - both_missed  # variance less covariance of two experts
    else:
        share = hit / every
        spread = share * (1 - share) * every / max(1, every - 1)
    return np.minimum(mine, _busiest(mine, ranks, share, spread))


def busiest_rows(m: Array, experts: Experts, ranks: int) -> Array:
    """The expected number of rows that m tokens send to the busiest rank, shape of m."""
    mine, every, k = experts.most_on_a_rank(ranks), experts.num_experts, experts.experts_per_token
    spread = m * (k / every * (every - k) / max(1, every - 1))
    return np.minimum(m * float(min(k, mine)), _busiest(mine, ranks, m * (k / every), spread))


def _busiest(mine: int, ranks: int, mean: Array, spread: Array) -> Array:
    """The expected largest of `ranks` sums over `mine` experts each.

    mean:   of one expert
    spread: variance of one expert less the covariance of two
    """
    return np.asarray(mine * mean + largest_normal(ranks) * np.sqrt(mine * spread))


@cache
def largest_normal(count: int) -> float:
    """The expected largest of so many independent standard normal variables."""
    x = np.linspace(-10.0, 10.0, 8001)
    below = np.array([0.5 * (1 + erf(value / sqrt(2))) for value in x]) ** count
    # E = integral of 1 - F over the positive numbers, less that of F over the negative ones.
    return float(np.sum(np.where(x >= 0, 1 - below, -below)) * (x[1] - x[0]) - 0.5 * (x[1] - x[0]))


def _missed(m: Array, experts: Experts) -> Array:
    """The probability that m tokens miss a given expert, shape of m."""
    return np.asarray(np.power(1 - experts.experts_per_token / experts.num_experts, m.astype(float)))
