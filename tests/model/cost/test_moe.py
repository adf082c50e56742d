"""Routed experts: how many are read, and laws of the grouped GEMM."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.model.architecture import Experts
from fp8plan.model.cost.moe import distinct_experts, moe_cost, padded_rows, tile_rows
from fp8plan.model.hardware import find_gpu
from fp8plan.model.precision import BF16, FP8_BLOCK
from fp8plan.model.profile.library import load_profile

EXPERTS, HIDDEN = Experts(128, 8, 768), 2048  # of Qwen3-30B-A3B
H200 = find_gpu("h200")
PROFILE = replace(load_profile(H200)[0], layers={})  # laws of the coefficients; what was timed follows none
OF_0_26 = replace(load_profile(H200, "0.26.0")[0], layers={})
M = np.arange(1, 3000)


@pytest.mark.parametrize("m", [1, 3, 16, 100])
def test_distinct_experts_agree_with_drawing_them(m: int) -> None:
    rng = np.random.default_rng(0)
    e = EXPERTS
    draws = rng.random((400, m, e.num_experts)).argpartition(e.experts_per_token, axis=-1)[..., : e.experts_per_token]
    drawn = np.mean([len(np.unique(draw)) for draw in draws])
    assert distinct_experts(np.array([m]), e).item() == pytest.approx(drawn, rel=0.02)


def test_padded_rows_agree_with_random_loads() -> None:
    rng = np.random.default_rng(0)
    e, m = EXPERTS, 600
    loads = rng.binomial(m, e.experts_per_token / e.num_experts, (200, e.num_experts))
    drawn = (np.ceil(loads / 16) * 16).sum(axis=1).mean()
    routed, hit = np.array([m * e.experts_per_token]), distinct_experts(np.array([m]), e)
    assert padded_rows(routed, hit).item() == pytest.approx(drawn, rel=0.02)


def test_untuned_fp8_experts_compute_larger_tiles_above_64_tokens() -> None:
    """vLLM ships a configuration for 128 experts of 768 in block FP8 on an H200, and none for 64 of 1,024."""
    m, untuned = np.array([64, 65]), Experts(64, 8, 1024)
    assert (tile_rows(m, 128, 768, FP8_BLOCK, H200) == 16).all()
    assert (tile_rows(m, 64, 1024, BF16, H200) == 16).all()
    assert tile_rows(m, 64, 1024, FP8_BLOCK, H200).tolist() == [16, 64]
    assert (tile_rows(m, 64, 1024, FP8_BLOCK, find_gpu("b200")) == 16).all()  # another kernel
    few, more = moe_cost(m, untuned, HIDDEN, FP8_BLOCK, 1, H200, PROFILE).seconds
    assert 1.08 < more / few < 1.25  # measured: 155 us with 96 tokens, 133 with 64
    few, more = moe_cost(m, EXPERTS, HIDDEN, FP8_BLOCK, 1, H200, PROFILE).seconds
    assert more / few < 1.01
    # A rank of four has a quarter of the width, for which nothing was tuned.
    assert tile_rows(m, 128, 768 // 4, FP8_BLOCK, H200).tolist() == [16, 64]


def test_untuned_bf16_experts_are_slower_with_thousands_of_tokens() -> None:
    """vLLM ships a configuration for 128 experts of 512 in BF16 on an H200, and none for 64 of 1,024."""
    m, name = np.array([8, 16384]), "moe.bf16.untuned_compute_efficiency"
    tuned, untuned = (
        moe_cost(m, x, HIDDEN, BF16, 1, H200, OF_0_26) for x in (Experts(128, 8, 512), Experts(64, 4, 1024))
    )
    assert name not in tuned.partials
    assert untuned.partials[name][1] < -0.5 * untuned.seconds[1]
    assert untuned.partials[name][0] > -0.05 * untuned.seconds[0]  # eight tokens wait for memory
    kept = {key: x for key, x in OF_0_26.coefficients.items() if key != name}
    without = replace(OF_0_26, coefficients=kept, log_covariance={})
    faster = moe_cost(m, Experts(64, 4, 1024), HIDDEN, BF16, 1, H200, without).seconds  # a profile of an earlier day
    assert 0.7 < faster[1] / untuned.seconds[1] < 0.95
    elsewhere = moe_cost(m, Experts(64, 4, 1024), HIDDEN, BF16, 1, find_gpu("l40s"), OF_0_26)
    assert name not in elsewhere.partials  # not known


@given(st.integers(1, 512), st.data())
def test_one_token_reads_k_experts_and_many_read_all(num_experts: int, data: st.DataObject) -> None:
    e = Experts(num_experts, data.draw(st.integers(1, num_experts)), 768)
    hit = distinct_experts(np.array([1, 2, 100_000]), e)
    assert hit[0] == pytest.approx(e.experts_per_token)
    assert hit[0] <= hit[1] <= hit[2]
    assert hit[2] == pytest.approx(num_experts)


@pytest.mark.parametrize("precision", [BF16, FP8_BLOCK])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_monotone_and_above_bytes(precision: object, tp: int) -> None:
    seconds = moe_cost(M, EXPERTS, HIDDEN, precision, tp, H200, PROFILE).seconds  # type: ignore[arg-type]
    assert (np.diff(seconds) > 0).all()
    one = EXPERTS.stored_bytes(HIDDEN, precision, tp)  # type: ignore[arg-type]
    read = distinct_experts(M, EXPERTS) * one
    assert (seconds > read / H200.memory_bandwidth).all()


def test_near_published_h200_layer() -> None:
    """AIConfigurator 0.12.0, vLLM 0.24 Triton, this shape, 64 tokens, power law 1.01: 292 us BF16, 173 us FP8."""
    for precision, measured in ((BF16, 292), (FP8_BLOCK, 173)):
        layer = moe_cost(np.array([64]), EXPERTS, HIDDEN, precision, 1, H200, PROFILE).seconds
        assert layer.item() * 1e6 == pytest.approx(measured, rel=0.2)


def test_a_rank_of_two_is_the_layer_of_half_the_width() -> None:
    """This holds for the coefficients of the cost, and for what was timed of that width."""
    half = replace(EXPERTS, intermediate_size=EXPERTS.intermediate_size // 2)
    timed = {"moe.bf16": {f"128x8x2048x{half.intermediate_size}": [[1.0, 4096.0], [0.3, 0.3]]}}
    for profile, factor in ((PROFILE, 1.0), (replace(PROFILE, layers=timed), np.exp(0.3))):
        whole = moe_cost(M, EXPERTS, HIDDEN, BF16, 2, H200, profile).seconds
        split = moe_cost(M, half, HIDDEN, BF16, 1, H200, PROFILE).seconds
        np.testing.assert_allclose(whole, factor * split)
