"""Routing: the share of tokens for which the trainer's router picks other experts than the engine's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fp8plan.errors import ConfigError
from fp8plan.runtime.watch.mismatch.sums import FloatArray, all_reduced

if TYPE_CHECKING:
    from fp8plan.runtime.watch.mismatch.measure import Array, Tokens


def rerouted(tokens: Tokens, differs: Array) -> FloatArray:
    """Count the tokens of this rank with other experts in the trainer than in the engine.

    tokens:  the batch, from `pack`
    differs: in the form of the log-probs; bool, or numbers that are 0 or 1: true for a token with another expert in at
             least one layer

    Returns [2] float64: the number of these tokens, and of all valid ones. Raises ConfigError for another shape, and
    for other numbers.
    """
    values = tokens.select(differs)
    other = (values != 0) & (values != 1)
    if bool(other.any()):
        raise ConfigError(
            f"routing_differs holds {values[other][0].item()!r}; allowed: 1 for a token with another expert in at "
            "least one layer, and 0 for the others"
        )
    return np.array([int(values.count_nonzero()), len(values)], dtype=np.float64)


def share(counts: FloatArray, group: Any = None) -> float | None:
    """The share of the tokens that `rerouted` counted, over all ranks of `group`; None without a token."""
    different, every = all_reduced(counts, group)
    return float(different / every) if every else None
