"""Axes and points of pictures: sensible ranges, ticks that differ, and few points for long curves."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fp8plan.model.cost.base import FloatArray

LEAST: Final = 1e-2  # least span of an axis over its largest value, so that small differences look small
LEAST_SHARE: Final = 1e-3  # the same for shares, which may be near 100%
PAD: Final = 0.04  # share of the span that is added at either end
TICKS: Final = 8  # most ticks of an axis
DECADE: Final = 1.0  # least span of a logarithmic axis, in powers of ten
SPANS: Final = 1000  # spans of a thinned curve: about one for each pixel
MOST: Final = 4 * SPANS  # most points of a curve that is not thinned


def linear(curves: Sequence[FloatArray], low: float, high: float, least: float) -> tuple[float, float]:
    """Both ends of an axis for curves whose values lie between `low` and `high`; nan is no value.

    A curve that moves by less than `least` of its largest value gets room on both sides, within these limits.
    """
    known = _known(curves)
    bottom, top = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
    low, high = min(low, bottom), max(high, top)
    if max(abs(bottom), abs(top)) < np.finfo(np.float64).tiny:  # ticks of a smaller number cannot be computed
        low, span = max(low, 0.0), 0.01 if high <= 1 else 1.0
    else:
        span = least * max(abs(bottom), abs(top))
    missing = max(0.0, span - (top - bottom))
    bottom, top = bottom - missing / 2, top + missing / 2
    shift = max(0.0, low - bottom) - max(0.0, top - high)
    bottom, top = bottom + shift, top + shift
    pad = PAD * (top - bottom)
    return bottom - pad, top + pad


def _known(curves: Sequence[FloatArray]) -> FloatArray:
    return np.concatenate([np.zeros(0), *(curve[np.isfinite(curve)] for curve in curves)])


def decimals(span: float) -> int:
    """The number of decimals that tell the ticks of an axis apart (TICKS at most)."""
    return max(0, -floor(log10(span / TICKS)))


def number_axis(curves: Sequence[FloatArray], low: float = -np.inf) -> dict[str, Any]:
    """Range and ticks of plotly's axis for plain numbers."""
    ends = linear(curves, low, np.inf, LEAST)
    places = decimals(ends[1] - ends[0])
    form = f",.{places}~f" if places <= 6 else "~e"
    return {"type": "linear", "range": ends, "tickformat": form, "hoverformat": ",.6~g"}


def share_axis(curves: Sequence[FloatArray], high: float = 1.0) -> dict[str, Any]:
    """Range and ticks of plotly's axis for shares, in per cent, from 0 on."""
    ends = linear(curves, 0.0, high, LEAST_SHARE)
    places = decimals(100 * (ends[1] - ends[0]))
    return {"type": "linear", "range": ends, "tickformat": f".{places}~%", "hoverformat": f".{places + 2}~%"}


def log_axis(curves: Sequence[FloatArray]) -> dict[str, Any]:
    """Range and ticks of plotly's logarithmic axis; a linear one if no value is above 0.

    Ticks stand at powers of 10. An axis of less than two powers has ticks at 2 and 5 times them too.
    """
    known = _known(curves)
    known = known[known > 0]
    if not known.size:
        return number_axis(curves, 0.0)
    bottom, top = float(np.log10(known.min())), float(np.log10(known.max()))
    ticks: int | str = 1 if top - bottom >= 2 else "D2"
    room = max(DECADE - (top - bottom), 2 * PAD * (top - bottom)) / 2
    return {"type": "log", "range": (bottom - room, top + room), "dtick": ticks, "tickformat": "~e"}


def thinned(values: FloatArray) -> NDArray[np.int64]:
    """Indices of the values to draw: all of a short curve, or four in each of SPANS equal spans.

    They are the first, least, greatest and last value: no spike is lost, and the line looks the same. A span without
    values keeps a gap. From "M4: A Visualization-Oriented Time Series Data Aggregation" (Jugel et al., VLDB 2014).
    """
    if len(values) <= MOST:
        return np.arange(len(values))
    kept: list[int] = []
    for part in np.array_split(np.arange(len(values)), SPANS):
        known = part[np.isfinite(values[part])]
        if known.size:
            ends = known[0], known[values[known].argmin()], known[values[known].argmax()], known[-1]
            kept += sorted(set(map(int, ends)))
        else:
            kept.append(int(part[0]))
    return np.array(kept)
