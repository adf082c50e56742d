"""The `cpu` of a laptop: what it offers, what it refuses, and how well its profile does on what no fit has seen."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fp8plan import Fixed, LogNormal, Plan, Workload
from fp8plan import plan as make_plan
from fp8plan.errors import CapacityError, ConfigError, ProfileError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.hardware import find_gpu, gpus
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.plan import memory_plan
from fp8plan.model.plan.planner import predict
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.precision import BF16, find_precision
from fp8plan.model.profile.library import datasheet_profile, load_profile, profiles_path
from fp8plan.model.validate.records import Record, read_records
from fp8plan.model.validate.validate import validate

CPU = find_gpu("cpu")
VERSION = "0.30.0"
FOLDER = profiles_path() / "cpu" / f"vllm-{VERSION}"
WORK = Workload(8, 2, Fixed(100), LogNormal(mean=60, sigma=0.5, max=128), seed=0)


def plan(**changes: Any) -> Plan:
    return make_plan(**{"model": "dense-50m", "gpu": "cpu", "workload": WORK, "engine_version": VERSION} | changes)


def records(part: str) -> list[Record]:
    return read_records(FOLDER / part / "rollouts.jsonl")


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan()


def test_a_cpu_is_no_gpu() -> None:
    assert [g.name for g in (*gpus(), CPU) if g.is_cpu] == ["cpu"]


def test_a_plan_for_a_cpu_is_calibrated_and_says_what_the_cpu_has_not(made: Plan) -> None:
    assert made.profile["kind"] == "calibrated"
    offered = {choice.precision: choice.reason for choice in made.choices}
    assert [name for name, reason in offered.items() if reason is None] == ["bf16", "fp8_kv"]
    assert all("no blockwise FP8 GEMM" in (offered[name] or "") for name in ("fp8_block", "fp8_block+fp8_kv"))
    bf16, fp8_kv = (choice for choice in made.choices if choice.available)
    assert 0 < bf16.makespan_low_s < bf16.makespan_s < bf16.makespan_high_s < 3 * bf16.makespan_low_s
    assert fp8_kv.kv_cache_tokens == 2 * bf16.kv_cache_tokens
    assert not any("Uncalibrated" in reason for reason in made.reasons)


def test_everyone_is_told_which_cpu_was_measured() -> None:
    (warning,) = predict(PlanRequest("dense-50m", "cpu", WORK, engine_version=VERSION)).plan.warnings
    assert "CPUs differ by several times" in warning
    assert "EPYC" in warning


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"precisions": ["fp8_block"]}, "fp8_block was asked for: .*no blockwise FP8 GEMM.*KV cache alone can be FP8"),
        ({"gpus": 2}, "tensor_parallel_size is 1, data_parallel_size 2; allowed on a CPU: 1 and 1"),
        ({"limits": replace(EngineLimits.for_gpu(CPU), tensor_parallel_size=2)}, "allowed on a CPU: 1 and 1"),
        ({"limits": replace(EngineLimits.for_gpu(CPU), gpu_memory_utilization=0.5)}, "VLLM_CPU_KVCACHE_SPACE"),
        ({"limits": EngineLimits(block_size=16)}, "block_size is 16; allowed on a CPU: a multiple of 32"),
    ],
)
def test_what_makes_no_sense_on_a_cpu_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(**changes)


def test_a_kernel_that_was_not_measured_is_refused() -> None:
    """No GPU's efficiency stands in for a CPU's: the two priors share names, and of these no value."""
    own, other = datasheet_profile(CPU).coefficients, datasheet_profile(find_gpu("h200")).coefficients
    assert set(own) < set(other)
    with pytest.raises(ProfileError, match=r"moe\.bf16.*was not measured"):
        plan(model="moe-7b")


def test_the_limits_are_those_vllm_runs_with_on_a_cpu() -> None:
    asked = EngineLimits(max_num_seqs=32, max_num_batched_tokens=4096, block_size=128)
    assert asked.on(CPU) == replace(asked, async_scheduling=False, enforce_eager=True)
    assert asked.on(find_gpu("h200")) == asked
    for record in records("steps"):
        measured = replace(record.limits, max_model_len=None, num_gpu_blocks=None)
        assert measured == EngineLimits.for_gpu(CPU)


@pytest.mark.parametrize("part", ["steps", "validation"])
def test_the_kv_pool_is_the_engines_to_the_token(part: str) -> None:
    for record in records(part):
        shape, kept = ModelShape.from_hf(record.fields["model"]), find_precision(record.fields["precision"])
        assert memory_plan(shape, kept, CPU, record.limits).kv_cache_tokens == record.fields["measured_kv_cache_tokens"]


def test_a_request_longer_than_the_pool_offers_no_way_out_that_a_cpu_has_not() -> None:
    with pytest.raises(CapacityError, match=r"4\.00 GiB.*try a smaller max_model_len$"):
        memory_plan(ModelShape.from_hf("Qwen3-8B"), BF16, CPU, EngineLimits.for_gpu(CPU), 40000)


def test_vllm_is_told_the_pool_and_no_share_of_a_gpu(made: Plan) -> None:
    told = json.loads(made.emit("vllm"))
    assert told["env"] == {"VLLM_CPU_KVCACHE_SPACE": "4"}
    assert "gpu_memory_utilization" not in told["engine_args"]
    assert told["engine_args"]["enforce_eager"] is True
    assert "block_size" not in told["engine_args"]  # vLLM takes 128 by itself
    for trainer in ("verl", "trl"):
        with pytest.raises(ConfigError, match="runs vLLM on GPUs"):
            made.emit(trainer)


def test_the_profile_is_within_20_percent_of_rollouts_no_fit_has_seen() -> None:
    profile, _ = load_profile(CPU, VERSION, strict=True)
    fitted = {record.fields["key"] for record in records("steps")}
    unseen = records("validation")
    assert not fitted & {record.fields["key"] for record in unseen}
    found = validate(unseen, strict=True)
    assert found.makespan_mape < 0.2
    assert found.coverage >= 0.8
    assert profile.kind == "calibrated"
    for row in found.records:
        assert row["predicted_preemptions"] == pytest.approx(row["preemptions"], rel=0.15, abs=5)
