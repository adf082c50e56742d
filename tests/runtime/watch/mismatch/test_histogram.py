"""The histogram over log ratios against exact answers."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.runtime.watch.mismatch.sums import (
    BINS,
    EDGES,
    LIMIT,
    MAGNITUDES,
    SIDE,
    FloatArray,
    bins,
    count_below,
    excess,
    quantile,
)

torch = pytest.importorskip("torch")

finite = (
    st.floats(-40, 40, width=32)
    | st.floats(-(2.0**-10), 2.0**-10, width=32)
    | st.sampled_from([0.0, -0.0, 20.0, -20.0])
)
log_ratios = st.lists(finite, min_size=1, max_size=60).map(lambda values: np.array(values, np.float32))


def counted(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    where = bins(torch.tensor(values)).numpy()
    ratios = np.exp(np.clip(values.astype(np.float64), -LIMIT, LIMIT))
    return np.bincount(where, minlength=BINS).astype(float), np.bincount(where, ratios, minlength=BINS)


def test_edges_are_symmetric_and_grow_by_a_32nd_of_a_power_of_two() -> None:
    assert (len(EDGES), BINS) == (BINS + 1, 2 * SIDE)
    assert (np.diff(EDGES) > 0).all()
    assert np.array_equal(EDGES, -EDGES[::-1])
    assert MAGNITUDES[[0, 1, -2, -1]].tolist() == [0.0, 2.0**-16, 20.0, inf]
    growth = MAGNITUDES[2:-1] / MAGNITUDES[1:-2]
    assert growth.max() <= 1 + 1 / 32
    assert growth.min() >= 1 + 1 / 64


@given(log_ratios)
def test_every_log_ratio_lies_between_the_edges_of_its_bin(values: FloatArray) -> None:
    where, exact = bins(torch.tensor(values)).numpy(), values.astype(np.float64)
    low, high = EDGES[where], EDGES[where + 1]
    assert np.where(exact >= 0, (low <= exact) & (exact < high), (low < exact) & (exact <= high)).all()


@given(log_ratios, st.floats(0, 1))
def test_a_quantile_is_within_a_bin_of_the_exact_one(values: FloatArray, share: float) -> None:
    found = quantile(counted(values)[0], share * len(values))
    sizes = np.sort(np.abs(values.astype(np.float64)))
    # Any value between the neighbours of that rank is a quantile.
    low = sizes[max(int(np.ceil(share * len(values))) - 1, 0)]
    bin_ = np.searchsorted(MAGNITUDES, low, side="right") - 1
    assert min(MAGNITUDES[bin_], LIMIT) <= found <= min(MAGNITUDES[bin_ + 1], LIMIT)


@given(log_ratios, st.floats(1e-3, 1e3))
def test_counts_below_are_off_by_less_than_what_is_in_the_bin(values: FloatArray, ratio: float) -> None:
    counts = counted(values)[0]
    exact = (values.astype(np.float64) < np.log(ratio)).sum()
    bin_ = np.searchsorted(EDGES, np.log(ratio), side="right") - 1
    assert abs(count_below(counts, np.log(ratio)) - exact) <= counts[bin_] + 1e-9


@given(log_ratios, st.floats(1e-3, 1e6))
def test_excess_is_off_by_less_than_a_bin_and_never_too_small(values: FloatArray, c: float) -> None:
    counts, ratios = counted(values)
    exact = np.maximum(np.exp(np.clip(values.astype(np.float64), -LIMIT, LIMIT)) - c, 0).sum()
    bin_ = np.searchsorted(EDGES, np.log(c), side="right") - 1
    width = np.exp(EDGES[bin_ + 1]) - np.exp(EDGES[bin_])
    rounding = 1e-9 * ratios.sum()
    assert -rounding <= excess(counts, ratios, c) - exact <= counts[bin_] * width / 4 + rounding


@given(log_ratios)
def test_excess_falls_with_c_and_is_convex(values: FloatArray) -> None:
    counts, ratios = counted(values)
    found = np.array([excess(counts, ratios, c) for c in np.linspace(0.01, 10, 50)])
    slack = 1e-9 * ratios.sum()
    assert (np.diff(found) <= slack).all()
    assert (np.diff(found, 2) >= -slack).all()


def test_nothing_counted() -> None:
    empty = np.zeros(BINS)
    assert count_below(empty, 1.0) == excess(empty, empty, 2.0) == 0.0
    assert np.isnan(quantile(empty, 0.0))
