"""LeastErrorThresholds: laws of its law, and what must never move a threshold."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mismatch_batches import after, gaussian, mismatch_of

from fp8plan.errors import ConfigError
from fp8plan.runtime.controller import gradient_error, noise
from fp8plan.runtime.controller.laws import (
    Alarm,
    ControllerState,
    Decision,
    Escalation,
    LeastErrorThresholds,
    noise_scale,
)

TOKENS = 4_000
SETTINGS = (
    LeastErrorThresholds(noise_tokens=100.0),
    LeastErrorThresholds(tis=None, band=(0.5, 5.0), noise_tokens=100.0),
    LeastErrorThresholds(tis=3.0, band=(0.2, 4.0), bounds=(1.2, 6.0)),
)
adaptive = st.sampled_from(SETTINGS)
sigmas = st.lists(st.floats(0.0, 4.0), min_size=1, max_size=12)
SIGMAS = (0.0, 1e-4, 1e-3, 0.01, 0.015, 0.02, 0.03, 0.05, 0.07, 0.1, 0.17, 0.25, 0.35, 0.5, 0.65, 0.8, 1.2, 1.5, 2.0)
SEEN = {sigma: mismatch_of(gaussian(sigma)) for sigma in SIGMAS}


@settings(deadline=None, max_examples=40)
@given(adaptive, sigmas)
def test_thresholds_stay_in_bounds_whatever_comes(controller, sequence):
    state = controller.initial()
    lower, upper = controller.bounds
    for number, sigma in enumerate(sequence):
        thresholds, state, decided = controller.update(state, mismatch_of(gaussian(sigma, 300, number)))
        assert (thresholds.tis is None) == (controller.tis is None)
        assert thresholds.tis is None or lower <= thresholds.tis <= upper
        if controller.band is not None:
            assert gradient_error.LOWEST <= thresholds.band[0] <= controller.band[0]
            assert lower <= thresholds.band[1] <= upper
        assert decided.reason


@settings(deadline=None, max_examples=60)
@given(adaptive, st.sampled_from(SIGMAS))
def test_more_mismatch_never_gives_less_room(controller, start):
    """From any state: bounds rise with KL, for ratios that differ in scale only."""
    _, state, _ = after(controller, [SEEN[start]] * 3)
    for below, above in pairwise(controller.update(state, SEEN[sigma])[0] for sigma in SIGMAS):
        assert below.tis is None or below.tis <= above.tis
        assert below.band is None or (below.band[1] <= above.band[1] and below.band[0] >= above.band[0])


@pytest.mark.parametrize("sigma", [0.0, 1e-4, 0.02])
def test_a_band_loses_no_token_without_mismatch(sigma):
    controller = replace(SETTINGS[1], noise_tokens=1e6)  # noise that would cut all it can
    thresholds, _, _ = after(controller, [SEEN[sigma]] * 3)
    assert SEEN[sigma].kept_fraction(*thresholds.band) > 0.99
    assert SEEN[0.5].kept_fraction(*after(controller, [SEEN[sigma], SEEN[0.5]])[0].band) >= 0.949


@pytest.mark.parametrize("controller", SETTINGS)
def test_a_larger_batch_gets_more_room(controller):
    controller = replace(controller, noise_tokens=1_000.0)
    small, large = (after(controller, [mismatch_of(gaussian(0.8, n))] * 4)[1] for n in (2_000, 200_000))
    ends = [[state.tis, *(state.band or (None, None))[1:]] for state in (small, large)]
    pairs = [pair for pair in zip(*ends, strict=True) if pair != (None, None)]
    assert len(pairs) == (controller.tis is not None) + (controller.band is not None) > 0
    assert all(below < above for below, above in pairs)


@settings(deadline=None, max_examples=25)
@given(adaptive, sigmas, st.data())
def test_a_state_restored_mid_run_decides_the_same(controller, sequence, data):
    cut = data.draw(st.integers(0, len(sequence) - 1))
    seen = [mismatch_of(gaussian(sigma, 300, number)) for number, sigma in enumerate(sequence)]
    whole = after(controller, seen)
    _, state, _ = after(controller, seen[:cut]) if seen[:cut] else (None, controller.initial(), None)
    restored = ControllerState.from_dict(json.loads(json.dumps(state.to_dict())))
    assert restored == state
    assert after(controller, seen[cut:], restored) == whole


@pytest.mark.parametrize("controller", SETTINGS)
def test_a_thousand_steps_without_mismatch_wind_nothing_up(controller):
    """The step after them decides as the step after one of them."""
    calm = [SEEN[0.0]]
    _, once, _ = after(controller, calm * 4)
    _, long, _ = after(controller, calm * 1_000)
    for sigma in (0.5, 1.2):
        assert controller.update(once, SEEN[sigma])[0] == controller.update(long, SEEN[sigma])[0]
    assert long.strained == 0


@pytest.mark.parametrize("controller", SETTINGS)
@pytest.mark.parametrize("outlier", [-20.0, 5.0, 20.0, 50.0])
@pytest.mark.parametrize("sigma", [0.0, 0.1, 0.8])
def test_one_outlier_token_moves_nothing(controller, outlier, sigma):
    plain = gaussian(sigma)
    spoiled = np.append(plain[:-1], outlier)
    _, state, _ = after(controller, [mismatch_of(plain)] * 6)
    assert controller.update(state, mismatch_of(spoiled))[0] == controller.update(state, mismatch_of(plain))[0]
    # Nor does one in every step.
    _, _, again = after(controller, [mismatch_of(spoiled)] * controller.patience, state)
    assert again.escalate is None
    assert again.decision != Decision.AT_BOUND


@pytest.mark.parametrize("controller", SETTINGS)
@pytest.mark.parametrize("outlier", [5.0, 20.0, 50.0])
def test_how_far_out_an_outlier_lies_says_nothing_even_in_a_tiny_batch(controller, outlier):
    """One of 200 tokens is half a percent of them. It counts as any token beyond the bounds, however far out."""
    plain = gaussian(0.8, 200)
    _, state, _ = after(controller, [mismatch_of(plain)] * 6)
    near, far = (controller.update(state, mismatch_of(np.append(plain[:-1], x)))[0] for x in (3.1, outlier))
    assert near == far


def test_warm_up_keeps_the_initial_thresholds():
    controller = LeastErrorThresholds(tis=2.5, warm_up=3, noise_tokens=100.0)
    state, said = controller.initial(), []
    for _ in range(4):
        thresholds, state, decided = controller.update(state, SEEN[1.2])
        said.append((thresholds.tis, decided.decision))
    assert said[:3] == [(2.5, Decision.WARM_UP)] * 3
    assert said[3][0] > 2.5
    assert said[3][1] is Decision.RELAX


def test_it_answers_in_the_step_in_which_the_mismatch_comes_and_no_faster_than_its_slew():
    controller = LeastErrorThresholds(noise_tokens=100.0, slew=(4.0, 1.25))
    _, calm, _ = after(controller, [SEEN[0.1]] * 20)
    thresholds, _, decided = controller.update(calm, SEEN[1.2])
    assert thresholds.tis == pytest.approx(1.25 * calm.tis)
    assert decided.decision is Decision.RELAX
    assert controller.update(after(controller, [SEEN[1.2]] * 20)[1], SEEN[0.1])[2].decision is Decision.TIGHTEN


def test_a_change_within_the_dead_band_is_no_change():
    controller = LeastErrorThresholds(noise_tokens=100.0, dead_band=1.5)
    _, state, _ = after(controller, [SEEN[0.8]] * 5)
    _, same, decided = controller.update(state, mismatch_of(gaussian(0.85, seed=1)))
    assert same.tis == state.tis
    assert decided.decision is Decision.HOLD


def test_ratios_that_are_not_those_of_the_sampler_never_loosen():
    """Log-probs of another temperature, say: their mean ratio is far from 1."""
    controller = LeastErrorThresholds(noise_tokens=100.0)
    _, state, _ = after(controller, [SEEN[0.25]] * 4)
    thresholds, _, decided = controller.update(state, mismatch_of(gaussian(1.0) + 0.5))
    assert Alarm.UNIT_MEAN in decided.alarms
    assert thresholds.tis == state.tis
    assert Alarm.UNIT_MEAN not in controller.update(state, SEEN[1.2])[2].alarms


@pytest.mark.parametrize(
    "controller",
    [
        LeastErrorThresholds(tis=None, band=(0.5, 1.5), bounds=(1.0, 1.5), min_kept=0.99, patience=3),
        LeastErrorThresholds(noise=2.0, max_clipped=0.2, patience=3),
    ],
)
def test_limits_that_cannot_be_kept_escalate_after_patience(controller):
    state, said = controller.initial(), []
    for _ in range(6):
        _, state, decided = controller.update(state, SEEN[1.2])
        said.append((decided.decision, decided.escalate))
    asked = [None, None, Escalation.RECALIBRATE_KV, None, None, Escalation.STEP_DOWN]
    assert said == [(Decision.AT_BOUND, what) for what in asked]
    _, state, decided = controller.update(state, SEEN[0.01])
    assert decided.escalate is None
    assert state.strained == 0


@pytest.mark.parametrize(("sigma", "share"), [(0.5, 0.01), (0.8, 0.05), (1.2, 0.02), (2.0, 0.2)])
def test_the_law_is_where_the_estimated_error_is_least(sigma, share):
    """Against a search over C of the error itself, from all ratios."""
    log_ratio = gaussian(sigma, 400_000)
    ratio = np.exp(log_ratio)
    capped = np.minimum(ratio, gradient_error.GRID[-1])
    candidates = np.geomspace(1.0, 19.0, 150)
    error = [
        gradient_error.BIAS_WEIGHT * np.mean(capped - np.minimum(ratio, c)) ** 2
        + share * np.mean(np.minimum(ratio, c) ** 2)
        for c in candidates
    ]
    found = gradient_error.best_cap(gradient_error.tail(mismatch_of(log_ratio)), share, gradient_error.GRID[-1])
    assert found == pytest.approx(candidates[int(np.argmin(error))], rel=0.05)
    masked = [
        gradient_error.BIAS_WEIGHT * np.mean(np.where(ratio > h, capped, 0.0)) ** 2
        + share * np.mean(np.where(ratio > h, 0.0, ratio) ** 2)
        for h in candidates
    ]
    found = gradient_error.best_mask(gradient_error.tail(mismatch_of(log_ratio)), share, gradient_error.GRID[-1])
    assert found == pytest.approx(candidates[int(np.argmin(masked))], rel=0.05)


def test_noise_scale_from_two_batch_sizes():
    rng = np.random.default_rng(3)
    gradient, spread = np.full(50, 0.2), 3.0  # |G|^2 = 2, and 450 / tokens of noise
    norms = [np.mean(np.sum((gradient + spread / n**0.5 * rng.normal(size=(4_000, 50))) ** 2, 1)) for n in (64, 512)]
    assert noise_scale(norms[0], 64, norms[1], 512) == pytest.approx(50 * spread**2 / 2.0, rel=0.1)
    with pytest.raises(ConfigError, match="average over more steps"):
        noise_scale(1.0, 64, 2.0, 512)
    with pytest.raises(ConfigError, match="small < large"):
        noise_scale(1.0, 512, 2.0, 64)


def test_the_noise_that_steps_tell_is_the_one_that_the_law_takes():
    rng = np.random.default_rng(4)
    gradient, spread = np.full(50, 0.2), 3.0
    true = 50 * spread**2 / 2.0
    controller, state = LeastErrorThresholds(), LeastErrorThresholds().initial()

    def norms():
        return {
            f"norm2_{name}": float(np.sum((gradient + spread / tokens**0.5 * rng.normal(size=50)) ** 2))
            for name, tokens in (("small", 64), ("large", 512))
        } | {"tokens_small": 64, "tokens_large": 512}

    for step in range(200):
        state = noise.heard(state, **norms())
        assert (noise.measured(state) is None) == (step < 9)
    assert noise.measured(state) == pytest.approx(true, rel=0.5)
    for name in ("norm2_small", "norm2_large"):  # of 100 times: in the micro-batch that is told, or in another one
        spiked = noise.heard(state, **{**norms(), name: 100 * norms()[name]})
        assert 0.3 * true < noise.measured(spiked) < 5 * true
    assert noise.heard(state, **{**norms(), "norm2_large": float("inf")}) == state
    still = noise.heard(state, **norms() | {"norm2_small": 0.0, "norm2_large": 0.0})  # nothing to learn from
    assert noise.measured(still) == pytest.approx(noise.measured(state))
    state = ControllerState.from_dict(json.loads(json.dumps(state.to_dict())))
    _, told, decided = after(controller, [SEEN[0.8]] * 4, state)
    informed = replace(controller, noise_tokens=noise.measured(state))
    assert told.tis == after(informed, [SEEN[0.8]] * 4)[1].tis != after(controller, [SEEN[0.8]] * 4)[1].tis
    assert f"noise {noise.measured(state) / TOKENS:.2g} of the gradient" in decided.reason
    with pytest.raises(ConfigError, match="small < large"):
        noise.heard(state, 1.0, 512, 2.0, 64)


def test_noise_that_hides_the_gradient_is_much_noise():
    """Not unknown noise, which is taken for little: C is as tight as can be, and stays so."""
    rng, controller, state = np.random.default_rng(5), LeastErrorThresholds(), LeastErrorThresholds().initial()
    chosen = []
    for _ in range(60):
        small, large = (float(np.sum((300 / n**0.5 * rng.normal(size=50)) ** 2)) for n in (64, 512))
        state = noise.heard(state, small, 64, large, 512)
        thresholds, state, _ = controller.update(state, SEEN[0.8])
        chosen.append(thresholds.tis)
    assert set(chosen[12:]) == {controller.bounds[0]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"bounds": (0.5, 2.0)},
        {"bounds": (2.0, 50.0)},
        {"tis": 10.0},
        {"tis": None, "band": (0.5, 9.0)},
        {"noise": 0.0},
        {"noise_tokens": -1.0},
        {"noise_tokens": float("nan")},
        {"slew": (1.0, 4.0)},
        {"min_kept": 2.0},
        {"max_clipped": 0.0},
        {"patience": -1},
        {"warm_up": -1},
    ],
)
def test_settings_that_cannot_be(wrong):
    with pytest.raises(ConfigError, match="allowed"):
        LeastErrorThresholds(**wrong)
