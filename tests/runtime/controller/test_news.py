"""AdaptiveThresholds: tighter while the KL is news, back where they began once its level has stayed."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from math import inf, log
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mismatch_batches import after, gaussian, mismatch_of, with_outliers

from fp8plan.errors import ConfigError
from fp8plan.runtime.controller.laws import AdaptiveThresholds, ControllerState, Decision, Escalation
from fp8plan.runtime.controller.state import AdaptiveState
from fp8plan.runtime.mismatch.metrics import Mismatch

SETTINGS = (
    AdaptiveThresholds(),
    AdaptiveThresholds(target_kl=1e-3, memory=8),
    AdaptiveThresholds(tis=None, band=(0.5, 5.0)),
    AdaptiveThresholds(tis=3.0, band=(0.2, 4.0), max_clipped=0.1, min_kept=0.9, limit_kl=inf),
    AdaptiveThresholds(level="sequence", limit_kl=1.0),
    AdaptiveThresholds(level="geometric", tis=None, band=(0.9, 1.2)),
)
laws = st.sampled_from(SETTINGS)
kls = st.floats(0.0, 5.0)
pasts = st.lists(st.floats(1e-6, 5.0), max_size=12)


def batch(kl: float, rows: int = 32, length: int = 64, seed: int = 0) -> Mismatch:
    found: Mismatch = mismatch_of(gaussian((2 * kl) ** 0.5, rows * length, seed).reshape(rows, length))
    return found


CALM = batch(1e-3)  # ratios that no threshold touches, so that the KL alone decides
SEEN = {kl: batch(kl) for kl in (1e-3, 0.01, 0.1, 0.5, 2.0)}


def with_kl(kl: float, ratios: Mismatch = CALM) -> Mismatch:
    return replace(ratios, k3_robust=kl)


def run(law: AdaptiveThresholds, sequence: list[float], state: Any = None) -> tuple[Any, Any, Any]:
    """(reach of each step, state, last decision)."""
    state, reaches, decided = state or law.initial(), [], None
    for kl in sequence:
        _, state, decided = law.update(state, with_kl(kl))
        reaches.append(state.reach)
    return reaches, state, decided


def width(thresholds: Any) -> tuple[float, ...]:
    band = () if thresholds.band is None else (-log(thresholds.band[0]), log(thresholds.band[1]))
    return (*(() if thresholds.tis is None else (log(thresholds.tis),)), *band)


@settings(deadline=None, max_examples=200)
@given(laws, pasts, st.floats(0.4, 1.0), kls, kls, st.sampled_from(sorted(SEEN)))
def test_with_the_same_past_a_higher_kl_never_gives_a_wider_threshold(law, past, reach, one, other, ratios):
    state = run(law, past)[1]
    state = law.resume(replace(state, reach=reach), law.initial())
    low, high = (law.update(state, with_kl(kl, SEEN[ratios]))[0] for kl in sorted((one, other)))
    assert all(x <= y * (1 + 1e-12) for x, y in zip(width(high), width(low), strict=True))


@settings(deadline=None, max_examples=100)
@given(laws, pasts, st.floats(1e-6, 5.0))
def test_a_constant_kl_of_any_level_ends_at_the_initial_thresholds_unless_it_is_above_the_limit(law, past, kl):
    _, before, _ = run(law, past)
    reaches, state, decided = run(law, [kl] * (law.memory + 25), before)
    if kl <= law.limit_kl:
        assert (state.tis, state.band, state.reach) == (law.tis, law.band, 1.0)
        assert decided.decision is Decision.HOLD
    else:  # it does not relax, it escalates
        assert all(after <= before for before, after in pairwise(reaches[5:]))
        assert decided.decision is Decision.AT_BOUND
        assert state.strained > law.memory


@pytest.mark.parametrize("sigma", [0.0, 0.1, 0.4])
def test_one_token_of_any_ratio_moves_nothing(sigma):
    plain, spoiled = with_outliers(sigma)
    for law in SETTINGS:
        _, state, _ = after(law, [plain] * 60)
        for steps in (1, 10):
            expected = after(law, [plain] * steps, state)[0]
            assert [after(law, [one] * steps, state)[0] for one in spoiled] == [expected] * 4, law


@settings(deadline=None, max_examples=50)
@given(laws, pasts)
def test_what_is_not_a_number_moves_nothing(law, past):
    state = run(law, past)[1]
    for broken in (mismatch_of(np.zeros((2, 0))), with_kl(float("nan")), with_kl(inf), replace(CALM, k3=None)):
        thresholds, same, decided = law.update(state, broken)
        assert same == state
        assert (thresholds.tis, thresholds.band) == (state.tis, state.band)
        assert decided.decision is Decision.NO_DATA


@settings(deadline=None, max_examples=50)
@given(laws, pasts, pasts)
def test_a_run_resumed_from_a_saved_state_goes_on_bit_for_bit(law, first, then):
    state = run(law, first)[1]
    restored = ControllerState.from_dict(json.loads(json.dumps(state.to_dict())))
    assert isinstance(restored, AdaptiveState)
    assert law.resume(restored, law.initial()) == restored == state
    assert run(law, then, restored) == run(law, then, state)


def test_a_spike_is_cut_at_once_and_forgotten_slowly():
    law = AdaptiveThresholds()
    reaches, _, _ = run(law, [0.005] * 30 + [0.5] + [0.005] * 12)
    assert reaches[:30] == [1.0] * 30
    assert reaches[30] == 0.5  # the slew limit
    back = reaches[31:]
    assert all(1 < y / x <= 1.1 + 1e-12 for x, y in pairwise(back) if x < 1.0)
    assert back[-1] == 1.0
    assert back.index(1.0) >= 6


@pytest.mark.parametrize("limit", [inf, 0.03])
def test_a_step_is_news_for_half_the_memory(limit):
    law = AdaptiveThresholds(limit_kl=limit)
    reaches, state, decided = run(law, [0.005] * 40 + [0.5] * 40)
    stepped = reaches[40:]
    assert set(stepped[2:20]) == {0.4}
    if limit == inf:
        assert stepped[21] > 0.4
        assert stepped[-1] == 1.0
        assert decided.decision is Decision.HOLD
        return
    assert set(stepped[2:]) == {0.4}
    assert "above its limit of 0.03" in decided.reason
    reaches, _, _ = run(law, [0.005] * 20, state)  # below the limit it relaxes
    assert reaches[-1] == 1.0


def test_growth_stays_news_as_long_as_it_lasts():
    law = AdaptiveThresholds(limit_kl=inf)
    reaches, _, _ = run(law, [0.01 * 1.07**n for n in range(80)])
    assert max(reaches[30:]) < 0.85


def test_above_the_limit_it_escalates_one_thing_after_the_other():
    law = AdaptiveThresholds()
    _, state, _ = run(law, [0.005] * 10)
    asked = []
    for _ in range(6):
        _, state, decided = law.update(state, with_kl(0.2))
        asked.append(decided.escalate)
    assert asked == [None, None, Escalation.RECALIBRATE_KV, None, None, Escalation.STEP_DOWN]
    _, state, decided = law.update(state, with_kl(0.005))
    assert (state.strained, decided.escalate) == (0, None)


class Planned:
    """The part of a plan that controllers read."""

    thresholds = {"token_tis": 1.5}  # noqa: RUF012
    kl_k3, kl_k3_high = 0.02, 0.05

    def select(self, choice: int | str | None = None) -> Planned:
        return self


def test_the_baseline_begins_at_what_is_expected_and_else_at_the_first_batch():
    plan: Any = Planned()
    state = AdaptiveThresholds().initial(plan)
    assert (state.tis, state.target_kl, state.limit_kl, set(state.recent)) == (1.5, 0.05, 0.05, {0.05})
    assert AdaptiveThresholds(target_kl=1e-3).initial(plan).recent == (1e-3,) * 40
    assert AdaptiveThresholds().initial().recent == ()
    law = AdaptiveThresholds(target_kl=1e-3, limit_kl=inf, warm_up=0)
    reaches, _, decided = run(law, [0.02] * 45)
    assert reaches[0] == 0.5
    assert reaches[-1] == 1.0
    assert decided.baseline == 0.02
    seen = AdaptiveThresholds(limit_kl=inf)
    assert set(run(seen, [0.02] * 45)[0]) == {1.0}


def test_a_decision_has_its_figures_and_says_them():
    law = AdaptiveThresholds()
    _, _, decided = run(law, [0.015] * 10 + [0.09])
    assert decided.decision is Decision.TIGHTEN
    assert (decided.baseline, decided.news) == (0.015, pytest.approx((0.7 * 0.015 + 0.3 * 0.09) / 0.015))
    assert decided.reason == ("KL 0.038 is 2.5 times its baseline of 0.015 and above its limit of 0.03: C 2 -> C 1.711")


@pytest.mark.parametrize("wrong", [{"memory": 0}, {"memory": 2.5}, {"quiet": 0.9}, {"quiet": inf}, {"gain": 0.0}])
def test_settings_that_cannot_be(wrong):
    with pytest.raises(ConfigError, match="allowed"):
        AdaptiveThresholds(**wrong)


def test_settings_by_default():
    assert AdaptiveThresholds() == AdaptiveThresholds(
        tis=2.0, band=None, level="token", target_kl=None, gain=0.5, narrowest=0.4, max_clipped=0.5, min_kept=0.5,
        slew=(2.0, 1.1), dead_band=1.05, warm_up=1, patience=3, limit_kl=0.03, memory=40, quiet=1.5,
    )  # fmt: skip


def test_a_saved_past_that_is_none_is_refused():
    saved = AdaptiveThresholds().initial().to_dict()
    for wrong in ("x", None, [float("nan")], [True]):
        with pytest.raises(ConfigError, match="a saved recent is"):
            ControllerState.from_dict(saved | {"recent": wrong})
