"""Mismatch risk: rounding against brute force, closed forms against Monte Carlo, laws of the KL, the committed fit."""

from __future__ import annotations

import csv
import json
import math
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from uniform_models import uniform

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import Experts, ModelShape
from fp8plan.model.precision import BF16, FP8_BLOCK, FP8_BLOCK_KV, FP8_KV, PRESETS, Precision
from fp8plan.model.risk.expected import (
    FIT,
    OBSERVATIONS,
    RiskBudget,
    committed_fit,
    mismatch_risk,
    predicted_kl,
    recommended_tis,
)
from fp8plan.model.risk.theory import normal_cdf, sequence_rejection, setting_of, token_log_ratio
from tools import risk_report
from tools.risk_report import (
    compared_kl,
    fit,
    leave_one_out_summary,
    leave_one_source_out,
    quantise_blocks,
    read_observations,
    round_bf16,
    round_e4m3,
    rounding_errors,
    run,
)


def shape(layers: int = 36, moe: bool = False, qk_norm: bool = True, attention_bias: bool = False) -> ModelShape:
    return uniform(
        name="test", model_type="qwen3", num_layers=layers, hidden_size=4096, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, intermediate_size=12288, vocab_size=151936, tie_word_embeddings=False,
        qk_norm=qk_norm, attention_bias=attention_bias, max_position_embeddings=40960,
        experts=Experts(128, 8, 768) if moe else None, source="test",
    )  # fmt: skip


DENSE, MOE = shape(), shape(48, moe=True)
LLAMA, QWEN2 = shape(32, qk_norm=False), shape(28, qk_norm=False, attention_bias=True)
SHAPES = (DENSE, MOE, LLAMA, QWEN2)
LENGTHS = np.geomspace(100, 20_480, 64)


# Rounding


def e4m3_values() -> np.ndarray:
    """Every finite non-negative E4M3 number in order, from the format's definition; S.1111.111 is NaN."""
    subnormal = [m * 2.0**-9 for m in range(8)]
    normal = [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)]
    return np.array(subnormal + normal[:-1])


def test_e4m3_rounds_to_the_nearest_number_with_ties_to_even() -> None:
    grid = e4m3_values()
    assert grid[-1] == 448
    x = np.concatenate([np.random.default_rng(1).lognormal(0, 4, 4000), grid, (grid[1:] + grid[:-1]) / 2, [1e4]])
    distance = np.abs(x[:, None] - grid)
    nearest = distance == distance.min(axis=1, keepdims=True)
    even = np.arange(len(grid)) % 2 == 0
    pick = np.where(nearest.sum(axis=1) > 1, np.argmax(nearest & even, axis=1), np.argmax(nearest, axis=1))
    np.testing.assert_array_equal(round_e4m3(x), grid[pick])
    np.testing.assert_array_equal(round_e4m3(-x), -grid[pick])


def test_bf16_rounding_keeps_numbers_of_eight_significant_bits() -> None:
    exact = np.array([1.0, 1 + 2**-7, 255.0, 2.0**-100, -3.140625])
    np.testing.assert_array_equal(round_bf16(exact), exact)
    assert round_bf16([1 + 2**-8, 1 + 3 * 2**-8]).tolist() == [1.0, 1 + 2**-6]  # ties to even


def test_rounding_errors_are_those_of_vllms_own_functions() -> None:
    """reference: vLLM's per_block_cast_to_fp8 and requant_weight_ue8m0_inplace on a Gaussian 1024 x 1024."""
    errors = rounding_errors()
    once, twice = errors.weight["bf16"]["fp8_block"], errors.weight["bf16"]["fp8_block_pow2"]
    assert once == pytest.approx(0.02644, rel=0.005)
    assert twice == pytest.approx(0.03696, rel=0.03)  # depends on where amax falls between powers of two
    assert errors.bf16 < once / 10


def test_power_of_two_scales_up_front_survive_the_second_rounding() -> None:
    x = np.random.default_rng(2).standard_normal((256, 256))
    once = quantise_blocks(x, (128, 128), e8m0=True)
    np.testing.assert_array_equal(quantise_blocks(once, (128, 128), e8m0=True), once)


# Closed forms against simulation


def simulate_tokens(kl: float, spread: float, n: int, rng: np.random.Generator) -> np.ndarray:
    """Log-ratios of n tokens, drawn from continuous log-normal variances (the model uses 25 discrete ones)."""
    population = rng.standard_normal(1_000_000)
    population = np.exp(spread * population[np.abs(population) < 3])
    variance = 2 * kl * rng.choice(population, n) / population.mean()
    return rng.standard_normal(n) * np.sqrt(variance) - variance / 2


@pytest.mark.parametrize(("kl", "moe", "spread"), [(0.001, False, 1.5), (0.01, False, 1.5), (0.005, True, 2.25)])
def test_token_statistics_match_a_simulation(kl: float, moe: bool, spread: float) -> None:
    n = 3_000_000
    log_ratio = simulate_tokens(kl, spread, n, np.random.default_rng(3))
    ratio = np.exp(log_ratio)
    model = token_log_ratio(kl, moe)
    assert np.mean(ratio) == pytest.approx(1, abs=1e-3)
    assert model.probability @ model.variance / 2 == pytest.approx(np.mean(ratio - 1 - log_ratio), rel=0.03)
    assert 1 / model.ess - 1 == pytest.approx(np.mean(ratio**2) / np.mean(ratio) ** 2 - 1, rel=0.06)
    for threshold in (1.1, 1.5, 2.0):
        clipped = np.mean(ratio > threshold)
        noise = 4 * math.sqrt(max(clipped, 1 / n) / n)
        assert model.fraction_above(threshold) == pytest.approx(clipped, abs=noise + 0.03 * clipped)


@pytest.mark.parametrize("spread", [0.0, 1.5, 2.25])
@pytest.mark.parametrize("length", [100, 400, 1500])
def test_sequence_rejection_matches_a_simulation(length: int, spread: float) -> None:
    """Tokens of very unequal variance, which differ from sequence to sequence: the normal sum still holds."""
    kl, sequences = 0.001, 1500
    tokens = simulate_tokens(kl, spread, sequences * length, np.random.default_rng(4)).reshape(sequences, length)
    totals = tokens.sum(axis=1)
    simulated = np.mean((totals < math.log(0.5)) | (totals > math.log(2.0)))
    assert sequence_rejection(kl, np.array([float(length)]), 0.5, 2.0)[0] == pytest.approx(simulated, abs=0.04)


def test_normal_cdf_is_accurate() -> None:
    x = np.linspace(-8, 8, 801)
    exact = [0.5 * math.erfc(-v / math.sqrt(2)) for v in x]
    np.testing.assert_allclose(normal_cdf(x), exact, atol=1e-7)


# verl#7242 (first pair) and verl#7519 (DAPO: mxfp8 and fp8 medians, first and last blocks of steps).
@pytest.mark.parametrize(
    ("kl", "chi2"), [(0.00519, 0.0108), (0.0087, 0.019), (0.0095, 0.023), (0.0100, 0.025), (0.0313, 0.319)]
)
def test_published_chi2_beside_published_kl(kl: float, chi2: float) -> None:
    assert 1 / token_log_ratio(kl, routing=True).ess - 1 == pytest.approx(chi2, rel=0.2)


# Laws


@pytest.mark.parametrize("model", SHAPES)
def test_bf16_adds_no_quantisation_kl_but_has_a_floor(model: ModelShape) -> None:
    risk, fitted = mismatch_risk(model, BF16, LENGTHS), committed_fit()
    assert predicted_kl(setting_of(model, BF16), np.array(fitted.coefficients), fitted.errors)[1] == 0
    assert risk.kl_k3 > 0
    assert mismatch_risk(model, BF16, LENGTHS, e8m0=False, kv_scales_calibrated=False) == risk


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("e8m0", [True, False])
@pytest.mark.parametrize("calibrated", [True, False])
def test_more_fp8_never_means_less_kl(model: ModelShape, e8m0: bool, calibrated: bool) -> None:
    def kl(precision: Precision) -> float:
        return mismatch_risk(model, precision, LENGTHS, e8m0=e8m0, kv_scales_calibrated=calibrated).kl_k3

    for first, second in ((BF16, FP8_BLOCK), (BF16, FP8_KV), (FP8_BLOCK, FP8_BLOCK_KV), (FP8_KV, FP8_BLOCK_KV)):
        assert kl(first) < kl(second)


@pytest.mark.parametrize("precision", PRESETS.values())
def test_kl_grows_with_layers_moe_and_missing_qk_norm(precision: Precision) -> None:
    def kl(model: ModelShape) -> float:
        return mismatch_risk(model, precision, LENGTHS).kl_k3

    assert kl(shape(28)) < kl(shape(36)) < kl(shape(64))
    assert kl(shape(36)) < kl(shape(36, moe=True))
    assert kl(shape(36)) <= kl(shape(36, qk_norm=False))
    assert (kl(shape(36)) < kl(shape(36, qk_norm=False))) == (precision.kv == "fp8")


@pytest.mark.parametrize("model", SHAPES)
def test_e8m0_is_worse_only_where_weights_are_fp8(model: ModelShape) -> None:
    for precision in PRESETS.values():
        on, off = (mismatch_risk(model, precision, LENGTHS, e8m0=e8m0).kl_k3 for e8m0 in (True, False))
        assert on > off if precision.weights == "fp8_block" else on == off


def test_e8m0_effect_is_near_the_one_published_ablation() -> None:
    """prime-rl#3112: same batch, E8M0 instead of FP32 scales in the FP8 trainer: 0.0059 / 0.0038."""
    on, off = (mismatch_risk(MOE, FP8_BLOCK, LENGTHS, e8m0=e8m0).kl_k3 for e8m0 in (True, False))
    assert on / off == pytest.approx(0.0059 / 0.0038, rel=0.25)


def test_fewer_quantised_layers_mean_less_kl() -> None:
    result, whole = committed_fit(), setting_of(DENSE, FP8_BLOCK)
    assert whole.quantised_layers == 36
    settings = [replace(whole, quantised_layers=n) for n in (0, 18, 36)]
    kls = [predicted_kl(setting, np.array(result.coefficients), result.errors) for setting in settings]
    assert kls[0][1] == 0
    assert kls[0][0] < kls[1][0] < kls[2][0] == mismatch_risk(DENSE, FP8_BLOCK, LENGTHS).kl_k3


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("precision", PRESETS.values())
@pytest.mark.parametrize("calibrated", [True, False])
def test_bands_are_ordered_and_fractions_are_fractions(
    model: ModelShape, precision: Precision, calibrated: bool
) -> None:
    risk = mismatch_risk(model, precision, LENGTHS, kv_scales_calibrated=calibrated)
    assert 0 <= risk.kl_k3_low <= risk.kl_k3 <= risk.kl_k3_high
    assert all(0 <= share <= 1 for share in (risk.ess_raw, risk.clip_fraction, risk.seq_reject_fraction))


@pytest.mark.parametrize("bounds", [(0.5, 2.0), (0.2, 5.0), (0.9, 1.1), (0.1, 2.0), (0.5, 10.0)])
def test_rejection_grows_with_length(bounds: tuple[float, float]) -> None:
    rates = sequence_rejection(0.002, np.geomspace(1, 1e5, 300), *bounds)
    assert (np.diff(rates) >= -2e-7).all()
    assert rates[0] < 0.2 < 0.99 < rates[-1]


def test_rejection_is_the_mean_over_the_lengths() -> None:
    one = [mismatch_risk(DENSE, FP8_BLOCK, [t]).seq_reject_fraction for t in (50, 500, 5000)]
    assert mismatch_risk(DENSE, FP8_BLOCK, [50, 500, 5000]).seq_reject_fraction == pytest.approx(np.mean(one))


@pytest.mark.parametrize("model", SHAPES)
def test_clipping_falls_with_the_threshold(model: ModelShape) -> None:
    thresholds = (1.1, 1.5, 2.0, 4.0, 8.0)
    risk = mismatch_risk(model, FP8_BLOCK_KV, LENGTHS)
    fractions = [token_log_ratio(risk.kl_k3, risk.moe).fraction_above(c) for c in thresholds]
    assert fractions[2] == risk.clip_fraction
    assert all(a > b for a, b in pairwise(fractions))


def test_moe_has_the_heavier_tail_at_equal_kl() -> None:
    """R3 (arXiv 2510.11370): an order of magnitude more tokens beyond a ratio of 2 in MoE models."""
    dense, moe = (token_log_ratio(0.002, moe).fraction_above(2.0) for moe in (False, True))
    assert moe > 5 * dense


# Levels and thresholds


def test_the_known_failure_is_high_and_good_bf16_is_low() -> None:
    broken = mismatch_risk(QWEN2, FP8_KV, LENGTHS, kv_scales_calibrated=False)
    assert broken.level == "high"
    assert any("known failure" in reason for reason in broken.reasons)
    assert broken.kl_k3 > 0.1
    assert mismatch_risk(QWEN2, FP8_KV, LENGTHS).level == "high"  # verl#4435 recalculated its scales, and broke
    assert mismatch_risk(QWEN2, FP8_BLOCK, LENGTHS).level == "moderate"
    assert {mismatch_risk(model, BF16, LENGTHS).level for model in SHAPES} == {"low"}
    assert (
        mismatch_risk(DENSE, FP8_BLOCK_KV, LENGTHS).level == "moderate"
    )  # the FP8-RL paper's run, kept on course by TIS
    assert mismatch_risk(LLAMA, FP8_KV, LENGTHS, kv_scales_calibrated=False).level != "low"


def test_budget_decides_the_level_and_what_is_accepted() -> None:
    strict = RiskBudget(low_kl=1e-6, moderate_kl=2e-6, accept="low")
    assert mismatch_risk(DENSE, BF16, LENGTHS, budget=strict).level == "high"
    assert [strict.accepts(level) for level in ("low", "moderate", "high")] == [True, False, False]
    assert [RiskBudget().accepts(level) for level in ("low", "moderate", "high")] == [True, True, False]
    with pytest.raises(ConfigError, match="medium"):
        RiskBudget(accept="medium")  # type: ignore[arg-type]


def test_advice_tells_when_a_sequence_mis_would_drop_too_many() -> None:
    short, long = [20] * 4, [20_000] * 4
    bound, notes = recommended_tis(mismatch_risk(DENSE, BF16, long), long)
    assert bound == 4.0
    assert notes[0].startswith("token TIS starts at C = 4, and tightens to 2 as the KL rises; it clips about ")
    assert notes[0].endswith(" of the tokens at 2")
    assert any("20,000" in note and "sequence MIS" in note for note in notes)
    few = mismatch_risk(DENSE, BF16, short)
    assert few.seq_reject_fraction <= RiskBudget().max_sequence_rejection
    assert not any("sequence MIS" in note for note in recommended_tis(few, short)[1])


def test_higher_risk_never_loosens_the_threshold() -> None:
    risks = [mismatch_risk(DENSE, BF16, LENGTHS), mismatch_risk(DENSE, FP8_BLOCK, LENGTHS)]
    risks.append(mismatch_risk(QWEN2, FP8_KV, LENGTHS))
    assert [risk.level for risk in risks] == ["low", "moderate", "high"]
    bounds = [recommended_tis(risk, LENGTHS)[0] for risk in risks]
    assert bounds == [4.0, 4.0, 1.5]
    assert recommended_tis(risks[-1], LENGTHS)[1][0].startswith("token TIS clips about ")


# The table and the fit


def test_table_has_a_source_for_every_number() -> None:
    with OBSERVATIONS.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert row["source"]
        assert row["reference"]
        assert row["note"]
        assert row["primary"] in {"P", "S"}
        assert row["kind"] in {"point", "range", "low", "high"}
        assert row["weights"] in {"bf16", "fp8_block"}
        assert row["kv"] in {"bf16", "fp8"}
        if row["kind"] == "range":
            assert 0 < float(row["kl_low"]) < float(row["kl_high"])
        if float(row["weight"]) == 0 and row["kind"] in {"point", "range"}:
            assert "not fitted" in row["note"]
    fitted = [row for row in rows if float(row["weight"]) > 0]
    kinds = {(row["weights"], row["kv"], row["moe"]) for row in fitted}
    assert len(fitted) >= 20
    assert {("bf16", "bf16", m) for m in "01"} | {("fp8_block", "bf16", m) for m in "01"} < kinds
    assert {kv for _, kv, _ in kinds} == {"bf16", "fp8"}


def test_refitting_reproduces_the_committed_coefficients() -> None:
    result, committed = fit(read_observations(), rounding_errors()), committed_fit()
    np.testing.assert_allclose(result.coefficients, committed.coefficients, atol=2e-3)
    np.testing.assert_allclose(result.covariance, committed.covariance, atol=2e-3)
    assert result.noise_sd == pytest.approx(committed.noise_sd, abs=1e-3)
    for part in ("weight", "activation"):
        for trainer, row in getattr(result.errors, part).items():
            assert row == pytest.approx(getattr(committed.errors, part)[trainer], rel=1e-4, abs=1e-8)


def test_fit_finds_the_factors_that_made_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows made from other factors on the theory, with little noise, must give those factors back."""
    monkeypatch.setattr(risk_report, "trainer_sd", lambda _: 0.0)
    rng = np.random.default_rng(6)
    truth = np.array([1.0, 0.3, -0.4, -0.3, 0.5, -0.5])
    errors = rounding_errors(256)
    rows = [o for o in read_observations() if o.weight > 0]
    made = [
        replace(o, kl=compared_kl(o, truth, errors) * math.exp(0.01 * rng.standard_normal()), spread=0.0, weight=1.0)
        for o in rows
    ]
    result = fit(made, errors)
    np.testing.assert_allclose(result.coefficients, truth, atol=0.05)
    assert 0.003 < result.noise_sd < 0.02


@pytest.mark.slow
def test_left_out_sources_fall_into_the_band_about_as_often_as_claimed() -> None:
    left = leave_one_source_out(read_observations(), committed_fit().errors)
    summary = leave_one_out_summary(left)
    assert all(math.isfinite(row.residual) and row.halfwidth > 0 for row in left)
    assert 0.8 <= summary["coverage_90"] <= 1
    assert 0.8 <= summary["coverage_90_weight_1"] <= 1
    assert summary["median_factor"] < 2.5
    assert json.loads(FIT.read_text(encoding="utf-8"))["leave_one_source_out"] == pytest.approx(summary, rel=0.02)


def test_report_prints_residuals_and_the_leave_one_out_error() -> None:
    text = run(None)
    assert "leave one source out" in text
    assert "median_factor" in text
    for source in {o.source for o in read_observations() if o.weight > 0}:
        assert source in text


def test_one_call_for_a_whole_rollout_takes_little_longer_than_for_a_few_responses() -> None:
    lengths = np.random.default_rng(7).integers(1, 20_480, 1536)
    seconds: dict[int, list[float]] = {64: [], len(lengths): []}
    for _ in range(20):
        for count, taken in seconds.items():
            start = time.perf_counter()
            mismatch_risk(MOE, FP8_BLOCK_KV, lengths[:count])
            taken.append(time.perf_counter() - start)
    few, many = map(min, seconds.values())
    assert many <= 4 * few  # 0.6 and 0.5 ms
