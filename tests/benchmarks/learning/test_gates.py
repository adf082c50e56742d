"""EssThresholds and MassThresholds: tighter while this batch's weights are uneven, or heavy beyond 2."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, log
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mismatch_batches import after, gaussian, mismatch_of, with_outliers

from benchmarks.learning.arms import GATES, JUDGED, NEWS, arm_named
from benchmarks.learning.gates import REACHES, EssThresholds, MassThresholds, truncated_ess
from fp8plan.errors import ConfigError
from fp8plan.runtime.controller.laws import ControllerState, Decision, Escalation

SETTINGS = (
    EssThresholds(),
    EssThresholds(tis=5.0, target=0.8, narrowest=0.2, slew=(1.3, 1.1)),
    MassThresholds(),
    MassThresholds(tis=3.0, quiet=0.1, gain=0.5, max_clipped=0.1),
)
laws = st.sampled_from(SETTINGS)


def batch(sigma: float, tail: float = 0.0, seed: int = 0) -> Any:
    """32 sequences of 64 tokens with noise of `sigma`; a share `tail` of the tokens has three times the noise."""
    noise = gaussian(sigma, 2048, seed)
    noise[: int(tail * 2048)] *= 3
    return mismatch_of(noise.reshape(32, 64))


BATCHES = [batch(s, tail) for s in (0.02, 0.1, 0.3, 0.4, 0.5, 0.6, 0.7, 0.9, 1.2) for tail in (0.0, 0.05, 0.3)]
QUIET, NOISY = batch(0.1), batch(0.8)
seen = st.sampled_from(BATCHES)
pasts = st.lists(seen, max_size=8)


def past(law: Any, batches: list[Any]) -> Any:
    return after(law, batches, law.initial())[1] if batches else law.initial()


# The shared limit on what is cut away stops both laws. Without it, the law alone decides.
UNLIMITED = [replace(law, max_clipped=1.0) for law in SETTINGS]


@settings(deadline=None, max_examples=200)
@given(st.sampled_from([law for law in UNLIMITED if isinstance(law, EssThresholds)]), pasts, seen, seen)
def test_with_the_same_past_a_lower_ess_never_gives_a_wider_threshold(law, before, one, other):
    of = [truncated_ess(x, law.tis**REACHES) for x in (one, other)]
    low, high = (one, other) if (of[0] <= of[1]).all() else (other, one)
    assume((of[0] <= of[1]).all() or (of[1] <= of[0]).all())
    state = past(law, before)
    assert law.update(state, low)[0].tis <= law.update(state, high)[0].tis


@settings(deadline=None, max_examples=200)
@given(st.sampled_from([law for law in UNLIMITED if isinstance(law, MassThresholds)]), pasts, seen, seen)
def test_with_the_same_past_a_higher_mass_never_gives_a_wider_threshold(law, before, one, other):
    light, heavy = sorted((one, other), key=lambda x: x.cut_share(2.0))
    state = past(law, before)
    assert law.update(state, heavy)[0].tis <= law.update(state, light)[0].tis


@settings(deadline=None, max_examples=100)
@given(laws, pasts)
def test_quiet_batches_keep_or_bring_back_the_initial_thresholds_and_all_stay_above_the_floor(law, before):
    state = law.initial()
    for mismatch in before:
        thresholds, state, _ = law.update(state, mismatch)
        assert law.narrowest * log(law.tis) <= log(thresholds.tis) * (1 + 1e-12) <= log(law.tis) * (1 + 1e-9)
    _, state, decided = after(law, [QUIET] * 20, state)
    assert (state.tis, state.reach, decided.decision) == (law.tis, 1.0, Decision.HOLD)


@settings(deadline=None, max_examples=50)
@given(laws, pasts)
def test_what_is_not_a_number_moves_nothing(law, before):
    state = past(law, before)
    nan = float("nan")
    for broken in (mismatch_of(np.zeros((2, 0))), replace(NOISY, ess_raw=nan), replace(NOISY, k3_robust=inf)):
        thresholds, same, decided = law.update(state, broken)
        assert (same, thresholds.tis, decided.decision) == (state, state.tis, Decision.NO_DATA)


@settings(deadline=None, max_examples=50)
@given(laws, pasts, pasts)
def test_a_run_resumed_from_a_saved_state_goes_on_bit_for_bit(law, first, then):
    state = past(law, first)
    restored = ControllerState.from_dict(json.loads(json.dumps(state.to_dict())))
    resumed = law.resume(restored, law.initial())
    assert resumed == restored == state
    for mismatch in then:
        one, other = law.update(state, mismatch), law.update(resumed, mismatch)
        assert one == other
        state, resumed = one[1], other[1]


@pytest.mark.parametrize("sigma", [0.0, 0.1, 0.7])
def test_one_token_of_any_ratio_moves_nothing(sigma):
    plain, spoiled = with_outliers(sigma)
    for law in SETTINGS:
        state = after(law, [plain] * 20)[1]
        for one in spoiled:
            assert after(law, [one] * 3, state)[0] == after(law, [plain] * 3, state)[0]


@pytest.mark.parametrize("sigma", [0.3, 0.8])
def test_the_ess_of_the_histogram_is_that_of_the_tokens(sigma):
    ratios = np.exp(gaussian(sigma).astype(np.float32).astype(float))
    for c, ess in zip(
        (1.2, 2.0, 5.0), truncated_ess(mismatch_of(np.log(ratios)), np.array([1.2, 2.0, 5.0])), strict=True
    ):
        weights = np.minimum(ratios, c)
        assert ess == pytest.approx(weights.mean() ** 2 / (weights**2).mean(), rel=1e-4)


def test_c_is_the_widest_that_keeps_the_ess():
    noisy = batch(0.5)
    (target,) = truncated_ess(noisy, np.array([2.0**0.6]))
    law = EssThresholds(target=float(target) - 1e-9, warm_up=0)
    thresholds, _, decided = law.update(law.initial(), noisy)
    at, wider = truncated_ess(noisy, np.array([thresholds.tis, thresholds.tis * 2.0**0.01]))
    assert wider < law.target <= at
    assert thresholds.tis == pytest.approx(2.0**0.6)
    assert f"at C 2 is below {target:.3g}: C 2 -> C 1.5" in decided.reason


def test_log_c_goes_with_the_inverse_of_the_mass():
    noisy = batch(0.6)
    law = MassThresholds(quiet=noisy.cut_share(2.0) / 1.5, warm_up=0)
    thresholds, _, decided = law.update(law.initial(), noisy)
    assert log(thresholds.tis) == pytest.approx(log(2.0) / 1.5)
    assert "1.5 times its quiet" in decided.reason


@pytest.mark.parametrize("law", [EssThresholds(), MassThresholds()])
def test_the_floor_is_half_the_log_distance_and_asks_for_more_there(law):
    state, said = law.initial(), []
    for mismatch in [QUIET, *[NOISY] * 3, *[QUIET] * 2]:
        thresholds, state, decided = law.update(state, mismatch)
        said.append((thresholds.tis, decided.decision, decided.escalate))
    floor = 2.0**0.5
    assert said[1:4] == [
        (floor, Decision.AT_BOUND, None),
        (floor, Decision.AT_BOUND, None),
        (floor, Decision.AT_BOUND, Escalation.RECALIBRATE_KV),
    ]
    assert said[-1] == (2.0, Decision.RELAX, None)  # two steps lead back


@pytest.mark.parametrize("kind", [EssThresholds, MassThresholds])
@pytest.mark.parametrize(
    "wrong", [{"target": 1.0, "quiet": 0.0}, {"level": "sequence"}, {"band": (0.5, 2.0)}, {"narrowest": 0.0}]
)
def test_settings_that_cannot_be(kind, wrong):
    own = {name: value for name, value in wrong.items() if hasattr(kind, name)}
    with pytest.raises(ConfigError, match="allowed"):
        kind(**own)


def test_settings_by_default():
    shared = {"tis": 2.0, "narrowest": 0.5, "slew": (2.0, 1.5)}
    assert EssThresholds() == EssThresholds(**shared, target=0.93)
    assert MassThresholds() == MassThresholds(**shared, quiet=0.015, gain=1.0)


def test_both_laws_have_an_arm_under_each_mismatch_that_differs_from_that_of_news_in_its_law_alone():
    assert list(GATES) == [f"{mismatch}-{law}" for mismatch in (*JUDGED, "benign") for law in ("ess", "mass")]
    for name, arm in GATES.items():
        assert replace(arm, correction="news") == arm_named(f"{arm.mismatch}-news"), name
    assert not GATES.keys() & NEWS.keys()
