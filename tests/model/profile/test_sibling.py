"""Kernels, clock and watts of a card that has a sibling's profile, against the laws of the module's docstring."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest

from fp8plan.model.hardware import Gpu, find_gpu, gpus
from fp8plan.model.profile.library import load_profile
from fp8plan.model.profile.sibling import (
    IDLE,
    LEAST_SAMPLING,
    LIMIT,
    MEMORY_WATTS,
    UNKNOWN_POWER_SD,
    clock_ratio,
    layers_of_sibling,
    longer,
    power_sd,
    rates_of_sibling,
    watts_of_sibling,
)

H100, H200 = find_gpu("h100_sxm"), find_gpu("h200_sxm")
NVL = replace(H100, name="nvl", power_limit_watts=400.0)  # the SMs and the limit of an H100 NVL
UNKNOWN = replace(H100, power_limit_watts=None)
WITH_LIMIT = [card for card in gpus() if card.power_limit_watts]


def fewer_sms(gpu: Gpu, share: float) -> Gpu:
    return replace(gpu, sm_count=round(gpu.sm_count * share))


def test_the_clock_goes_with_the_cube_root_of_the_watts_for_each_sm() -> None:
    assert clock_ratio(H100, NVL) == pytest.approx((400 / 700) ** (1 / 3))
    assert round(clock_ratio(H100, NVL), 3) == 0.830  # as the docstring says, where the datasheet has 0.844
    assert clock_ratio(H100, replace(H100, power_limit_watts=350.0, sm_count=114)) == pytest.approx(0.833, abs=5e-4)
    half = fewer_sms(H100, 0.5)
    assert clock_ratio(H100, half) == pytest.approx(2 ** (1 / 3))
    assert clock_ratio(H100, replace(half, power_limit_watts=H100.power_limit_watts / 2)) == pytest.approx(1.0)


def test_a_clock_is_relative_so_ratios_multiply_and_invert() -> None:
    assert len(WITH_LIMIT) > 10
    for one, two in product(WITH_LIMIT, WITH_LIMIT):
        assert clock_ratio(one, two) * clock_ratio(two, one) == pytest.approx(1.0)
        assert clock_ratio(one, H100) * clock_ratio(H100, two) == pytest.approx(clock_ratio(one, two))


def test_without_a_limit_the_clock_is_the_same_and_the_doubt_is_that_of_an_unknown_one() -> None:
    for pair in ((H100, UNKNOWN), (UNKNOWN, H100), (UNKNOWN, UNKNOWN)):
        assert clock_ratio(*pair) == 1.0
        assert power_sd(*pair) == UNKNOWN_POWER_SD
    assert pytest.approx(math.log(clock_ratio(H100, replace(H100, power_limit_watts=1400.0)))) == 2 * UNKNOWN_POWER_SD


def test_the_doubt_is_the_correction_and_none_for_the_same_power() -> None:
    assert power_sd(H100, H200) == power_sd(H100, H100) == 0.0
    assert power_sd(H100, NVL) == pytest.approx(-math.log(clock_ratio(H100, NVL)))
    for one, two in product(WITH_LIMIT, WITH_LIMIT):
        assert power_sd(one, two) == pytest.approx(power_sd(two, one))
        assert power_sd(one, two) >= abs(math.log(clock_ratio(one, two))) - 1e-12


def test_fewer_sms_at_a_limit_in_proportion_need_no_correction_and_are_in_doubt() -> None:
    small = replace(fewer_sms(H100, 0.5), power_limit_watts=H100.power_limit_watts / 2)
    assert clock_ratio(H100, small) == pytest.approx(1.0)
    assert power_sd(H100, small) == pytest.approx(math.log(2) / 3 / 2)


def test_a_measured_card_keeps_its_watts_and_a_lower_limit_changes_all_but_the_limit() -> None:
    coefficients = load_profile(H200, "0.26.0")[0].coefficients
    assert IDLE in coefficients
    assert watts_of_sibling(coefficients, H200, H200) == pytest.approx(coefficients)
    lower = watts_of_sibling(coefficients, H200, replace(H200, power_limit_watts=400.0))
    changed = {name for name, value in coefficients.items() if lower[name] != pytest.approx(value)}
    assert changed == {name for name in coefficients if name.startswith("power.") and name not in (IDLE, LIMIT)}
    assert all(lower[name] < coefficients[name] for name in changed)


def test_an_unknown_limit_is_that_of_the_measured_card_for_each_sm() -> None:
    coefficients = load_profile(H200, "0.26.0")[0].coefficients
    half = replace(fewer_sms(H200, 0.5), power_limit_watts=None)
    assert watts_of_sibling(coefficients, H200, half)[LIMIT] == pytest.approx(H200.power_limit_watts / 2)
    assert watts_of_sibling(coefficients, UNKNOWN, half) == coefficients
    assert watts_of_sibling({"gemm": 1.0}, H200, half) == {"gemm": 1.0}


def test_a_kernel_is_as_much_slower_as_what_bounds_it() -> None:
    bandwidths = H200.memory_bandwidth / H100.memory_bandwidth
    assert longer(1.0, H200, H100) == pytest.approx(bandwidths)
    assert longer(0.01, H200, H100) == pytest.approx(1.0)  # as many SMs
    assert longer(0.01, H200, fewer_sms(H200, 0.5)) == pytest.approx(2.0)
    shares = [longer(share, H200, H100) for share in (0.1, 0.3, 0.5, 0.7, 0.9)]
    assert shares == sorted(shares)
    assert 1.0 <= shares[0] < 1.001 < 1.3 < shares[-1] < bandwidths


def test_a_byte_has_its_joules_at_any_bandwidth() -> None:
    coefficients = load_profile(H200, "0.26.0")[0].coefficients
    slower = watts_of_sibling(coefficients, H200, H100)
    ratio = H100.memory_bandwidth / H200.memory_bandwidth
    assert slower[MEMORY_WATTS] == pytest.approx(coefficients[MEMORY_WATTS] * ratio)
    half = replace(fewer_sms(H200, 0.5), power_limit_watts=H200.power_limit_watts / 2)  # the memory has its watts
    assert watts_of_sibling(coefficients, H200, half)[MEMORY_WATTS] == pytest.approx(coefficients[MEMORY_WATTS])


@pytest.mark.parametrize("runner", LEAST_SAMPLING)
def test_memory_slows_the_least_passes_over_logits_and_no_others_nor_a_single_row(runner: str) -> None:
    passes, sm_bandwidth, least = f"sampling.{runner}.passes", f"sampling.{runner}.sm_bandwidth", LEAST_SAMPLING[runner]
    longer_by = H200.memory_bandwidth / H100.memory_bandwidth
    for value in (least - 1, least, 3 * least):
        there = rates_of_sibling({passes: value, sm_bandwidth: 1e11}, H200, H100)
        seconds = there[passes] * longer_by / value  # over those on the H200
        share = min(1.0, least / value)
        assert seconds == pytest.approx(share * longer_by + 1 - share)
        assert there[passes] / there[sm_bandwidth] == pytest.approx(value / 1e11)


def test_only_small_kernels_sampling_and_the_rows_around_experts_have_other_rates() -> None:
    profile = load_profile(H200, "0.26.0")[0]
    assert rates_of_sibling(profile.coefficients, H200, H200) == pytest.approx(profile.coefficients)
    for card in gpus():
        rates = rates_of_sibling(profile.coefficients, H200, card)
        changed = {name for name, value in rates.items() if value != pytest.approx(profile.coefficients[name])}
        of_sampling = {name for name in changed if name.startswith("sampling.")}
        assert {name.rsplit(".", 1)[1] for name in of_sampling} <= {"passes", "sm_bandwidth"}
        rest = changed - of_sampling
        assert {name.rsplit(".", 1)[1] for name in rest} <= {"bandwidth_efficiency", "activation_passes"}
        assert not any(name.startswith(("gemm", "attention", "mla", "delta_net", "mamba2")) for name in changed)
        assert all(value <= 1 for name, value in rates.items() if name.endswith("_efficiency"))


def test_experts_that_are_tuned_on_one_card_only_keep_no_measured_time() -> None:
    layers = load_profile(H200, "0.26.0")[0].layers
    there = layers_of_sibling(layers, H200, H100)
    assert layers_of_sibling(layers, H200, H200) == layers
    assert there["gemm.bf16"] == layers["gemm.bf16"]
    assert "128x8x2048x768" in layers["moe.fp8_block"]  # Qwen3-30B-A3B, tuned for the H200 alone
    assert "128x8x2048x768" not in there["moe.fp8_block"]
    assert there["moe.fp8_block"]["64x8x2048x1024"] == layers["moe.fp8_block"]["64x8x2048x1024"]  # tuned for neither
