"""The sustained clock and memory: what they slow, what they do not, and their derivatives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fp8plan.model.architecture import ModelShape
from fp8plan.model.cost.base import StepBatch
from fp8plan.model.cost.power import CLOCK, MEMORY, sustained
from fp8plan.model.cost.step import StepModel
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.precision import BF16
from fp8plan.model.profile.library import datasheet_profile
from fp8plan.model.profile.profile import Profile

H200 = find_gpu("h200")
PROFILE = datasheet_profile(H200)
SHAPE = ModelShape.from_hf("Qwen/Qwen3-14B")


def at(clock: float, memory: float = 1.0) -> Profile:
    return replace(PROFILE, coefficients=PROFILE.coefficients | {CLOCK: clock, MEMORY: memory})


def test_rates_fall_and_times_of_sms_rise_by_the_clock() -> None:
    slow, fast = sustained(at(0.8)), PROFILE.coefficients
    for name, power in {
        "gemm.bf16.compute_efficiency": 1,
        "gemm.fp8_block.sm_bandwidth": 1,
        "attention.fp8.decode_tile_seconds": -1,
        "attention.bf16.prefill_pair_seconds": -1,
        "gemm.bf16.bandwidth_efficiency": 0,
        "gemm.bf16.launch_seconds": 0,
        "attention.bf16.decode_token_seconds": -1,
        "host.step_seconds": 0,
        "host.prompt_token_seconds": 0,
    }.items():
        assert slow.coefficients[name] == pytest.approx(fast[name] * 0.8**power)


def test_bandwidth_falls_with_the_memory_and_nothing_else() -> None:
    slow = sustained(at(1.0, memory=0.9)).coefficients
    changed = {name for name, value in slow.items() if value != PROFILE.coefficients[name]} - {CLOCK, MEMORY}
    assert "gemm.bf16.bandwidth_efficiency" in changed
    assert "attention.fp8.decode_bandwidth_efficiency" in changed
    assert {x for x in changed if not x.endswith("bandwidth_efficiency")} == {
        "sampling.v1.passes",
        "sampling.v2.passes",
    }
    assert not any(name.startswith("collective") for name in changed)
    for name in changed:
        assert slow[name] == pytest.approx(PROFILE.coefficients[name] * 0.9 ** (-1 if "passes" in name else 1))


def test_a_cpu_has_neither() -> None:
    profile = datasheet_profile(find_gpu("cpu"))
    assert sustained(profile) is profile
    batch = StepBatch(*(np.array([float(x)]) for x in (4, 800, 0, 0, 0, 0, 4)))
    shape = ModelShape.from_hf("fp8plan/dense-50m")
    cost = StepModel(shape, find_gpu("cpu"), BF16, EngineLimits.for_gpu(find_gpu("cpu")), profile).cost(batch)
    assert cost.partials.keys() <= profile.coefficients.keys()


@pytest.mark.parametrize(("requests", "slower"), [(2, 1.0), (1024, 1.22)])
def test_many_requests_feel_the_clock_and_few_do_not(requests: int, slower: float) -> None:
    batch = StepBatch(*(np.array([float(x)]) for x in (requests, 200 * requests, 0, 0, 0, 0, requests)))
    steps = [StepModel(SHAPE, H200, BF16, EngineLimits(), at(clock)) for clock in (1.0, 0.8)]
    full, held = (step.seconds(batch).item() for step in steps)
    assert held / full == pytest.approx(slower, abs=0.03)


@pytest.mark.parametrize("factor", [CLOCK, MEMORY])
def test_each_has_its_derivative(factor: str) -> None:
    batch = StepBatch(*(np.array([float(x)]) for x in (300, 90000, 8000, 2, 8000, 2e7, 302)))

    def cost(by: float) -> StepModel:
        values = at(0.9, 0.9).coefficients
        moved = replace(PROFILE, coefficients=values | {factor: values[factor] * by})
        return StepModel(SHAPE, H200, BF16, EngineLimits(), moved)

    step = 1e-6
    slope = (cost(np.exp(step)).seconds(batch) - cost(1.0).seconds(batch)) / step
    np.testing.assert_allclose(cost(1.0).cost(batch).partials[factor], slope, rtol=1e-3)
