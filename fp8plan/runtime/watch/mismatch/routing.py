"""Routing: the share of tokens for which the trainer's routers pick other experts than the engine's."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8plan.checks import is_number
from fp8plan.errors import ConfigError
from fp8plan.runtime.watch.mismatch.sums import FloatArray, all_reduced

if TYPE_CHECKING:
    from fp8plan.runtime.watch.mismatch.measure import Tokens


def differing(tokens: Tokens, share: float) -> FloatArray:
    """Count this rank's tokens that trainer and engine route differently.

    tokens: the batch, from `pack`
    share:  the share of these tokens with another expert in at least one layer; NaN: not known

    Returns [2] float64: these tokens, and all of which it is known. Raises ConfigError for another number than 0 to 1.
    """
    if not (is_number(share, nan=True) and (isnan(share) or 0 <= share <= 1)):
        raise ConfigError(
            f"routing_differs is {share!r:.60}; allowed: the share of this rank's tokens whose experts differ, from 0 "
            "to 1, as fp8plan.runtime.routes.share_differing(...).tokens"
        )
    own = len(tokens) if tokens.own is None else len(tokens.own)
    return np.zeros(2) if isnan(share) else np.array([share * own, own])


def share_of_all(counts: FloatArray, group: Any = None) -> float | None:
    """The share among the tokens that `differing` counted on all ranks of `group`; None if it is known of none."""
    different, every = all_reduced(counts, group)
    return float(different / every) if every else None
