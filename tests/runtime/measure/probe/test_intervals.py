"""Intervals by resampling sequences: what they must hold for, and how often they hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.runtime.measure.probe.results import Interval, figures, intervals, sequence_sums, tokens_needed

log_ratios = st.lists(st.lists(st.floats(-3, 3), max_size=6), min_size=1, max_size=8).filter(lambda rows: any(rows))


@given(rows=log_ratios)
def test_figures_of_sums_are_means_over_tokens(rows: list[list[float]]) -> None:
    x = np.concatenate([np.array(row) for row in rows])
    ratio = np.exp(x)
    found = {name: interval.value for name, interval in intervals(rows, resamples=5).items()}
    assert found["kl_k3"] == pytest.approx(np.mean(ratio - 1 - x), abs=1e-9)
    assert found["k1"] == pytest.approx(np.mean(-x), abs=1e-9)
    assert found["ess_raw"] == pytest.approx(1 / np.mean((ratio / ratio.mean()) ** 2))
    assert found["ratio_above_2"] == pytest.approx(np.mean(ratio > 2))
    assert found["ratio_below_half"] == pytest.approx(np.mean(x < -np.log(2)))


@given(rows=log_ratios, seed=st.integers(0, 9))
def test_the_same_seed_gives_the_same_intervals_and_order_is_kept(rows: list[list[float]], seed: int) -> None:
    found = intervals(rows, seed, resamples=50)
    assert found == intervals(rows, seed, resamples=50)
    assert all(interval.low <= interval.high for interval in found.values())
    assert found["kl_k3"].low >= 0
    assert 0 < found["ess_raw"].low <= found["ess_raw"].high <= 1 + 1e-9


def drawn(chance: np.random.Generator, sequences: int) -> list[np.ndarray]:
    """Sequences whose noise differs from one to the next, as texts do: k3 of a token is about s^2 / 2."""
    scales = 0.05 * np.exp(0.5 * chance.standard_normal(sequences))
    return [
        s * chance.standard_normal(int(n)) for s, n in zip(scales, chance.integers(20, 200, sequences), strict=True)
    ]


@pytest.mark.slow
def test_intervals_hold_about_as_often_as_they_say() -> None:
    chance = np.random.default_rng(1)
    truth = figures(sequence_sums(drawn(chance, 20_000)).sum(0))
    tries = [intervals(drawn(chance, 100), seed=i, resamples=400) for i in range(200)]
    for name in ("kl_k3", "ess_raw", "k1"):
        held = np.mean([one[name].low <= truth[name] <= one[name].high for one in tries])
        assert 0.82 <= held <= 0.97, (name, held)


def test_tokens_of_one_sequence_are_not_taken_for_independent() -> None:
    """Shuffled into other sequences the same tokens would give a much narrower interval."""
    chance = np.random.default_rng(2)
    rows = [scale * chance.standard_normal(100) for scale in np.repeat([0.01, 0.2], 20)]
    mixed = chance.permutation(np.concatenate(rows)).reshape(40, 100)
    apart, together = intervals(rows)["kl_k3"], intervals(list(mixed))["kl_k3"]
    assert apart.value == pytest.approx(together.value)
    assert apart.high - apart.low > 3 * (together.high - together.low)


def test_tokens_needed_does_not_depend_on_how_many_there_are() -> None:
    chance = np.random.default_rng(3)
    few, many = drawn(chance, 200), drawn(chance, 3200)
    needed = [tokens_needed(sum(map(len, rows)), intervals(rows)["kl_k3"]) for rows in (few, many)]
    assert needed[0] == pytest.approx(needed[1], rel=0.5)


def test_an_interval_that_says_nothing_needs_no_number_of_tokens() -> None:
    assert tokens_needed(10, Interval(0.0, 0.0, 0.0)) is None
    assert tokens_needed(10, intervals([[0.1, 0.2]])["kl_k3"]) is None  # of one sequence


def test_a_tail_that_was_not_seen_has_an_upper_end() -> None:
    found = intervals([[0.0] * 100] * 10)["ratio_above_2"]
    assert (found.value, found.low) == (0.0, 0.0)
    assert (1 - found.high) ** 1000 == pytest.approx(0.1, rel=0.01)


def test_no_token_is_an_error() -> None:
    with pytest.raises(ValueError, match="no tokens with finite log-probs"):
        intervals([[], [float("nan")]])


def test_responses_to_one_prompt_are_not_taken_for_independent() -> None:
    """Eight responses to each of ten prompts, of which each has a mismatch of its own, say what ten sequences say."""
    chance = np.random.default_rng(4)
    scales = 0.05 * np.exp(0.7 * chance.standard_normal(10))
    rows = [scale * chance.standard_normal(100) for scale in np.repeat(scales, 8)]
    prompts = [(number,) for number in range(10) for _ in range(8)]
    alone, shared = (intervals(rows, prompts=given)["kl_k3"] for given in (None, prompts))
    whole = intervals([np.concatenate(rows[8 * i : 8 * i + 8]) for i in range(10)])["kl_k3"]
    assert shared == pytest.approx(whole)
    assert shared.value == pytest.approx(alone.value)
    assert shared.high - shared.low > 2 * (alone.high - alone.low)
