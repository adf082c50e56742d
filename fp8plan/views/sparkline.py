"""Numbers for a narrow place: bars made of letters, shares, durations."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from fp8plan.model.cost.base import FloatArray

BARS: Final = "▁▂▃▄▅▆▇█"


class Scale(NamedTuple):
    """Scale of a sparkline: its bottom, its top (None: the smallest and the largest value), and the least span.

    The span keeps noise from looking like mountains. On a log scale it is a factor.
    """

    low: float | None = None
    high: float | None = None
    span: float = 0.0
    log: bool = False


FREE: Final = Scale()


def sparkline(values: FloatArray, width: int, scale: Scale = FREE) -> str:
    """Values as bars, with a blank for a missing one.

    If there are more values than columns, each bar shows the one farthest from the median, so that a spike is never
    averaged away.
    """
    known = np.log(np.where(values > 0, values, np.nan)) if scale.log else values
    known = np.where(np.isfinite(known), known, np.nan)
    if not np.isfinite(known).any():
        return " " * min(len(known), width)
    if len(known) > width:
        middle = np.nanmedian(known)
        groups = [x[np.isfinite(x)] for x in np.array_split(known, width)]
        known = np.array([x[np.argmax(abs(x - middle))] if x.size else np.nan for x in groups])
    low = np.nanmin(known) if scale.low is None else scale.low
    high = max(np.nanmax(known), -np.inf if scale.high is None else scale.high)
    least = np.log(scale.span) if scale.log else scale.span
    if high - low < least or high == low:  # a free end makes room for what is missing, both ends half of it
        extra = max(least - (high - low), 1e-9 * max(1.0, abs(high)))
        low, high = (low - extra / 2, high + extra / 2) if scale.low is None else (low, high + extra)
    level = (known - low) / (high - low) * (len(BARS) - 1)
    return "".join(" " if np.isnan(x) else BARS[round(min(max(x, 0.0), len(BARS) - 1))] for x in level.tolist())


def percent(share: float | None) -> str:
    """A share in per cent: three digits, or as many as tell it from 0% and 100%."""
    if share is None:
        return "-"
    if 0 < share < 1e-5:
        return "<0.001%"
    if 1 - 1e-5 < share < 1:
        return ">99.999%"
    return f"{share:.3%}" if share < 0.01 or 0.999 < share < 1 else f"{share:.1%}"


def duration(seconds: float) -> str:
    """A duration such as 12 s, 3 min, 2.5 h or 4 days."""
    for size, unit in ((172800.0, "days"), (5400.0, "h"), (90.0, "min")):
        if seconds >= size:
            length = {"days": 86400.0, "h": 3600.0, "min": 60.0}[unit]
            return f"{seconds / length:.0f} {unit}" if unit != "h" else f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
