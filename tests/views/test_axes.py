"""Axes that tell their ticks apart, and long curves that keep their spikes."""

from __future__ import annotations

import re
from math import floor, log10
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.views.axes import MOST, SPANS, decimals, linear, log_axis, number_axis, share_axis, thinned

NUMBERS = st.lists(st.floats(-1e6, 1e6).map(lambda x: float(f"{x:.9g}")), min_size=1, max_size=12)
SHARES = st.lists(st.one_of(st.floats(0, 1), st.floats(0.9999, 1), st.floats(0, 1e-5), st.just(1.0)), min_size=1)


def ticks(axis: dict[str, Any]) -> list[str]:
    """Labels of the ticks that plotly sets at 1, 2 or 5 times a power of ten, about five of them."""
    low, high = axis["range"]
    raw = (high - low) / 7
    power = 10.0 ** floor(log10(raw))
    step = next(power * x for x in (1, 2, 5, 10) if power * x >= raw * (1 - 1e-9))
    values = [n * step for n in range(int(np.ceil(low / step)), int(np.floor(high / step)) + 1)]
    form = re.fullmatch(r",?\.?(\d*)~?([fe%])", axis["tickformat"])
    assert form is not None, axis
    return [format(x, f".{form[1] or 6}{form[2]}") for x in values]


@given(SHARES)
def test_ticks_of_shares_differ_and_are_shares(values: list[float]) -> None:
    axis = share_axis([np.array(values)])
    shown = ticks(axis)
    assert len(shown) == len(set(shown)) >= 2
    assert all(0 <= float(x.rstrip("%")) <= 100 for x in shown)  # not -100%
    assert axis["range"][0] <= min(values) <= max(values) <= axis["range"][1]


@given(NUMBERS)
def test_ticks_of_numbers_differ_and_the_curve_is_inside(values: list[float]) -> None:
    axis = number_axis([np.array(values)])
    shown = ticks(axis)
    assert len(shown) == len(set(shown)) >= 2
    assert axis["range"][0] <= min(values) <= max(values) <= axis["range"][1]


@pytest.mark.parametrize(
    ("values", "low", "high", "ends"),
    [
        ([0.0, 0.0], 0.0, 1.0, (0, 0.01)),  # nothing was clipped: not -100% to 100%
        ([1.0, 1.0], 0.0, 1.0, (0.99, 1)),
        ([2.0, 2.0], -np.inf, np.inf, (1.99, 2.01)),
        ([0.0], -np.inf, np.inf, (0, 1)),
        ([np.nan], -np.inf, np.inf, (0, 1)),
        ([0.2, 0.7, np.nan, np.inf], 0.0, 1.0, (0.2, 0.7)),
        ([0.5, 1.3], 0.0, 1.0, (0.5, 1.3)),  # more than can be is shown all the same
    ],
)
def test_a_curve_that_does_not_move_has_room_where_values_can_be(
    values: list[float], low: float, high: float, ends: tuple[float, float]
) -> None:
    bottom, top = linear([np.array(values)], low, high, 0.01)
    pad = 0.04 * (ends[1] - ends[0])
    assert (bottom, top) == pytest.approx((ends[0] - pad, ends[1] + pad))


def test_decimals_grow_as_the_span_shrinks() -> None:
    assert [decimals(span) for span in (1e6, 8, 1, 0.1, 8e-4)] == [0, 0, 1, 2, 4]


def test_a_logarithmic_axis_shows_ticks_of_any_curve() -> None:
    for values in ([1e-3, 1e-3], [1e-3, 1.01e-3], [1e-9, 10.0]):
        axis = log_axis([np.array(values)])
        low, high = axis["range"]
        assert low <= np.log10(min(values)) <= np.log10(max(values)) <= high
        assert high - low >= 1 - 1e-9  # a decade has ticks at 1, 2 and 5
    assert log_axis([np.zeros(3)])["type"] == "linear"  # a KL of exactly 0 is shown, not left out


@given(st.integers(MOST + 1, 3 * MOST), st.integers(0, 5), st.randoms(use_true_random=False))
def test_a_long_curve_keeps_its_ends_its_spikes_and_its_gaps(size: int, holes: int, chance: Any) -> None:
    values = np.random.default_rng(chance.randrange(1 << 30)).normal(size=size)
    spike = chance.randrange(size)
    values[spike] = 1e6
    for _ in range(holes):
        hole = 3 * size // SPANS
        start = chance.randrange(size - hole)
        values[start : start + hole] = np.nan
    kept = thinned(values)
    assert len(kept) <= MOST
    assert (np.diff(kept) > 0).all()
    known = values[np.isfinite(values)]
    assert np.nanmax(values[kept]) == known.max()
    assert np.nanmin(values[kept]) == known.min()
    assert np.isnan(values[kept]).any() == bool(holes)
    assert thinned(values[:MOST]).tolist() == list(range(MOST))
