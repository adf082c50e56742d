"""The sustained clock: what it slows, what it does not, and its derivative."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fp8plan.model.architecture import ModelShape
from fp8plan.model.batch import StepBatch
from fp8plan.model.clock import SUSTAINED, sustained
from fp8plan.model.hardware import gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.precision import BF16
from fp8plan.model.profile import Profile, datasheet_profile
from fp8plan.model.step import StepModel

H200 = gpu("h200")
PROFILE = datasheet_profile(H200)
SHAPE = ModelShape.from_hf("Qwen/Qwen3-14B")


def at(clock: float) -> Profile:
    return replace(PROFILE, coefficients=PROFILE.coefficients | {SUSTAINED: clock})


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


def test_a_cpu_has_no_such_clock() -> None:
    profile = datasheet_profile(gpu("cpu"))
    assert sustained(profile) is profile
    batch = StepBatch(*(np.array([float(x)]) for x in (4, 800, 0, 0, 0, 0, 4)))
    shape = ModelShape.from_hf("fp8plan/dense-50m")
    cost = StepModel(shape, gpu("cpu"), BF16, EngineLimits.for_gpu(gpu("cpu")), profile).cost(batch)
    assert cost.partials.keys() <= profile.coefficients.keys()


@pytest.mark.parametrize(("requests", "slower"), [(2, 1.0), (1024, 1.22)])
def test_many_requests_feel_the_clock_and_few_do_not(requests: int, slower: float) -> None:
    batch = StepBatch(*(np.array([float(x)]) for x in (requests, 200 * requests, 0, 0, 0, 0, requests)))
    steps = [StepModel(SHAPE, H200, BF16, EngineLimits(), at(clock)) for clock in (1.0, 0.8)]
    full, held = (step.seconds(batch).item() for step in steps)
    assert held / full == pytest.approx(slower, abs=0.03)


def test_the_clock_has_its_derivative() -> None:
    batch = StepBatch(*(np.array([float(x)]) for x in (300, 90000, 500, 2, 700, 9e4, 302)))

    def cost(clock: float) -> StepModel:
        return StepModel(SHAPE, H200, BF16, EngineLimits(), at(clock))

    step = 1e-6
    slope = (cost(0.9 * np.exp(step)).seconds(batch) - cost(0.9).seconds(batch)) / step
    np.testing.assert_allclose(cost(0.9).cost(batch).partials[SUSTAINED], slope, rtol=1e-3)
