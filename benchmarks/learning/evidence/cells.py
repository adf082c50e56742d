"""Cells of tables: figures of several seeds or steps as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, stdev

from benchmarks.learning.predicted import UNSEEN


def mean(values: Sequence[float], sign: str = "") -> str:
    """A mean, and its standard error if there is more than one value."""
    error = f" ± {stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{fmean(values):{sign}.2f}{error}" if values else UNSEEN


def spread(
    values: Sequence[float | None], kind: str, middle: Callable[[list[float]], float] = fmean, unit: str = ""
) -> str:
    """The mean, or another middle, with the lowest and highest if there is more than one value."""
    known = [x for x in values if x is not None]
    if not known:
        return UNSEEN
    ends = f" ({min(known):{kind}} to {max(known):{kind}})" if len(known) > 1 else ""
    return f"{middle(known):{kind}}{unit}{ends}"
