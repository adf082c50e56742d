"""Memory and KV caches of new families against the engines that ran on an H200."""

from __future__ import annotations

from typing import Any

import pytest
from measured_families import NATIVE_MXFP4, VERSION, engine_name, engines, shape_of

from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits, model_runner
from fp8plan.model.memory.kv_plan import KvPlan, plan_kv_cache
from fp8plan.model.memory.kv_specs import model_caches
from fp8plan.model.memory.plan import MemoryPlan, memory_plan
from fp8plan.model.precision import PRESETS

H200 = find_gpu("h200")
GIVEN = (
    "gpu_memory_utilization",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "async_scheduling",
)
KINDS = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "sliding",
    "MLAAttentionSpec": "latent",
    "MambaSpec": "state",
}

# With native experts neither weights nor activations can be said.
PLANNED = [record for record in engines() if record["model"] != NATIVE_MXFP4]


def limits_of(record: dict[str, Any]) -> EngineLimits:
    """The limits that the engine was given. It chose its block size itself."""
    ranks, experts = record["tensor_parallel"], bool(record.get("expert_parallel"))
    given = {name: record[name] for name in GIVEN}
    return EngineLimits(**given, tensor_parallel_size=ranks, enable_expert_parallel=experts)


def planned(record: dict[str, Any]) -> MemoryPlan:
    return memory_plan(
        shape_of(record["model"]), PRESETS[record["precision"]], H200, limits_of(record), engine_version=VERSION
    )


def kv_plan_of(record: dict[str, Any]) -> KvPlan:
    """The plan for the memory that the engine itself found available."""
    limits = limits_of(record)
    shape, precision = shape_of(record["model"]), PRESETS[record["precision"]]
    found = model_caches(shape, precision, limits, limits.max_model_len or 0, vllm=VERSION)
    return plan_kv_cache(*found).within(record["memory"]["available_kv_cache_bytes"])


def test_many_engines_were_measured() -> None:
    assert len(engines()) == 36
    assert len(PLANNED) == 34


@pytest.mark.parametrize("record", engines(), ids=engine_name)
def test_the_kv_cache_is_the_engines_own(record: dict[str, Any]) -> None:
    plan = kv_plan_of(record)
    assert plan.num_blocks == record["num_gpu_blocks"]
    assert plan.tokens == record["vllm_kv_cache_size_tokens"]
    assert plan.block_size == record["block_size"]
    assert plan.num_blocks * plan.block_size == record["measured_kv_cache_tokens"]


@pytest.mark.parametrize("record", [x for x in engines() if "parts" in x], ids=engine_name)
def test_layers_are_grouped_as_by_the_engine(record: dict[str, Any]) -> None:
    def seen(group: dict[str, Any]) -> tuple[str, int, int, int]:
        spec = group["spec"]
        return KINDS[spec["kind"]], group["layers"], spec["block_size"], spec["page_size_bytes"]

    ours = [(x.kind, len(x.layers), x.block_size, x.page_bytes // len(x.layers)) for x in kv_plan_of(record).groups]
    assert sorted(ours) == sorted(map(seen, record["parts"]["cache_groups"]))


@pytest.mark.parametrize("record", PLANNED, ids=engine_name)
def test_pool_is_the_measured_one_within_a_hundredth(record: dict[str, Any]) -> None:
    plan = planned(record)
    # GLM-4.7-Flash: vLLM's guess of the graphs' memory was 0.5 or 1.7 GB, and with an FP8 cache it took 1.1 GB more of
    # activations, which is not explained.
    near = 0.024 if "GLM-4.7" in record["model"] else 0.01
    assert plan.num_gpu_blocks == pytest.approx(record["num_gpu_blocks"], rel=near)
    assert plan.kv_cache_tokens == pytest.approx(record["vllm_kv_cache_size_tokens"], rel=near)
    assert plan.pool_tokens == pytest.approx(record["measured_kv_cache_tokens"], rel=near)


@pytest.mark.parametrize("record", PLANNED, ids=engine_name)
def test_each_term_is_near_the_measured_one(record: dict[str, Any]) -> None:
    plan, memory = planned(record), record["memory"]
    gemma, dense_first = "gemma" in record["model"], "DeepSeek" in record["model"]
    unexplained = "GLM-4.7" in record["model"] and "fp8_kv" in record["precision"]
    assert plan.requested_bytes == pytest.approx(memory["requested_bytes"], rel=1e-5)
    unplanned = 512 << 20 if gemma else 0  # its longer rotary table (fp8plan.model.memory.plan)
    assert plan.weights_bytes + unplanned == pytest.approx(memory["weights_bytes"], rel=0.004)
    activations = pytest.approx(
        memory["peak_activation_bytes"], rel=0.17 if gemma else 0.3 if dense_first or unexplained else 0.04
    )
    assert plan.activation_bytes == activations
    if record["tensor_parallel"] == 1:
        assert plan.non_torch_bytes == pytest.approx(memory["non_torch_bytes"], rel=0.06)
    else:  # NCCL's buffers are planned as on other hosts; two GPUs took 71 MB
        assert memory["non_torch_bytes"] < plan.non_torch_bytes < 400 << 20
    near = 1100 if "GLM-4.7" in record["model"] else 260
    assert plan.cudagraph_bytes == pytest.approx(memory["cuda_graphs_estimated_bytes"], abs=near << 20)


@pytest.mark.parametrize("record", engines(), ids=engine_name)
def test_the_model_runner_is_the_engines(record: dict[str, Any]) -> None:
    assert model_runner(shape_of(record["model"]), H200, VERSION).upper() == record["model_runner"]
