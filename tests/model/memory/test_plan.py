from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_families import shape_of

from fp8plan.errors import CapacityError, ConfigError
from fp8plan.model.architecture import ModelShape, bundled_models
from fp8plan.model.hardware import find_gpu, gpus
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.plan import MemoryPlan, check_pool, memory_plan
from fp8plan.model.precision import BF16, FP8_BLOCK, FP8_BLOCK_KV, FP8_KV, PRESETS

GIB = 1 << 30
VERSION = "0.26.0"
MEASURED = Path(__file__).parents[3] / f"profiles/h200_sxm/vllm-{VERSION}/first_look"
LIMITS = ("gpu_memory_utilization", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size")
H200 = find_gpu("h200")
QWEN3_8B = ModelShape.from_hf("Qwen3-8B")
QWEN3_30B = ModelShape.from_hf("Qwen3-30B-A3B")

small = st.sampled_from(["Qwen3-0.6B", "Qwen3-8B", "Llama-3.2-1B", "Qwen3-30B-A3B"]).map(ModelShape.from_hf)
precisions = st.sampled_from(list(PRESETS.values()))


def measured_engines() -> list[dict[str, Any]]:
    """One record of each engine measured on an H200; runs that stalled tell memory as well as the others."""
    records = [json.loads(row) for name in ("rollouts", "stalled") for row in (MEASURED / f"{name}.jsonl").open()]
    return list({(record["model"], record["precision"]): record for record in records}.values())


def planned(record: dict[str, Any]) -> MemoryPlan:
    limits = EngineLimits(**{field: record[field] for field in LIMITS})
    shape, precision = ModelShape.from_hf(record["model"]), PRESETS[record["precision"]]
    return memory_plan(shape, precision, H200, limits, engine_version=VERSION)


def engine_name(record: dict[str, Any]) -> str:
    return f"{record['model'].partition('/')[2]}-{record['precision']}"


def test_six_engines_were_measured() -> None:
    assert len(measured_engines()) == 6


@pytest.mark.parametrize("record", measured_engines(), ids=engine_name)
def test_pool_equals_the_measured_one(record: dict[str, Any]) -> None:
    # The constants were set with these engines, so this guards them; it validates nothing on other models or GPUs.
    assert planned(record).kv_cache_tokens == pytest.approx(record["measured_kv_cache_tokens"], rel=0.01)


@pytest.mark.parametrize("record", measured_engines(), ids=engine_name)
def test_each_term_is_near_the_measured_one(record: dict[str, Any]) -> None:
    plan, memory = planned(record), record["memory"]
    assert plan.requested_bytes == pytest.approx(memory["requested_bytes"], rel=1e-5)
    assert plan.weights_bytes == pytest.approx(memory["weights_bytes"], rel=0.002)
    assert plan.activation_bytes == pytest.approx(memory["peak_activation_bytes"], rel=0.04)
    assert plan.non_torch_bytes == pytest.approx(memory["non_torch_bytes"], rel=0.01)
    assert plan.cudagraph_bytes == pytest.approx(memory["cuda_graphs_estimated_bytes"], rel=0.01)


def test_pool_is_near_an_independent_estimate() -> None:
    # AIConfigurator 0.12: 782,475 tokens for Qwen3-8B in BF16 at 0.9 of an H200.
    plan = memory_plan(QWEN3_8B, BF16, H200, EngineLimits(gpu_memory_utilization=0.9))
    assert plan.kv_cache_tokens == pytest.approx(782_475, rel=0.03)


def test_fp8_kv_doubles_the_pool_and_fp8_weights_enlarge_it() -> None:
    tokens = {p.name: memory_plan(QWEN3_8B, p, H200, EngineLimits()).kv_cache_tokens for p in PRESETS.values()}
    assert tokens["fp8_kv"] == pytest.approx(2 * tokens["bf16"], rel=0.001)  # less by DeepGEMM's workspace
    assert tokens["fp8_block+fp8_kv"] == pytest.approx(2 * tokens["fp8_block"], abs=32)
    assert tokens["bf16"] < tokens["fp8_block"]


@given(small, precisions, st.sampled_from(gpus()), st.floats(0.85, 1.0))
def test_every_byte_is_accounted_for_and_none_is_promised_twice(shape, precision, g, utilization) -> None:
    limits = EngineLimits(gpu_memory_utilization=utilization, max_num_batched_tokens=8192, max_num_seqs=256)
    try:
        plan = memory_plan(shape, precision, g, limits)
    except CapacityError:
        return
    assert 0 <= plan.available_bytes - plan.kv_bytes < plan.kv.block_bytes
    assert plan.kv_bytes + plan.weights_bytes + plan.activation_bytes < g.memory_bytes
    assert plan.usable_blocks == plan.num_gpu_blocks - 1 > 0


@given(precisions, st.floats(0.3, 0.9), st.floats(0.01, 0.1))
def test_more_utilization_never_gives_fewer_blocks(precision, utilization, more) -> None:
    one, two = (
        memory_plan(QWEN3_8B, precision, H200, EngineLimits(gpu_memory_utilization=u))
        for u in (utilization, utilization + more)
    )
    assert one.num_gpu_blocks < two.num_gpu_blocks


def test_imposed_pool_is_taken_as_the_schedulers() -> None:
    plan = memory_plan(QWEN3_8B, BF16, H200, EngineLimits(num_gpu_blocks=500))
    assert plan.imposed
    assert plan.usable_blocks == 500
    assert not memory_plan(QWEN3_8B, BF16, H200, EngineLimits()).imposed


def test_an_imposed_pool_larger_than_the_gpu_is_refused() -> None:
    shape, card = ModelShape.from_hf("Qwen/Qwen3-8B"), find_gpu("h200")

    def check(blocks: int) -> None:
        limits = EngineLimits(num_gpu_blocks=blocks)
        check_pool(memory_plan(shape, BF16, card, limits, 100), card, limits)

    with pytest.raises(CapacityError, match=r"num_gpu_blocks 1000000000000 is .* GiB of KV cache .* at most \d+,"):
        check(10**12)
    room = card.memory_bytes - memory_plan(shape, BF16, card, EngineLimits(), 100).weights_bytes
    most = room // (16 * shape.kv_bytes_per_token(BF16)) - 1
    check(most)
    with pytest.raises(CapacityError, match=f"at most {most},"):
        check(most + 1)


def test_imposed_pool_smaller_than_one_request() -> None:
    limits = EngineLimits(num_gpu_blocks=100, max_model_len=1600)
    assert memory_plan(QWEN3_8B, BF16, H200, limits).usable_blocks == 100
    with pytest.raises(CapacityError, match=r"num_gpu_blocks 100 holds 1600 tokens.*1601 tokens needs 101 blocks"):
        memory_plan(QWEN3_8B, BF16, H200, replace(limits, max_model_len=1601))


def test_an_imposed_pool_is_shared_by_all_groups() -> None:
    shape = shape_of("nvidia/Nemotron-H-8B-Base-8K")
    limits = EngineLimits(num_gpu_blocks=14, max_model_len=8192, enable_prefix_caching=False)
    plan = memory_plan(shape, BF16, H200, limits)  # a state of each of six groups, and 8192 tokens in blocks of 1040
    assert (plan.usable_blocks, plan.num_gpu_blocks, plan.kv.block_size) == (14, 15, 1040)
    assert plan.kv_bytes == 15 * 4 * 1040 * 4096
    with pytest.raises(CapacityError, match=r"7 groups of layers share num_gpu_blocks 13, .* needs 14 blocks; raise"):
        memory_plan(shape, BF16, H200, replace(limits, num_gpu_blocks=13))


def test_tokens_of_a_windowed_pool_are_those_of_whole_requests() -> None:
    limits = EngineLimits(max_model_len=8192, gpu_memory_utilization=0.9)
    plan = memory_plan(shape_of("allenai/Olmo-3-1025-7B"), BF16, H200, limits)
    assert plan.kv_cache_tokens == plan.num_gpu_blocks * 8192 // (4 * 512 + 3)  # a window may begin within a block
    assert plan.pool_tokens == plan.num_gpu_blocks * 16


def test_longest_request_stands_in_for_max_model_len() -> None:
    limits = EngineLimits(num_gpu_blocks=100)
    with pytest.raises(CapacityError):
        memory_plan(QWEN3_8B, BF16, H200, limits, longest_request=1601)
    assert memory_plan(QWEN3_8B, BF16, H200, replace(limits, max_model_len=1600), longest_request=9999)


def test_a_model_that_does_not_fit_says_what_would() -> None:
    """And what it says is true; what would not help is not said."""
    big = ModelShape.from_hf("Qwen2.5-72B")
    with pytest.raises(
        CapacityError, match=r"Qwen/Qwen2\.5-72B in bf16 does not fit NVIDIA H200.*weights 135\."
    ) as error:
        memory_plan(big, BF16, H200, EngineLimits(), longest_request=20480)
    assert str(error.value).endswith("try tensor_parallel_size 2 or FP8 weights")
    assert memory_plan(big, BF16, H200, EngineLimits(tensor_parallel_size=2), 20480).num_gpu_blocks > 1280
    assert memory_plan(big, FP8_BLOCK, H200, EngineLimits(), longest_request=20480).num_gpu_blocks > 1280
    huge = ModelShape.from_hf("Qwen3-235B-A22B")
    with pytest.raises(CapacityError, match=r"try tensor_parallel_size 8$"):  # two and four do not hold the weights
        memory_plan(huge, BF16, find_gpu("h100"), EngineLimits(tensor_parallel_size=2), longest_request=20480)
    with pytest.raises(CapacityError, match=r"try .*a higher gpu_memory_utilization.* or a smaller max_model_len$"):
        memory_plan(QWEN3_8B, BF16, H200, EngineLimits(gpu_memory_utilization=0.14), longest_request=40960)


def test_a_pool_below_max_model_len_refuses_as_vllm_does() -> None:
    limits = EngineLimits(gpu_memory_utilization=0.13, max_model_len=40960)
    with pytest.raises(CapacityError, match="40960 tokens"):
        memory_plan(QWEN3_8B, BF16, H200, limits)
    assert memory_plan(QWEN3_8B, FP8_BLOCK_KV, H200, limits).kv_cache_tokens >= 40960


def test_tensor_parallel_must_divide() -> None:
    with pytest.raises(ConfigError, match="allowed: 1, 2, 4"):
        memory_plan(ModelShape.from_hf("Qwen2.5-7B"), BF16, H200, EngineLimits(tensor_parallel_size=8))


@pytest.mark.parametrize("name", bundled_models())
def test_two_gpus_hold_more_than_one(name: str) -> None:
    shape = ModelShape.from_hf(name)
    precision = FP8_KV if shape.stored is None else shape.stored.precisions[1]
    pools = []
    for tp in (1, 2, 4, 8, 16):
        if tp not in shape.allowed_tensor_parallel():
            continue
        try:
            limits = replace(EngineLimits.for_gpu(find_gpu("b200"), shape.recurrent), tensor_parallel_size=tp)
            plan = memory_plan(shape, precision, find_gpu("b200"), limits)
            pools.append(plan.kv_cache_tokens)
        except CapacityError:
            pools.append(0)
    assert pools == sorted(pools)
    assert pools[-1] > 0
