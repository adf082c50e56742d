"""Returned experts: their bytes, and the seconds that they add to a rollout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fp8plan import Workload, plan
from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.cost.routes import route_bytes
from fp8plan.model.distributions import parse_distribution
from fp8plan.model.limits import EngineLimits
from fp8plan.model.profile.library import load_profile
from fp8plan.model.risk.remedies import Remedies
from fp8plan.model.rollout import Simulated, makespans, simulate
from fp8plan.model.setup import EngineSetup
from fp8plan.model.workload import Batch

QWEN = "Qwen/Qwen3-30B-A3B"
SHORT = Workload(8, 2, parse_distribution("fixed:64", "prompt"), parse_distribution("fixed:64", "response"))


# Layers, experts of a token and bytes of a number: vllm/.../routed_experts_capturer.py counts dense layers, too.
@pytest.mark.parametrize(
    ("model", "token"),
    [
        (QWEN, 48 * 8),
        ("Qwen/Qwen3-235B-A22B", 94 * 8),
        ("zai-org/GLM-4.5-Air", 46 * 8),
        ("fp8plan/gpt-oss-20b-bf16", 24 * 4),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 48 * 10 * 2),  # of 512 experts
    ],
)
def test_a_token_has_a_number_for_each_layer_and_choice(model: str, token: int) -> None:
    assert route_bytes(ModelShape.from_hf(model), EngineLimits(), 0, 1).rollout == token


def test_the_store_is_as_large_as_the_kv_cache() -> None:
    shape, limits = ModelShape.from_hf(QWEN), EngineLimits(max_num_batched_tokens=8192, max_num_seqs=1024)
    few, many = (route_bytes(shape, limits, tokens, 0) for tokens in (0, 1_000_000))
    assert many.host - few.host == 384_000_000
    assert few.host == (2 * (512 + 1024) + 1024) * 16 * 384  # blocks in flight, 25 MB
    assert many.device == few.device == 8192 * 384 * 4


def run(returned: bool, loop_s: float | None = None, count: int = 64) -> Simulated:
    batch = Batch(np.full(count, 64), np.full(count, 128), np.arange(count))
    limits = EngineLimits(enable_return_routed_experts=returned)
    setup = EngineSetup(QWEN, "h200", "fp8_block", limits, engine_version="0.33.0").holding(192)
    return simulate(setup, batch, load_profile("h200", "0.33.0")[0].on_host(loop_s))


def test_returned_experts_take_time_on_gpu_and_host_that_is_theory_and_widens_the_interval() -> None:
    without, with_them = run(False), run(True)
    before, after = without.rollout, with_them.rollout
    layers = after.parts["routes"] * after.makespan_s / after.num_steps
    assert layers == pytest.approx(48 * 1.8e-6 + 6e-6, rel=0.05)  # the GPU's pace is near 1
    assert 1 < after.makespan_s / before.makespan_s < 1.1
    assert after.rests_on["kernels"]["routes"] == {"theory": pytest.approx(after.parts["routes"])}
    assert "routes" not in before.parts
    assert after.makespan_high_s / after.makespan_s > before.makespan_high_s / before.makespan_s


def test_a_slow_host_pays_for_each_request_that_runs() -> None:
    """A fast one files the rows while the GPU works."""

    def added(loop_s: float) -> float:
        before, after = (run(returned, loop_s, 512).rollout.makespan_s for returned in (False, True))
        return after / before

    assert added(1.5e-4) < 1.03
    assert added(8e-4) > 1.1


def test_makespans_alone_equal_those_of_whole_rollouts() -> None:
    with_them = run(True)
    assert makespans([with_them.schedules], with_them.model) == [pytest.approx(with_them.rollout.makespan_s)]


def test_router_replay_is_a_setting_of_every_engine_of_a_plan() -> None:
    planned = plan(QWEN, "h200", SHORT, remedies=Remedies(router_replay=True))
    assert planned.limits.enable_return_routed_experts
    for choice in ("bf16", "fp8_block"):
        assert planned.vllm_kwargs(choice)["enable_return_routed_experts"] is True
    assert "enable_return_routed_experts" not in plan(QWEN, "h200", SHORT).vllm_kwargs()


def test_router_replay_is_refused_where_no_engine_returns_experts() -> None:
    replayed = Remedies(router_replay=True)
    with pytest.raises(ConfigError, match="router_replay is True, and Qwen/Qwen3-8B has no experts; leave --router"):
        plan("Qwen/Qwen3-8B", "h200", SHORT, remedies=replayed)
    off = EngineLimits(enable_prefix_caching=False)
    with pytest.raises(ConfigError, match=r"True without prefix caching, .* type --prefix-caching"):
        plan(QWEN, "h200", SHORT, limits=off, remedies=replayed)
    with pytest.raises(ConfigError, match="planned for GPUs alone; leave --router-replay out"):
        plan(QWEN, "cpu", SHORT, remedies=replayed)
    own = EngineLimits(enable_return_routed_experts=True)
    with pytest.raises(ConfigError, match="experts is True, and Qwen/Qwen3-8B has no experts; leave enable_return"):
        plan("Qwen/Qwen3-8B", "h200", SHORT, limits=own)


def test_a_user_s_own_argument_of_vllm_is_predicted_too() -> None:
    limits = replace(EngineLimits(), enable_return_routed_experts=True)
    assert EngineSetup(QWEN, "h200", "bf16", limits).limits.vllm_arguments()["enable_return_routed_experts"] is True
