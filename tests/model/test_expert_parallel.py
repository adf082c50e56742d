"""Expert parallelism from the limits to the settings: what changes with it, and what does not."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.cost.moe import skips_other_rows
from fp8plan.model.cost.power import bytes_bound, flops_bound
from fp8plan.model.distributions import Fixed
from fp8plan.model.emit.vllm import vllm_kwargs
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.activations import activation_peak_bytes
from fp8plan.model.memory.plan import loaded_weight_bytes
from fp8plan.model.plan.explain import Answer, whole_or_sliced
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.planner import plan, predict
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.precision import BF16, FP8_BLOCK
from fp8plan.model.profile.library import load_profile
from fp8plan.model.rl_step import full_prefill
from fp8plan.model.setup import EngineSetup
from fp8plan.model.shards import why_not_shardable
from fp8plan.model.validate.records import read_records
from fp8plan.model.workload import Workload

MOE, DENSE = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-8B"
A3B = ModelShape.from_hf(MOE)
H200 = find_gpu("h200")
WORK = Workload(8, 4, Fixed(128), Fixed(256))
SLICED = EngineLimits(tensor_parallel_size=8)
WHOLE = replace(SLICED, enable_expert_parallel=True)


@pytest.fixture(scope="module")
def both() -> Any:
    return predict(PlanRequest(MOE, H200, WORK, gpus=2, precisions=["bf16", "fp8_block"]))


def test_one_gpu_shares_nothing_out() -> None:
    """FusedMoEParallelConfig.make: use_ep needs more than one rank."""
    one = EngineLimits(enable_expert_parallel=True)
    assert (one.expert_ranks, one.expert_slices, one.cut) == (1, 1, (1, False))
    assert (WHOLE.expert_ranks, WHOLE.expert_slices) == (8, 1)
    assert (SLICED.expert_ranks, SLICED.expert_slices) == (1, 8)
    answers = [plan(MOE, H200, WORK, precisions=["bf16"], limits=x) for x in (EngineLimits(), one)]
    assert answers[0].choices == answers[1].choices
    with pytest.raises(ConfigError, match="enable_expert_parallel is 1; allowed: True or False"):
        EngineLimits(enable_expert_parallel=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_without_experts_refuses_it_by_name(size: int) -> None:
    limits = EngineLimits(tensor_parallel_size=size, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match=r"enable_expert_parallel is True, and .*Qwen3-8B has no experts"):
        plan(DENSE, H200, WORK, limits=limits)
    with pytest.raises(ConfigError, match="has no experts"):
        EngineSetup(DENSE, H200, "bf16", limits).memory(512)


def test_a_rank_holds_as_many_bytes_of_whole_experts_as_of_slices() -> None:
    assert A3B.weight_bytes(BF16, 8, 8) == A3B.weight_bytes(BF16, 8)
    # Slices of 96 are padded to blocks of 128, whole experts of 768 are not.
    padding = 48 * 128 * 3 * 2048 * (128 - 96)
    saved = A3B.weight_bytes(FP8_BLOCK, 8) - A3B.weight_bytes(FP8_BLOCK, 8, 8)
    assert padding < saved < padding * 1.001  # and the scales
    assert loaded_weight_bytes(A3B, FP8_BLOCK, 8, 8) < loaded_weight_bytes(A3B, FP8_BLOCK, 8)


def test_experts_that_do_not_divide_fill_one_rank_more() -> None:
    part, layers = A3B.parts_of(type(A3B.layers[0].mlp))[0]
    odd = replace(A3B, layers=tuple(replace(x, mlp=replace(part, num_experts=60)) for x in A3B.layers))  # type: ignore[type-var]
    even = replace(A3B, layers=tuple(replace(x, mlp=replace(part, num_experts=64)) for x in A3B.layers))  # type: ignore[type-var]
    router = layers * 4 * 2048 * 2
    assert even.weight_bytes(BF16, 8, 8) - odd.weight_bytes(BF16, 8, 8) == router
    assert even.weight_bytes(BF16, 8) - odd.weight_bytes(BF16, 8) > 10 * router


def test_activations_are_those_of_whole_experts() -> None:
    more = activation_peak_bytes(A3B, BF16, H200, WHOLE) - activation_peak_bytes(A3B, BF16, H200, SLICED)
    assert more == 0  # a row of the model's width is wider than 2 x 768
    wide = ModelShape.from_hf("fp8plan/gpt-oss-20b-bf16")
    assert activation_peak_bytes(wide, BF16, H200, WHOLE) > activation_peak_bytes(wide, BF16, H200, SLICED)


def test_verl_can_start_fp8_on_8_gpus_with_whole_experts() -> None:
    reason = why_not_shardable(A3B, FP8_BLOCK, 8, "verl")
    assert reason is not None
    assert "experts_w2 has 96 inputs" in reason
    assert reason.endswith("or expert parallelism, which leaves experts whole")
    assert why_not_shardable(A3B, FP8_BLOCK, 8, "verl", expert_parallel=True) is None


def test_channels_of_an_expert_need_not_divide() -> None:
    part, _ = A3B.parts_of(type(A3B.layers[0].mlp))[0]
    odd = replace(A3B, layers=tuple(replace(x, mlp=replace(part, intermediate_size=771)) for x in A3B.layers))  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="771 channels of an expert"):
        odd.check_tensor_parallel(4)
    odd.check_tensor_parallel(4, expert_parallel=True)
    assert odd.allowed_tensor_parallel(8, expert_parallel=True) == A3B.allowed_tensor_parallel(8)


def test_the_time_is_above_the_datasheet_s_and_said_to_be_modelled() -> None:
    profile = load_profile(H200)[0]
    whole, sliced = (EngineSetup(A3B, H200, "bf16", x).step_model(profile) for x in (WHOLE, SLICED))
    batch = full_prefill(A3B, WHOLE, 1024)
    assert whole.seconds(batch) > np.maximum(bytes_bound(whole, batch), flops_bound(whole, batch))
    np.testing.assert_allclose(bytes_bound(whole, batch), bytes_bound(sliced, batch))
    np.testing.assert_allclose(flops_bound(whole, batch), flops_bound(sliced, batch))
    reason = "moe: whole experts shared out over 8 GPUs, not measured"
    assert set(whole.outside_hull(batch)) - set(sliced.outside_hull(batch)) == {reason}
    spread = [np.log(np.divide(*x.timed(batch).interval(np.ones(1), 1.0))) for x in (whole, sliced)]
    assert spread[0] < spread[1] < 0
    assert profile.layout_error(8, True) ** 2 == pytest.approx(
        profile.layout_error(8) ** 2 + profile.layout_error(2) ** 2
    )
    assert profile.layout_error(1, True) == profile.layout_error(2)


def test_kernels_that_activate_other_ranks_rows_are_triton_s_which_a_plan_asks_for_on_hopper() -> None:
    assert [name for name in ("a100", "h200", "l40s", "b200") if skips_other_rows(find_gpu(name))] == ["b200"]
    asked = {
        name: vllm_kwargs(EngineSetup(A3B, name, FP8_BLOCK, WHOLE)).get("moe_backend") for name in ("h200", "b200")
    }
    assert asked == {"h200": "triton", "b200": None}


def test_a_search_tries_both_cuts_of_a_model_with_experts(both: Any) -> None:
    layouts = dict.fromkeys(c.layout for c in both.plan.choices)
    assert list(layouts) == [(1, 2, False), (2, 1, False), (2, 1, True)]
    assert all(c.extrapolated for c in both.plan.choices if c.expert_parallel)
    dense = plan(DENSE, H200, WORK, gpus=2, precisions=["bf16"])
    assert [c.layout for c in dense.choices] == [(1, 2, False), (2, 1, False)]


def test_the_search_makes_no_schedule_of_its_own_for_whole_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8plan.model import rollout

    made: list[Any] = []
    schedule = rollout.schedule_with
    monkeypatch.setattr(rollout, "schedule_with", lambda *x, **y: made.append(x) or schedule(*x, **y))
    found = predict(PlanRequest(MOE, H200, WORK, gpus=2, precisions=["bf16"]))
    assert len([c for c in found.plan.choices if c.available]) == 3
    assert len(made) == 3  # of two replicas, and of one


def test_settings_follow_the_choice(both: Any) -> None:
    found = both.plan
    number = next(i for i, c in enumerate(found.choices) if c.expert_parallel and c.precision == "bf16")
    assert found.setup(number).limits.enable_expert_parallel
    assert found.vllm_kwargs(number)["enable_expert_parallel"] is True
    assert "--enable-expert-parallel" in found.emit("vllm-serve", number)
    assert "actor_rollout_ref.rollout.expert_parallel_size=2" in found.verl_overrides(number)
    assert "enable_expert_parallel" not in found.vllm_kwargs(number - 2)
    assert not any("expert_parallel" in x for x in found.verl_overrides(number - 2))
    with pytest.raises(ConfigError, match="enable_expert_parallel is False there, the plan has True"):
        found.trl_config(number, mode="colocate")
    assert found.trl_config(number)["vllm_mode"] == "server"
    assert "--enable-expert-parallel" in json.loads(found.emit("trl", number))["command"]


def test_verl_s_own_config_takes_the_number_of_ranks() -> None:
    config = pytest.importorskip("verl.workers.config.rollout").RolloutConfig
    config(name="vllm", tensor_model_parallel_size=4, expert_parallel_size=4)
    with pytest.raises(AssertionError, match="expert_parallel_size must be equal"):
        config(name="vllm", tensor_model_parallel_size=4, expert_parallel_size=2)


def test_a_saved_plan_has_its_whole_experts(both: Any) -> None:
    assert any(choice.expert_parallel for choice in both.plan.choices)
    assert Plan.from_json(both.plan.to_json()) == both.plan


def test_the_reasons_say_why_whole_experts_win_or_lose(both: Any) -> None:
    choices = both.plan.choices
    sliced, whole = (next(i for i, c in enumerate(choices) if c.layout == (2, 1, x)) for x in (False, True))
    faster = min((sliced, whole), key=lambda i: choices[i].seconds)
    slower = sliced + whole - faster
    answer = Answer(choices, faster, both.rollouts, load_profile(H200)[0])
    (sentence,) = whole_or_sliced(answer)
    assert f"{choices[slower].seconds / choices[faster].seconds:.2f}x as fast as " in sentence
    assert re.search(r"(expert parallelism|a slice of every expert on each GPU) \(90%: .* to .*\): it spends", sentence)
    assert "s on experts instead of" in sentence
    assert whole_or_sliced(replace(answer, chosen=slower)) == []
    cannot = tuple(replace(c, reason="no room", makespan_s=None) if i == sliced else c for i, c in enumerate(choices))
    assert whole_or_sliced(replace(answer, choices=cannot, chosen=whole)) == [
        "Without expert parallelism this layout cannot run: no room."
    ]


def test_a_record_says_whether_experts_were_whole(tmp_path: Any) -> None:
    fields = {"model": MOE, "gpu": "h200", "engine_version": "0.26.0", "precision": "bf16", "tensor_parallel": 2}
    fields |= {"prompt_lengths": [5], "response_lengths": [5], "seconds": 1.0}
    path = tmp_path / "records.jsonl"
    path.write_text(
        "\n".join(json.dumps(fields | x) for x in ({}, {"expert_parallel": False}, {"expert_parallel": True}))
    )
    found = read_records(path)
    assert [x.limits.enable_expert_parallel for x in found] == [False, False, True]
    assert found[0].group == found[1].group != found[2].group
