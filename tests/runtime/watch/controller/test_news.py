"""News: a batch's KL beside the median of those before, the same under every law."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mismatch_batches import after, gaussian, mismatch_of, with_outliers

from fp8plan.runtime.watch.controller.laws import ConstantThresholds, LevelThresholds
from fp8plan.runtime.watch.controller.state import Decided
from fp8plan.runtime.watch.mismatch.metrics import Mismatch

LAWS = (ConstantThresholds(), LevelThresholds(target_kl=0.01))
CALM: Mismatch = mismatch_of(gaussian(0.05, 2048).reshape(32, 64))
KLS = st.floats(0.0, 5.0)


def run(law: Any, sequence: list[float]) -> tuple[list[Decided], Any]:
    """(the decision of each step, the last state)."""
    state, said = law.initial(), []
    for kl in sequence:
        _, state, decided = law.update(state, replace(CALM, k3_robust=kl))
        said.append(decided)
    return said, state


@settings(deadline=None, max_examples=60)
@given(st.lists(KLS, min_size=1, max_size=50))
def test_news_are_the_same_under_every_law_and_never_beside_less_than_is_expected(sequence):
    both = [run(law, sequence)[0] for law in LAWS]
    figures = [[(one.baseline, one.news) for one in said] for said in both]
    assert figures[0] == figures[1]
    assert all(baseline >= 0.01 and news >= 0 for baseline, news in figures[0])


@pytest.mark.parametrize("law", LAWS)
def test_a_level_that_stays_for_20_batches_becomes_the_baseline(law):
    said, _ = run(law, [0.02] * 40 + [0.5] * 40)
    assert {one.baseline for one in said[1:60]} == {0.02}
    assert said[60].baseline == pytest.approx(0.26)  # the median of 20 batches of each
    assert {one.baseline for one in said[61:]} == {0.5}
    assert said[59].news == pytest.approx(25, rel=1e-3)
    assert said[-1].news == pytest.approx(1)


@pytest.mark.parametrize("law", LAWS)
def test_a_spike_is_news_and_what_follows_it_is_none(law):
    said, _ = run(law, [0.02] * 30 + [0.5] + [0.02] * 12)
    smoothed = 0.7 * 0.02 + 0.3 * 0.5  # which is less than this batch's
    assert said[30].news == pytest.approx(smoothed / 0.02)
    assert [one.news for one in said[31:]] == [1.0] * 12  # the smoothed KL is still high, these batches' are not


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0.02, 0.04), min_size=40, max_size=40), KLS)
def test_one_batch_moves_the_baseline_by_no_more_than_to_its_neighbours(past, kl):
    ordered = sorted(past[1:])  # with the batch, the first of 41 is forgotten
    said, _ = run(LAWS[0], [*past, kl, 0.03])
    assert (ordered[18] + ordered[19]) / 2 <= said[-1].baseline <= (ordered[19] + ordered[20]) / 2


@settings(deadline=None, max_examples=30)
@given(st.lists(KLS, max_size=90))
def test_the_past_is_that_of_40_batches(sequence):
    assert run(LAWS[0], sequence)[1].recent_kl == tuple(sequence[-40:])


@pytest.mark.parametrize("sigma", [0.0, 0.1, 0.4])
def test_one_token_of_any_ratio_is_no_news(sigma):
    plain, spoiled = with_outliers(sigma)
    for law in LAWS:
        _, state, _ = after(law, [plain] * 40)
        expected = law.update(state, plain)[2]
        for one in spoiled:
            said = law.update(state, one)[2]
            assert (said.baseline, said.news) == (expected.baseline, pytest.approx(expected.news, abs=0.05))


class Planned:
    """The part of a plan that controllers read."""

    thresholds: dict[str, Any] = {}  # noqa: RUF012
    kl_k3, kl_k3_high = 0.02, 0.05

    def select(self, choice: int | str | None = None) -> Planned:
        return self


def test_the_first_batch_is_held_against_the_expected_kl():
    plan: Any = Planned()
    seen = replace(CALM, k3_robust=0.1)
    for law, given_plan, baseline in (
        (ConstantThresholds(), None, 0.01),
        (ConstantThresholds(), plan, 0.05),
        (LevelThresholds(), plan, 0.05),
        (LevelThresholds(target_kl=0.002), plan, 0.002),
    ):
        said = law.update(law.initial(given_plan), seen)[2]
        assert (said.baseline, said.news) == (baseline, pytest.approx(0.1 / baseline))


def test_constant_thresholds_say_it():
    said, _ = run(ConstantThresholds(), [0.032, 0.001])
    assert [one.reason for one in said] == [
        "constant thresholds; KL 0.032 is 3.2 times its baseline of 0.01",
        "constant thresholds; KL 0.001 is within its baseline of 0.032",
    ]
