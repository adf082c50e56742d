"""Cells of tables: figures of several seeds or steps as text."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import fmean, stdev

from benchmarks.learning.predicted import UNSEEN


def mean(values: Sequence[float], sign: str = "") -> str:
    """A mean, and its standard error if there is more than one value."""
    error = f" ± {stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{fmean(values):{sign}.2f}{error}" if values else UNSEEN


def apart(mine: Mapping[Hashable, float], beside: Mapping[Hashable, float]) -> str:
    """The mean difference of an arm to another over the seeds that both have, with its standard error.

    Runs of the same seed begin with the same weights and draw the same problems. An arm beside itself is UNSEEN.
    """
    return UNSEEN if mine is beside else mean([mine[seed] - beside[seed] for seed in mine if seed in beside], "+")


def spread(
    values: Sequence[float | None], kind: str, middle: Callable[[list[float]], float] = fmean, unit: str = ""
) -> str:
    """The mean, or another middle, with the lowest and highest if there is more than one value."""
    known = [x for x in values if x is not None]
    if not known:
        return UNSEEN
    ends = f" ({min(known):{kind}} to {max(known):{kind}})" if len(known) > 1 else ""
    return f"{middle(known):{kind}}{unit}{ends}"
