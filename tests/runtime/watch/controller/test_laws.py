"""LevelThresholds: tighter as the KL rises, within bounds, slowly back; and what all controllers share."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from math import log
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mismatch_batches import after, gaussian, mismatch_of, with_outliers

from fp8plan.errors import ConfigError
from fp8plan.runtime.watch.controller.alarms import Alarm
from fp8plan.runtime.watch.controller.laws import ConstantThresholds, LevelThresholds, after_correction, shown
from fp8plan.runtime.watch.controller.state import (
    AlarmLimits,
    ControllerState,
    Decided,
    Decision,
    Escalation,
    LevelState,
)
from fp8plan.runtime.watch.correction.settings import Thresholds
from fp8plan.runtime.watch.mismatch.metrics import Mismatch
from fp8plan.runtime.watch.mismatch.sampling import Sampling

SETTINGS = (
    LevelThresholds(),
    LevelThresholds(tis=None, band=(0.5, 5.0)),
    LevelThresholds(tis=3.0, band=(0.2, 4.0), max_clipped=0.1, min_kept=0.9),
    LevelThresholds(level="sequence"),
    LevelThresholds(level="sequence", tis=None, band=(0.1, 10.0)),
    LevelThresholds(level="geometric", tis=1.1),
    LevelThresholds(level="geometric", tis=None, band=(0.9, 1.2)),
)
LAWS = (LevelThresholds(), ConstantThresholds())
CONTROLLERS = (*SETTINGS, ConstantThresholds())
KLS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # of Gaussian log ratios; the target is 0.01
tightening = st.sampled_from(SETTINGS)
reaches = st.floats(0.4, 1.0)
kls = st.floats(0.0, 5.0)
pasts = st.lists(st.floats(0.0, 5.0), max_size=12)


def batch(kl: float, sequences: int = 64, length: int = 64, seed: int = 0) -> Mismatch:
    """Sequences of tokens whose log ratios are normal, with k3 = kl."""
    found: Mismatch = mismatch_of(gaussian((2 * kl) ** 0.5, sequences * length, seed).reshape(sequences, length))
    return found


BATCHES = {kl: [batch(kl, seed=seed) for seed in range(5)] for kl in KLS}
SEEN = {kl: found[0] for kl, found in BATCHES.items()}


def width(thresholds: Any) -> tuple[float, ...]:
    """The distance of each threshold from 1, as a logarithm. Wider means that none of them is smaller."""
    band = () if thresholds.band is None else (-log(thresholds.band[0]), log(thresholds.band[1]))
    return (*(() if thresholds.tis is None else (log(thresholds.tis),)), *band)


def no_wider(one: Any, other: Any) -> bool:
    return all(x <= y * (1 + 1e-12) for x, y in zip(width(one), width(other), strict=True))


def state_of(controller: LevelThresholds, reach: float, kl: float | None) -> LevelState:
    """The state after some steps that led to this reach and smoothed KL."""
    fresh = controller.initial()
    return controller.resume(replace(fresh, reach=reach, kl=kl, steps=9), fresh)


def with_kl(kl: float) -> Mismatch:
    """A batch whose limits are those of KL 0.03, with another KL."""
    return replace(SEEN[0.03], k3_robust=kl)


@settings(deadline=None, max_examples=100)
@given(tightening, pasts, reaches, kls, kls, st.sampled_from(KLS))
def test_with_the_same_past_a_higher_kl_never_gives_a_wider_threshold(controller, past, reach, one, other, ratios):
    """For ratios whose limits are the same: only the KL is another."""
    state, seen = controller.initial(), SEEN[ratios]
    for kl in past:
        _, state, _ = controller.update(state, with_kl(kl))
    state = controller.resume(replace(state, reach=reach), controller.initial())
    low, high = (controller.update(state, replace(seen, k3_robust=kl))[0] for kl in sorted((one, other)))
    assert no_wider(high, low)


@settings(deadline=None, max_examples=60)
@given(tightening, st.lists(st.sampled_from(sorted(SEEN)), min_size=1, max_size=12))
def test_thresholds_stay_between_the_initial_ones_and_the_narrowest(controller, sequence):
    state = controller.initial()
    first = width(state.thresholds)
    for kl in sequence:
        thresholds, state, decided = controller.update(state, SEEN[kl])
        found = width(thresholds)
        assert all(controller.narrowest * x <= y * (1 + 1e-9) for x, y in zip(first, found, strict=True))
        assert no_wider(thresholds, controller.initial().thresholds)
        assert decided.reason


@settings(deadline=None, max_examples=60)
@given(tightening, reaches, kls, st.sampled_from(sorted(SEEN)))
def test_no_tightening_past_the_cap_or_the_floor_in_this_very_batch(controller, reach, before, kl):
    """Shares are taken at the level of the thresholds. A band widens to keep the floor if the initial band keeps it."""
    seen, old = SEEN[kl], state_of(controller, reach, before)
    thresholds, state, decided = controller.update(old, seen)
    cut = 0.0 if thresholds.tis is None else seen.cut_share(thresholds.tis, controller.level)
    kept, kept_at_start = (
        1.0 if band is None else seen.kept_fraction(*band, controller.level)
        for band in (thresholds.band, old.start.band)
    )
    assert (cut <= controller.max_clipped and kept >= controller.min_kept) or state.reach >= old.reach
    assert kept >= controller.min_kept or kept_at_start < controller.min_kept
    widened = state.reach > old.reach and state.kl > state.target_kl and decided.decision is Decision.AT_BOUND
    assert not widened or thresholds.band is not None


@pytest.mark.parametrize("hold", [1, 15])
@pytest.mark.parametrize("controller", SETTINGS)
def test_ratios_that_spread_are_never_met_by_a_wider_threshold(controller, hold):
    """The mismatch grows in steps or stays. Only a limit in the way widens a band, and the decision says so."""
    stream = {(kl, seed): BATCHES[kl][seed % 5] for kl in KLS for seed in range(hold)}
    state, before, last = controller.initial(), controller.initial().thresholds, None
    for kl in KLS:
        for seed in range(hold):
            thresholds, state, decided = controller.update(state, stream[kl, seed])
            if not no_wider(thresholds, before):  # a band, as far as it takes to keep the floor
                assert decided.decision is Decision.AT_BOUND
                tighter = tuple(x**0.97 for x in thresholds.band)  # a step of the search and a little
                kept = [stream[kl, seed].kept_fraction(*x, controller.level) for x in (tighter, thresholds.band)]
                assert kept[0] < controller.min_kept <= kept[1]
            assert no_wider(thresholds, controller.initial().thresholds)
            before, last = thresholds, decided
        if kl <= 0.01:
            assert width(thresholds) == width(controller.initial().thresholds)
    assert last is not None
    tighter = width(thresholds) != width(controller.initial().thresholds)
    assert tighter or last.decision is Decision.AT_BOUND


def test_c_of_token_tis_over_growing_kl():
    state, chosen = LevelThresholds().initial(), []
    for kl in KLS:
        for seed in range(15):
            thresholds, state, _ = LevelThresholds().update(state, BATCHES[kl][seed % 5])
        chosen.append(round(thresholds.tis, 1))
    assert chosen == [4.0, 4.0, 4.0, 4.0, 4.0, 3.1, 2.5, 2.1, 2.1, 2.1, 2.1]


@settings(deadline=None, max_examples=100)
@given(tightening, reaches, kls, st.sampled_from(sorted(SEEN)))
def test_it_tightens_fast_and_relaxes_slowly(controller, reach, before, kl):
    """No faster than the slew; only a limit widens at once."""
    state = state_of(controller, reach, before)
    _, new, _ = controller.update(state, SEEN[kl])
    assert new.reach >= state.reach / controller.slew[0] * (1 - 1e-12)
    calm = replace(controller, max_clipped=1.0, min_kept=1e-9, level="token")
    assert calm.update(state, SEEN[kl])[1].reach <= state.reach * controller.slew[1] * (1 + 1e-12)


def test_steps_up_and_down():
    controller = LevelThresholds(tis=2.0)
    _, state, _ = after(controller, [SEEN[1e-3]] * 10)
    up, down = [], []
    for _ in range(15):
        thresholds, state, _ = controller.update(state, SEEN[0.1])
        up.append(thresholds.tis)
    for _ in range(40):
        thresholds, state, _ = controller.update(state, SEEN[1e-3])
        down.append(thresholds.tis)
    assert up[0] < 1.8
    assert abs(up[4] / up[-1] - 1) < 0.05  # there after five steps
    assert down.index(2.0) >= 9  # and back, exactly, in no less than ten
    assert set(down[down.index(2.0) :]) == {2.0}
    assert all(y >= x for x, y in pairwise(down))


def test_hysteresis():
    """A KL that moves within the dead band moves no threshold, on the way up or down."""
    controller = LevelThresholds(tis=2.0)
    _, state, _ = after(controller, [SEEN[0.1]] * 40)
    for factor in (0.9, 1.0, 1.1):
        seen = replace(SEEN[0.1], k3_robust=factor * SEEN[0.1].k3_robust)
        thresholds, _, decided = after(controller, [seen] * 10, state)
        assert thresholds.tis == state.thresholds.tis
        assert decided.decision is Decision.HOLD
    # Around the target nothing flutters.
    _, state, _ = after(controller, [SEEN[1e-3]] * 3)
    for kl in (0.009, 0.011, 0.009, 0.011):
        thresholds, state, _ = controller.update(state, with_kl(kl))
        assert thresholds.tis == 2.0


@pytest.mark.parametrize("controller", CONTROLLERS)
@settings(deadline=None, max_examples=8)
@given(past=pasts, then=st.lists(st.floats(0.0, 5.0), min_size=1, max_size=8))
def test_a_run_resumed_from_a_saved_state_goes_on_bit_for_bit(controller, past, then):
    state = controller.initial()
    for kl in past:
        _, state, _ = controller.update(state, with_kl(kl))
    restored = ControllerState.from_dict(json.loads(json.dumps(state.to_dict())))
    assert type(restored) is type(state)
    assert controller.resume(restored, controller.initial()) == restored == state
    rest = [with_kl(kl) for kl in then]
    assert after(controller, rest, restored) == after(controller, rest, state)


@pytest.mark.parametrize("sigma", [0.0, pytest.param(0.1, marks=pytest.mark.slow), 0.4])
def test_one_token_of_any_ratio_moves_nothing(sigma):
    plain, spoiled = with_outliers(sigma)
    for controller in SETTINGS:
        _, state, _ = after(controller, [plain] * 40)
        for steps in (1, 10):  # nor does one in every step
            expected = after(controller, [plain] * steps, state)[0]
            assert [after(controller, [one] * steps, state)[0] for one in spoiled] == [expected] * 4, controller


@pytest.mark.parametrize("outlier", [5.0, 20.0, 50.0])
@pytest.mark.parametrize("controller", [*SETTINGS, *CONTROLLERS[-1:]])
def test_how_far_out_an_outlier_lies_says_nothing_even_in_a_tiny_batch(controller, outlier):
    plain = gaussian(0.3, 160).reshape(16, 10)
    _, state, _ = after(controller, [mismatch_of(plain)] * 6)
    chosen = []
    for x in (4.0, outlier):
        spoiled = plain.copy()
        spoiled[3, 7] = x
        chosen.append(controller.update(state, mismatch_of(spoiled))[0])
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_one_bad_batch_does_not_rule_for_long_after_it(controller):
    """1% of its tokens at e^18, among batches of KL 0.001. Where it stays that bad, it is known at once."""
    spoiled = gaussian(0.05).reshape(50, 80)
    spoiled[:, 0] = 18.0
    bad = mismatch_of(spoiled)
    assert bad.k3_robust > 1e5
    _, state, found = after(controller, [*[SEEN[1e-3]] * 5, bad])
    assert Alarm.KL in found.alarms
    sounding = 0
    while Alarm.KL in found.alarms:
        _, state, found = controller.update(state, SEEN[1e-3])
        sounding += 1
    assert sounding <= 12
    assert Alarm.BROKEN in after(controller, [*[SEEN[1e-3]] * 5, bad, bad])[2].alarms


def test_a_thousand_calm_steps_wind_nothing_up():
    controller = LevelThresholds()
    _, once, _ = after(controller, [SEEN[1e-4]] * 4)
    _, long, _ = after(controller, [SEEN[1e-4]] * 1_000)
    assert (once.reach, once.strained, once.kl) == (long.reach, long.strained, pytest.approx(long.kl))


@pytest.mark.parametrize("controller", CONTROLLERS)
@settings(deadline=None, max_examples=10)
@given(past=pasts)
def test_what_is_not_a_number_moves_nothing(controller, past):
    state = controller.initial()
    for kl in past:
        _, state, _ = controller.update(state, with_kl(kl))
    empty = mismatch_of(np.zeros((2, 0)))
    broken = [empty] + [replace(SEEN[0.1], **{name: bad}) for name in ("k3", "k3_robust", "chi2_token", "k1")
                        for bad in (float("nan"), None)]  # fmt: skip
    for one in broken:
        thresholds, same, decided = controller.update(state, one)
        assert same == state
        assert thresholds == state.thresholds
        assert (decided.decision, decided.baseline, decided.news) == (Decision.NO_DATA, None, None)


def test_warm_up_keeps_the_initial_thresholds():
    controller = LevelThresholds(tis=2.5, warm_up=3)
    state, said = controller.initial(), []
    for _ in range(4):
        thresholds, state, decided = controller.update(state, SEEN[0.3])
        said.append((thresholds.tis, decided.decision))
    assert said[:3] == [(2.5, Decision.WARM_UP)] * 3
    assert said[3][0] < 2.5
    assert said[3][1] is Decision.TIGHTEN


@pytest.mark.parametrize(
    ("controller", "kl", "why"),
    [
        (LevelThresholds(tis=2.0, max_clipped=0.05), 0.3, "of the weight would be cut away, above 5.0%"),
        (LevelThresholds(tis=None, band=(0.5, 5.0), min_kept=0.9), 0.3, "of the tokens would be kept, below 90.0%"),
        (LevelThresholds(level="sequence", tis=None, band=(0.5, 2.0)), 0.1, "of the tokens would be kept"),
        (LevelThresholds(narrowest=0.9), 0.3, "as tight as it gets"),
    ],
)
def test_at_a_bound_it_says_so_and_asks_once_to_recalibrate_and_never_to_step_down(controller, kl, why):
    state, said = after(controller, [SEEN[kl]] * 30)[1], []
    state = replace(state, strained=0)
    for _ in range(9):
        _, state, decided = controller.update(state, SEEN[kl])
        assert decided.decision is Decision.AT_BOUND
        assert why in decided.reason
        said.append(decided.escalate)
    assert said == [None, None, Escalation.RECALIBRATE_KV, *[None] * 6]
    # One batch that is well again ends it, though the smoothed KL is not.
    _, state, decided = controller.update(state, SEEN[1e-3])
    assert (decided.escalate, state.strained) == (None, 0)


SMALL = {"tokens": 16, "sequences": 4}


@pytest.mark.parametrize(
    ("controller", "size", "spared"),
    [
        (LevelThresholds(), {}, 2 / 4096),  # two tokens
        (LevelThresholds(level="sequence"), {}, 2 / 64),  # two sequences
        (LevelThresholds(), SMALL, 2 / 16),
        (LevelThresholds(level="geometric"), SMALL, 1 / 4),  # half the way, where two are more
        (LevelThresholds(level="sequence", min_kept=0.75), SMALL, 1 / 8),
        (LevelThresholds(level="sequence", max_clipped=0.25), SMALL, 1 / 8),
    ],
)
@pytest.mark.parametrize("limited", ["tis", "band"])
def test_tightening_stops_two_tokens_or_half_the_way_before_a_limit(monkeypatch, controller, size, spared, limited):
    """With C the share of the weight that is cut away is known here, with a band that of the tokens that are kept."""
    most, least = controller.max_clipped - spared, controller.min_kept + spared
    exact, beyond = (least, np.nextafter(least, 0)) if limited == "band" else (most, np.nextafter(most, 1))
    law = controller if limited == "tis" else replace(controller, tis=None, band=(0.5, 2.0))
    seen = replace(SEEN[0.1], **size)
    monkeypatch.setattr(Mismatch, "cut_share" if limited == "tis" else "kept_fraction", lambda *_: share)
    old = state_of(law, 1.0, 0.1)
    share = exact
    _, new, decided = law.update(old, seen)
    assert (new.reach, decided.decision) == (pytest.approx((0.01 / new.kl) ** 0.2), Decision.TIGHTEN)
    share = beyond
    thresholds, new, decided = law.update(old, seen)
    assert (new.reach, decided.decision) == (1.0, Decision.AT_BOUND)
    assert (thresholds.tis, thresholds.band) == (law.tis, law.band)
    words = f"kept, below {least:.1%}" if limited == "band" else f"cut away, above {most:.1%}"
    assert decided.reason.endswith(words)


def test_a_band_widens_at_once_for_the_tokens_that_it_must_keep_and_no_further(monkeypatch):
    """Tokens are kept by a band of [0.5^0.8, 2^0.8] and wider. One that is exactly `min_kept` is enough."""
    law = LevelThresholds(tis=None, band=(0.5, 2.0), narrowest=0.4)
    monkeypatch.setattr(Mismatch, "kept_fraction", lambda self, low, high, *_: 0.5 if high >= 2**0.8 else 0.49)
    thresholds, new, decided = law.update(state_of(law, 0.5, 0.1), SEEN[0.1])
    reaches = np.geomspace(0.4, 1.0, 33)
    assert new.reach == reaches[reaches >= 0.8][0]
    assert thresholds.band == (0.5**new.reach, 2.0**new.reach)
    assert decided.decision is Decision.AT_BOUND
    monkeypatch.setattr(Mismatch, "kept_fraction", lambda self, low, high, *_: 0.5 if high >= 2 else 0.49)
    assert law.update(state_of(law, 0.5, 0.1), SEEN[0.1])[0].band == (0.5, 2.0)
    # If even the initial band keeps too few, it stays where it is.
    monkeypatch.setattr(Mismatch, "kept_fraction", lambda *_: 0.49)
    _, new, decided = law.update(state_of(law, 0.64, 0.1), SEEN[0.1])
    assert new.reach == 0.64
    assert decided.reason.endswith("49.0% of the tokens would be kept, below 50.0%")


def test_the_reason_names_the_limit_that_one_step_tighter_would_pass(monkeypatch):
    """At a reach r the share of the weight that is cut away is 1 - r."""
    monkeypatch.setattr(Mismatch, "cut_share", lambda self, c, level: 1 - np.log2(c))
    law, seen = LevelThresholds(2.0, narrowest=0.4), replace(SEEN[0.1], k3_robust=3.0)
    reaches = np.geomspace(0.4, 1.0, 33)
    least = int(np.argmax(1 - reaches <= 0.5 - 2 / 4096))
    _, new, decided = law.update(state_of(law, 1.0, 3.0), seen)
    assert new.reach == reaches[least]
    limit = f"no tighter: {1 - reaches[least - 1]:.1%} of the weight would be cut away, above 50.0%; 3 steps in a row"
    assert limit in decided.reason
    _, new, decided = law.update(state_of(law, 1.0, 0.1), SEEN[0.1])  # here the law itself stops before
    assert (new.reach, decided.decision) == (pytest.approx((0.01 / new.kl) ** 0.2), Decision.TIGHTEN)


def test_at_its_target_the_kl_asks_for_nothing_whatever_the_limits(monkeypatch):
    monkeypatch.setattr(Mismatch, "kept_fraction", lambda *_: 0.4)
    law = LevelThresholds(tis=None, band=(0.5, 2.0), target_kl=0.02, warm_up=0)
    for kl, decision, words in (
        (0.02, Decision.HOLD, "KL 0.02 is within its target of 0.02: [0.5, 2] kept"),
        (0.03, Decision.AT_BOUND, "KL 0.03 is 1.5 times its target of 0.02: [0.5, 2] kept, and no tighter: "),
    ):
        decided = law.update(law.initial(), with_kl(kl))[2]
        assert decided.decision is decision
        assert decided.reason.startswith(words)


def test_it_is_as_tight_as_it_gets_at_the_narrowest_and_below_what_leads_there():
    law = LevelThresholds(gain=1.0, narrowest=0.5, dead_band=1.0, target_kl=0.01)
    narrowest = replace(law.initial(), reach=0.5, steps=9)
    assert [law.update(narrowest, with_kl(kl))[2].decision for kl in (0.02, 0.021)] == [
        Decision.HOLD,
        Decision.AT_BOUND,
    ]


def test_changes_as_large_as_the_dead_band_are_not_made():
    law = LevelThresholds(dead_band=1.25, slew=(2.0, 2.0))
    assert [law._slewed(0.625, 0.5), law._slewed(0.5, 0.625)] == [0.625, 0.5]
    assert [law._slewed(0.625, 0.49), law._slewed(0.5, 0.63)] == [0.49, 0.63]


def test_a_decision_says_from_where_to_where_the_thresholds_go():
    law = LevelThresholds(tis=2.0, band=(0.5, 5.0), warm_up=0)
    _, state, tighter = law.update(law.initial(), with_kl(0.1))
    assert tighter.reason == "KL 0.1 is 10.0 times its target of 0.01: C 2 and [0.5, 5] -> C 1.549 and [0.6457, 2.761]"
    assert law.update(replace(state, kl=0.0), with_kl(0.0))[2].reason == (
        "KL 0 is within its target of 0.01: C 1.549 and [0.6457, 2.761] -> C 1.583 and [0.6318, 2.904]"
    )
    assert shown(Thresholds(None)) == "none"


@pytest.mark.parametrize("controller", [LevelThresholds(warm_up=0), LevelThresholds(warm_up=9), ConstantThresholds()])
def test_without_any_mismatch_nothing_moves_and_no_kl_alarm_sounds(controller):
    thresholds, _, decided = after(controller, [mismatch_of(np.zeros(100))] * 2)
    assert (thresholds.tis, decided.alarms, decided.escalate) == (controller.tis, (Alarm.IDENTICAL,), None)


def test_limits_that_the_initial_thresholds_pass_are_no_alarm_while_the_kl_is_as_expected():
    """A band over long sequences drops most of them, whatever the precision: nothing to step down for."""
    controller = LevelThresholds(level="sequence", tis=None, band=(0.9, 1.1))
    thresholds, _, decided = after(controller, [SEEN[3e-3]] * 9)
    assert SEEN[3e-3].kept_fraction(0.9, 1.1, "sequence") < 0.3
    assert (thresholds.band, decided.decision, decided.escalate) == ((0.9, 1.1), Decision.HOLD, None)


@pytest.mark.parametrize("controller", LAWS)
def test_a_kl_beyond_repair_escalates_at_once(controller):
    state, said = after(controller, [SEEN[1e-3]] * 2)[1], []
    for _ in range(8):
        _, state, decided = controller.update(state, mismatch_of(gaussian(1.0) - 3.0))
        said.append((Alarm.BROKEN in decided.alarms, decided.escalate))
    first = [broken for broken, _ in said].index(True)
    steps = (True, None), (True, None)
    assert said[first : first + 4] == [(True, Escalation.RECALIBRATE_KV), *steps, (True, Escalation.STEP_DOWN)]


@pytest.mark.parametrize("controller", LAWS)
@pytest.mark.parametrize(
    ("has", "due", "said"),
    [
        (tuple(Escalation), [Escalation.RECALIBRATE_KV, Escalation.STEP_DOWN], ["recalibrate the scales", "step down"]),
        ((Escalation.STEP_DOWN,), [Escalation.STEP_DOWN] * 2, ["step down to a safer precision"] * 2),
        ((Escalation.RECALIBRATE_KV,), [Escalation.RECALIBRATE_KV, None], ["recalibrate the scales", "no safer"]),
        ((), [None, None], ["there is no safer precision left"] * 2),
    ],
)
def test_only_an_action_that_the_engine_has_is_due(controller, has, due, said):
    asked, state, found = [], controller.initial(), []

    def can(action: Escalation) -> bool:
        asked.append(action)
        return action in has

    for _ in range(9):
        _, state, decided = controller.update(state, mismatch_of(gaussian(1.0) - 3.0), can)
        if " steps in a row beyond what thresholds can do: " in decided.reason:
            found.append((decided.escalate, decided.reason, state.strained))
        else:
            assert decided.escalate is None
    assert [action for action, _, _ in found][:2] == due
    assert all(words in reason for (_, reason, _), words in zip(found, said, strict=False))
    assert all(f"; {strained} steps in a row" in reason for _, reason, strained in found)
    assert len(asked) < 9  # an engine is asked only when an action is due


def corrected(lost: float, level: str = "token", mean: float | None = None) -> Any:
    """A Correction with these figures. mean: of 64 raw weights of sequences, whose spread is 0.1"""
    sums = {} if mean is None else {"raw_sequences": SimpleNamespace(count=64, mean=mean, std=lambda _: 0.1)}
    return SimpleNamespace(settings=SimpleNamespace(level=level), sums=sums, lost_weight=lost)


CALM = Decided(Decision.HOLD, "calm")
TOP_P = Sampling(top_p=0.9)
GREEDY_TRAINER = Sampling(temperature=0.7)  # which may be the trainer's, too


@pytest.mark.parametrize(
    ("correction", "clipped", "alarms"),
    [
        (corrected(0.5), False, ()),
        (corrected(0.51), False, (Alarm.LOST,)),
        (corrected(0.1), True, (Alarm.KV_CLIP,)),
        (corrected(0.6), True, (Alarm.LOST, Alarm.KV_CLIP)),
        (corrected(0.1, "sequence", 1.2), False, (Alarm.UNIT_MEAN,)),
        (corrected(0.1, "token", 1.2), False, ()),
        (corrected(0.1, "sequence", 1.1), False, ()),  # within 0.05 and five standard errors
    ],
)
def test_the_corrected_batch_and_its_rollout_add_alarms_in_order(correction, clipped, alarms):
    assert after_correction(CALM, AlarmLimits(), correction, clipped, None) == replace(CALM, alarms=alarms)
    both = replace(CALM, alarms=(Alarm.KL, Alarm.INVALID, *alarms))
    found = after_correction(both, AlarmLimits(), correction, clipped, None).alarms
    assert found == tuple(alarm for alarm in Alarm if alarm in both.alarms)


def test_a_biased_sampling_is_a_reason_and_no_guess_stands_beside_it():
    guessed = replace(CALM, alarms=(Alarm.KL, Alarm.UNITS, Alarm.PLACEHOLDERS))
    found = after_correction(guessed, AlarmLimits(), corrected(0.1), False, TOP_P)
    assert found.alarms == (Alarm.KL,)
    assert found.reason == "; ".join(("calm", *TOP_P.remarks()))
    assert after_correction(guessed, AlarmLimits(), corrected(0.1), False, Sampling()) == guessed


def test_a_sampling_that_may_bias_is_a_reason_with_the_alarm_of_the_mean_alone():
    assert not GREEDY_TRAINER.biased
    assert GREEDY_TRAINER.remarks()
    assert after_correction(CALM, AlarmLimits(), corrected(0.1), False, GREEDY_TRAINER) == CALM
    off = after_correction(CALM, AlarmLimits(), corrected(0.1, "sequence", 1.2), False, GREEDY_TRAINER)
    assert off.reason == "; ".join(("calm", *GREEDY_TRAINER.remarks()))
    guessed = replace(CALM, alarms=(Alarm.UNIT_MEAN, Alarm.PLACEHOLDERS))
    assert after_correction(guessed, AlarmLimits(), corrected(0.1), False, GREEDY_TRAINER).alarms == guessed.alarms


def test_alarms_tell_what_kl_does_not():
    few = gaussian(0.05)
    few[:60] = np.log(30.0)
    found = ConstantThresholds().update(ConstantThresholds().initial(), mismatch_of(few))[2]
    assert {Alarm.RAW_ESS, Alarm.CHI2, Alarm.TAIL} <= set(found.alarms)
    broken = after(LevelThresholds(), [mismatch_of(gaussian(0.5) - 2.0)] * 2)[2]
    assert {Alarm.KL, Alarm.BROKEN} <= set(broken.alarms)
    assert after(LevelThresholds(), [SEEN[3e-3]] * 2)[2].alarms == ()
    assert Alarm.UNIT_MEAN in after(LevelThresholds(), [mismatch_of(gaussian(1.0) + 0.5)])[2].alarms


class Planned:
    """The part of a plan that controllers read."""

    thresholds = {"token_tis": 1.5}  # noqa: RUF012

    def __init__(self, kl_k3_high: float | None, kl_k3: float | None = None) -> None:
        self.kl_k3_high = kl_k3_high
        self.kl_k3 = kl_k3 if kl_k3_high is None or kl_k3 is not None else kl_k3_high / 2

    def select(self, choice: int | str | None = None) -> Planned:
        return self if choice is None else Planned({"bf16": 1e-4, 2: 0.5}[choice])


def test_a_plan_gives_the_start_and_the_expected_kl():
    plan: Any = Planned(0.2)
    state = LevelThresholds().initial(plan)
    assert (state.thresholds, state.target_kl, state.limit_kl) == (Thresholds(1.5), 0.2, 0.2)
    assert after(LevelThresholds(), [SEEN[0.1]] * 9, state)[0].tis == 1.5
    assert after(LevelThresholds(), [SEEN[0.1]] * 9)[0].tis < 4.0
    for law in LAWS:
        assert [law.initial(plan, one).limit_kl for one in ("bf16", 2)] == [0.03, 0.5]
    assert LevelThresholds().initial(plan, "bf16").target_kl == 1e-4
    state = LevelThresholds().initial(Planned(1e-3))  # type: ignore[arg-type]
    assert (state.target_kl, state.limit_kl) == (1e-3, 0.03)
    assert after(LevelThresholds(), [SEEN[3e-3]] * 9, state)[0].tis < 1.5
    assert LevelThresholds().initial(Planned(None)).target_kl == 0.01  # type: ignore[arg-type]
    for expected in (None, 0.2):  # a target that somebody gives goes before the plan's
        law = LevelThresholds(target_kl=0.02)
        assert law.initial(Planned(expected)).target_kl == 0.02  # type: ignore[arg-type]
    # An interval that is wide because little is known does not let the KL grow by as much.
    assert LevelThresholds().initial(Planned(0.15, 0.008)).target_kl == pytest.approx(0.024)  # type: ignore[arg-type]
    state = LevelThresholds(tis=None, band=(0.5, 5.0)).initial(plan)
    assert state.thresholds == Thresholds(None, (0.5, 5.0))  # a plan has no band
    assert LevelThresholds(tis=3.0, level="sequence").initial(plan).thresholds.tis == 3.0
    assert ConstantThresholds(tis=2.0).initial(plan).thresholds.tis == 2.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"tis": 1.0},
        {"tis": float("inf")},
        {"tis": None, "band": (2.0, 5.0)},
        {"tis": None, "band": (0.0, 5.0)},
        {"level": "word"},
        {"target_kl": 0.0},
        {"target_kl": float("nan")},
        {"gain": -1.0},
        {"narrowest": 0.0},
        {"narrowest": 1.1},
        {"limit_kl": 0.0},
        {"limits": None},
        {"gain": 0.0},
        {"target_kl": float("inf")},
        {"min_kept": 0.0},
        {"max_clipped": 1.1},
        {"slew": (2.0, 1.0)},
        {"slew": (2.0, 1.05, 1.05)},
        {"tis": None, "band": (0.5, 1.0)},
        {"tis": None, "band": (1.0, 5.0)},
        {"tis": None, "band": (0.5, float("inf"))},
        {"slew": (1.0, 1.05)},
        {"dead_band": 0.9},
        {"dead_band": float("inf")},
        {"min_kept": 1.0},
        {"max_clipped": 0.0},
        {"patience": 0},
        {"warm_up": -1},
        {"tis": "2"},
        {"gain": "a"},
        {"gain": float("inf")},
        {"slew": 2.0},
        {"slew": (1.05, float("nan"))},
        {"band": (0.5,)},
        {"tis": None},
    ],
)
def test_settings_that_cannot_be(wrong):
    with pytest.raises(ConfigError, match="allowed"):
        LevelThresholds(**wrong)


def test_what_cannot_tighten_is_refused_in_a_plan_and_in_a_constant():
    plan = SimpleNamespace(thresholds={"token_tis": 0.9}, select=lambda _: None)
    with pytest.raises(ConfigError, match=r"tis begins at 0\.9"):
        LevelThresholds().initial(plan)  # type: ignore[arg-type]
    for wrong in ({"tis": -1.0}, {"band": (2.0, 0.5)}, {"limit_kl": 0.0}):
        with pytest.raises(ConfigError, match="allowed"):
            ConstantThresholds(**wrong)
    assert ConstantThresholds() == ConstantThresholds(tis=2.0, band=None, limit_kl=0.03)


def test_a_saved_reach_stays_within_the_settings():
    fresh = LevelThresholds().initial()
    reaches = [LevelThresholds().resume(replace(fresh, reach=x), fresh).reach for x in (0.1, 0.7, 1.5)]
    assert reaches == [0.5, 0.7, 1.0]


def test_settings_at_their_bounds_and_by_default():
    at_bounds = {"narrowest": 1.0, "max_clipped": 1.0, "dead_band": 1.0, "warm_up": 0, "patience": 1}
    assert LevelThresholds(**at_bounds).initial().reach == 1.0
    assert LevelThresholds() == LevelThresholds(
        tis=4.0, band=None, level="token", target_kl=None, gain=0.2, narrowest=0.5, max_clipped=0.5, min_kept=0.5,
        slew=(2.0, 1.05), dead_band=1.05, warm_up=1, patience=3, limit_kl=0.03,
    )  # fmt: skip


def test_a_saved_state_of_something_else_is_refused():
    with pytest.raises(ConfigError, match=r"unknown or missing: .*kl.*to_dict"):
        ControllerState.from_dict({"steps": 3})
    saved = LevelThresholds().initial().to_dict()
    past = [{"recent_kl": x} for x in ("x", None, [float("nan")], [True])]
    for wrong in (None, *(saved | x for x in ({"reach": "x"}, {"kl": "high"}, {"band": [1]}, *past))):
        with pytest.raises(ConfigError, match="allowed"):
            ControllerState.from_dict(wrong)


@pytest.mark.parametrize("new", LAWS)
@pytest.mark.parametrize("old", LAWS)
def test_a_state_of_another_law_goes_on_with_its_kl(old, new):
    _, state, _ = after(old, [SEEN[0.1]] * 5)
    fresh = new.initial()
    saved = ControllerState.from_dict(json.loads(json.dumps(state.to_dict())))
    found = new.resume(saved, fresh)
    assert type(found) is type(fresh)
    assert (found.steps, found.kl, found.recent_kl) == (5, state.kl, state.recent_kl)
    assert new.update(found, SEEN[0.1])[2].decision is not Decision.WARM_UP
    if type(old) is not type(new):
        assert found.thresholds == fresh.thresholds
    if not isinstance(new, ConstantThresholds):
        band = replace(new, tis=None, band=(0.5, 5.0))
        with pytest.raises(ConfigError, match="of the same thresholds"):
            band.resume(saved, band.initial())
