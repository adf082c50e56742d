"""The fit: it finds the GPU that made the measurements, says how well it knows it, and leaves the rest alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import H200, PRIOR, decodes, gemms, nature, timed

from fp8plan.errors import ConfigError
from fp8plan.model.calibrate.fit import LEAST_SIGMA, LeavingOut, Observations, fit, robust_sd, within_prior
from fp8plan.model.calibrate.kernel_rows import observe
from fp8plan.model.cost.base import Array, Cost, together
from fp8plan.model.profile.profile import Profile, between
from tools.import_aic import subset

ATTENTION = [x for x in PRIOR.coefficients if x.startswith("attention.bf16.")]
DECODE = [f"attention.bf16.{x}" for x in ("launch_seconds", "decode_bandwidth_efficiency", "decode_tile_seconds")]
MANY_HEADS = [(heads, kv, size) for heads in (8, 16, 32, 64) for kv in (2, 4, 8) for size in (64, 128)]
STEP = "overhead.step_seconds"
HOST = ("host.step_seconds", "host.request_seconds")


def seen(rows: pd.DataFrame) -> Observations:
    (observation,) = observe(rows, H200)
    return observation


def in_steps(logs: Sequence[float], groups: Sequence[int], kernel: str = "steps") -> Observations:
    """Rows that `STEP` alone predicts, with log seconds `logs` above the prior's."""
    value = PRIOR.coefficients[STEP]

    def predict(profile: Profile) -> Cost:
        seconds = np.full(len(logs), profile.coefficients[STEP])
        return Cost(seconds, {STEP: seconds})

    return Observations(kernel, value * np.exp(np.array(logs)), np.array(groups), predict)


def on_the_host(requests: Array, groups: int) -> Observations:
    """Steps that wait for the host, `requests` in each, dealt out to `groups`; their seconds are still to be set."""

    def predict(profile: Profile) -> Cost:
        fixed = np.full(requests.size, profile.coefficients[HOST[0]])
        each = requests * profile.coefficients[HOST[1]]
        return Cost(fixed + each, dict(zip(HOST, (fixed, each), strict=True)))

    return Observations("host", np.ones(requests.size), np.arange(requests.size) % groups, predict)


def sd(profile: Profile, name: str) -> float:
    return float(profile.log_covariance[name][name] ** 0.5)


def moved(a: Profile, b: Profile, name: str) -> float:
    """Log of the ratio of a coefficient in two profiles."""
    return float(np.log(a.coefficients[name] / b.coefficients[name]))


def rms(errors: Array) -> float:
    return float(np.sqrt(np.mean(np.square(errors))))


# What is found


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_shapes_that_were_not_fitted_are_predicted(seed: int) -> None:
    gpu = nature(seed, scale=2)
    found = fit([seen(timed(rows, gpu, 0.01, seed)) for rows in (gemms(), decodes())], PRIOR).profile
    for elsewhere in (gemms(layers=[(6144, 2048), (1536, 8192)]), decodes(heads=[(28, 4, 128), (24, 8, 64)])):
        exact = seen(timed(elsewhere, gpu))
        assert rms(exact.errors(found)) < min(0.02, rms(exact.errors(PRIOR)) / 2)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_coefficient_that_is_well_determined_lies_within_a_few_of_its_sds(seed: int) -> None:
    gpu = nature(seed)
    found = fit([seen(timed(decodes(heads=MANY_HEADS), gpu, 0.02, seed))], PRIOR, ATTENTION).profile
    for name in DECODE:
        assert sd(found, name) < 0.3 * sd(PRIOR, name)
        assert abs(moved(found, gpu, name)) < 4 * sd(found, name)


def test_one_coefficient_by_hand() -> None:
    """Twenty groups of one row: the mean of the logs, known to sd / sqrt(20), where the prior is wide."""
    logs = np.tile([0.25, 0.35], 10)  # none of them an outlier
    prior = replace(PRIOR, log_covariance={STEP: {STEP: 100.0}})
    found = fit([in_steps(logs, range(20))], prior).profile
    assert moved(found, PRIOR, STEP) == pytest.approx(0.3, abs=1e-3)
    assert sd(found, STEP) == pytest.approx(logs.std(ddof=1) / 20**0.5, rel=0.05)


def own_sds_off(groups: int, rows: int, noise: float, shared: float) -> Array:
    """Errors of `HOST` in the sds that the fit states, for 40 engines: shape (40, 2).

    noise, shared: sd of log seconds, of each row by itself and of all rows of a group
    """
    errors = []
    for seed in range(40):
        rng, gpu = np.random.default_rng(seed), nature(seed)
        exact = on_the_host(np.geomspace(1, 1024, groups * rows)[rng.permutation(groups * rows)], groups)
        off = shared * rng.standard_normal(groups)[exact.groups] + noise * rng.standard_normal(groups * rows)
        found = fit([replace(exact, seconds=exact.predict(gpu).seconds * np.exp(off))], PRIOR, HOST).profile
        errors.append([moved(found, gpu, name) / sd(found, name) for name in HOST])
    return np.array(errors)


@pytest.mark.parametrize("shared", [0.0, 0.05])
def test_errors_are_as_large_as_the_covariance_says(shared: float) -> None:
    errors = own_sds_off(groups=20, rows=10, noise=0.05, shared=shared)
    assert (errors.std(axis=0) > 0.75).all()
    assert (errors.std(axis=0) < 1.4).all()
    assert (np.abs(errors.mean(axis=0)) < 0.5).all()


def test_few_groups_are_known_to_be_few() -> None:
    """Four engines, each 10% off in its own way: a hundred rows do not make up for that."""
    errors = own_sds_off(groups=4, rows=25, noise=0.01, shared=0.1)
    assert np.mean(np.abs(errors) < 2) > 0.8


def test_one_group_alone_settles_nothing() -> None:
    """Without it there is the prior, so that is how uncertain the fit stays, however many rows the group has."""
    found = fit([in_steps([0.4] * 50, [0] * 50)], PRIOR).profile
    assert moved(found, PRIOR, STEP) == pytest.approx(0.4, abs=0.01)
    assert sd(found, STEP) > 0.3


# What does not move it


def test_a_stalled_measurement_hardly_moves_a_coefficient() -> None:
    rows = timed(decodes(heads=MANY_HEADS), nature(4), 0.02)
    stalled = rows.assign(seconds=np.where(rows.index == 17, 10 * rows.seconds, rows.seconds))
    calm, shaken = (fit([seen(x)], PRIOR, ATTENTION).profile for x in (rows, stalled))
    for name in DECODE:
        assert abs(moved(shaken, calm, name)) < min(0.01, sd(calm, name))


def test_no_efficiency_passes_one() -> None:
    """Everything takes half of what the fastest GPU that the datasheet allows would take."""
    fastest = {x: 1.0 if x.endswith("_efficiency") else v for x, v in PRIOR.coefficients.items()}
    rows = timed(decodes(), replace(PRIOR, coefficients=fastest))
    rows.seconds /= 2
    found = fit([seen(rows)], PRIOR, ATTENTION).profile
    efficiencies = {x: v for x, v in found.coefficients.items() if x.endswith("_efficiency")}
    assert max(efficiencies.values()) <= 1
    assert efficiencies["attention.bf16.decode_bandwidth_efficiency"] > 0.99
    again = fit([seen(rows)], found, ATTENTION)  # from the bound itself
    assert max(v for x, v in again.profile.coefficients.items() if x.endswith("_efficiency")) <= 1


def test_what_nobody_measured_keeps_its_value_and_its_variance() -> None:
    found = fit([seen(timed(decodes(), nature(5), 0.02))], PRIOR).profile
    used = set(seen(timed(decodes(), PRIOR)).predict(PRIOR).partials)
    for name in PRIOR.coefficients.keys() - used:
        assert found.coefficients[name] == pytest.approx(PRIOR.coefficients[name], rel=1e-5)
        assert sd(found, name) == pytest.approx(sd(PRIOR, name))
        assert np.abs(found.covariance([name, *used])[0, 1:]).max() < 1e-9
    assert max(abs(moved(found, PRIOR, name)) for name in used) > 0.05


def test_no_direction_is_wider_than_in_the_prior() -> None:
    prior = replace(PRIOR, log_covariance={STEP: {STEP: 0.01}})
    found = fit([in_steps([0.5, 0.5] * 20, [0] * 40)], prior).profile  # all in one group, far from the prior
    assert 0 < sd(found, STEP) <= 0.1 * (1 + 1e-9)
    narrow, spread = np.array([[4.0, 0.0], [0.0, 0.01]]), np.array([1.0, 1.0])
    np.testing.assert_allclose(within_prior(narrow, spread), [[1, 0], [0, 0.01]], atol=1e-12)


def test_a_coefficient_that_is_not_free_stays_as_it_is() -> None:
    rows = seen(timed(decodes(), nature(5), 0.02))
    found = fit([rows], PRIOR, DECODE[:1]).profile
    assert {x for x in PRIOR.coefficients if found.coefficients[x] != PRIOR.coefficients[x]} == {DECODE[0]}
    assert {x: sd(found, x) for x in DECODE[1:]} == {x: sd(PRIOR, x) for x in DECODE[1:]}
    certain = replace(PRIOR, log_covariance=between(PRIOR.log_covariance, PRIOR.coefficients.keys() - {DECODE[0]}))
    assert fit([rows], certain).profile.coefficients[DECODE[0]] == PRIOR.coefficients[DECODE[0]]


def test_a_kernel_that_is_described_badly_does_not_drag_down_one_that_is_not() -> None:
    rng = np.random.default_rng(0)
    sharp, blurred = in_steps(rng.normal(0.2, 0.01, 40), range(40)), rng.normal(0.6, 0.5, 40)
    found = fit([sharp, in_steps(blurred, range(40), "blurred")], PRIOR)
    assert moved(found.profile, PRIOR, STEP) == pytest.approx(0.2, abs=0.02)
    assert found.residuals["steps"] < 0.03 < 0.4 < found.residuals["blurred"]


# Fits of almost the same


def test_leaving_out_is_what_a_fit_without_those_rows_gives() -> None:
    """To first order, and with the sigmas of the fit of all."""
    rows = [seen(timed(x, nature(6), 0.02)) for x in (gemms(), decodes())]
    full = fit(rows, PRIOR)
    out = rows[0].groups == rows[0].groups[0]
    profile = LeavingOut(rows, PRIOR, full).profile_without(rows[0].kernel, out)
    again = fit([subset(rows[0], ~out), rows[1]], PRIOR)
    for name in full.names:
        assert abs(moved(profile, again.profile, name)) < 0.5 * sd(again.profile, name)
    assert any(moved(profile, full.profile, name) for name in full.names)


def test_what_is_held_out_was_not_seen() -> None:
    """Two groups, 1 apart in log: each is predicted by the other, not by the mean of both."""
    wide = replace(PRIOR, log_covariance={STEP: {STEP: 100.0}})
    both = in_steps([0.0, 0.0, 1.0, 1.0, 1.0], [7, 7, 8, 8, 8])
    errors = LeavingOut([both], wide, fit([both], wide)).errors()["steps"]
    assert errors == pytest.approx([1, 1, -1, -1, -1], abs=0.02)


def test_a_layer_that_is_off_is_predicted_wrongly_when_held_out() -> None:
    rows = timed(decodes(), nature(7), 0.01)
    off = rows.assign(seconds=np.where(rows.kv_heads == 4, 1.5 * rows.seconds, rows.seconds))
    observation = seen(off)
    prior = replace(PRIOR, log_covariance=between(PRIOR.log_covariance, ATTENTION))
    errors = LeavingOut([observation], prior, fit([observation], prior)).errors()
    assert np.median(errors[observation.kernel][rows.kv_heads == 4]) == pytest.approx(-np.log(1.5), abs=0.1)
    assert rms(errors[observation.kernel][rows.kv_heads == 8]) < 0.15


def test_a_group_that_is_all_there_is_is_predicted_by_the_prior() -> None:
    alone = in_steps([0.5, 0.5], [0, 0])
    errors = LeavingOut([alone], PRIOR, fit([alone], PRIOR)).errors()["steps"]
    assert errors == pytest.approx([-0.5, -0.5])


def test_nothing_to_fit_is_an_error_that_names_the_command() -> None:
    for nothing in ([], [in_steps([], [])]):
        with pytest.raises(ConfigError, match="no measurements to fit; run `fp8plan calibrate`"):
            fit(nothing, PRIOR)


# Parts


def test_a_subset_predicts_its_rows() -> None:
    whole = seen(timed(gemms(), nature(8)))
    keep = whole.groups % 2 == 0
    part = subset(whole, keep)
    assert 0 < part.seconds.size < whole.seconds.size
    assert part.errors(PRIOR).tolist() == whole.errors(PRIOR)[keep].tolist()
    assert part.groups.tolist() == whole.groups[keep].tolist()
    partials = part.predict(PRIOR).partials
    assert {x: v.tolist() for x, v in partials.items()} == {
        x: v[keep].tolist() for x, v in whole.predict(PRIOR).partials.items()
    }


def test_costs_together_are_their_rows_one_after_the_other() -> None:
    a = Cost(np.array([1.0, 2.0]), {"x": np.array([3.0, 4.0])})
    b = Cost(np.array([5.0]), {"x": np.array([6.0]), "y": np.array([7.0])})
    both = together([a, b])
    assert both.seconds.tolist() == [1, 2, 5]
    assert {name: values.tolist() for name, values in both.partials.items()} == {"x": [3, 4, 6], "y": [0, 0, 7]}


def test_a_robust_sd_is_the_sd_without_the_outliers() -> None:
    errors = np.random.default_rng(0).normal(0, 0.05, 4000)
    calm = robust_sd(errors)
    assert calm == pytest.approx(0.05, rel=0.08)  # clipped at 2 sds, a normal's is 4% smaller
    errors[:40] = 1e6
    assert robust_sd(errors) == pytest.approx(calm, rel=0.05)
    assert robust_sd(np.array([0.0, 0.0, 0.0, 0.3])) == pytest.approx(0.15)  # no scale to clip at
    assert robust_sd(np.full(5, -0.2)) == pytest.approx(0.2)  # around zero: a bias counts


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=30), st.floats(0.01, 100))
def test_a_robust_sd_scales_with_the_errors(errors: list[float], factor: float) -> None:
    values = np.round(errors, 6)
    assert robust_sd(factor * values) == pytest.approx(factor * robust_sd(values), abs=1e-12)


def test_sigma_is_never_below_the_timers_own_spread() -> None:
    assert fit([seen(timed(decodes(), nature(9)))], PRIOR, ATTENTION).residuals == {
        "attention_decode.bf16": LEAST_SIGMA
    }
