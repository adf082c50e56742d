"""A KV block for each running request of a model with recurrent layers, as vLLM's full CUDA graphs demand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from family_configs import config_of, shape_of

from fp8plan.errors import CapacityError, ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits, Lowerable
from fp8plan.model.memory.plan import MemoryPlan
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.planner import plan
from fp8plan.model.setup import EngineSetup
from fp8plan.model.tune.request import TuneRequest
from fp8plan.model.tune.search import search
from fp8plan.model.workload import Workload

BUNDLED = (
    *("Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3-Next-80B-A3B-Instruct", "nvidia/Nemotron-H-8B-Base-8K"),
    *("ibm-granite/granite-4.0-h-small", "ibm-granite/granite-4.0-h-tiny"),
)
FAMILIES = ("falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2_moe", "nemotron_h", "qwen3_5", "qwen3_5_moe")
GPUS = ("rtx4090", "l40s", "a100", "h100", "h200", "b200")
WORK = Workload(8, 4, 1024, 1000)
TIGHT = ("Qwen/Qwen3.5-9B", "rtx4090")  # 173 blocks at vLLM's default of 256 requests


def hybrids() -> list[ModelShape]:
    made = [shape_of(config_of(name, {}), name) for name in FAMILIES]
    return [*map(ModelShape.from_hf, BUNDLED), *made]


@cache
def started() -> list[tuple[EngineSetup, EngineSetup, MemoryPlan]]:
    """Engines with vLLM's default limits, the engines that are planned for them, and their memory."""
    engines = []
    for shape in hybrids():
        for gpu in map(find_gpu, GPUS):
            for precision in ("bf16", "fp8_block", "fp8_kv"):
                setup = EngineSetup(shape, gpu, precision, engine_version="0.32.0").holding(2048)
                try:
                    setup.check_precision()
                    engines.append((setup, *setup.placed()))
                except (CapacityError, ConfigError):  # memory is too small, or there is no such precision
                    continue
    return engines


def test_no_hybrid_engine_may_run_more_requests_than_it_has_blocks() -> None:
    lowered = [(asked, planned) for asked, planned, _ in started() if planned is not asked]
    assert len(started()) >= 60
    assert len(lowered) >= 10
    assert {planned.shape.model_type for _, planned, _ in started()} >= {*FAMILIES, "qwen3_next"}
    for asked, planned, memory in started():
        assert 1 <= planned.limits.max_num_seqs <= memory.num_gpu_blocks
        assert planned.limits.max_num_seqs <= asked.limits.max_num_seqs
        assert memory == planned.memory()
    for asked, planned in lowered:
        most, budget = planned.limits.max_num_seqs, int(asked.limits.max_num_batched_tokens)
        assert planned.limits.max_num_batched_tokens == budget
        one_more = replace(asked, limits=replace(asked.limits, max_num_seqs=most + 1, max_num_batched_tokens=budget))
        assert one_more.memory().sure_blocks <= most


@pytest.mark.vllm
def test_vllm_accepts_every_planned_number_and_refuses_more_than_the_blocks() -> None:
    import torch
    from vllm.config import CompilationConfig, CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

    state = MambaSpec(block_size=2048, shapes=((2, 64),), dtypes=(torch.float32,))

    def resolve(requests: int, memory: MemoryPlan, mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE) -> None:
        assert memory.kv.keeps_states
        kv = KVCacheConfig(memory.num_gpu_blocks, [], [KVCacheGroupSpec(["layer"], state)])
        config = CompilationConfig(cudagraph_mode=mode)
        support = AttentionCGSupport.UNIFORM_BATCH
        config.resolve_cudagraph_mode_and_sizes(support, "any", kv_cache_config=kv, max_num_reqs=requests)

    for _, planned, memory in started():
        resolve(planned.limits.max_num_seqs, memory)
        resolve(memory.num_gpu_blocks, memory)
        with pytest.raises(ValueError, match="exceeds available Mamba cache blocks"):
            resolve(memory.num_gpu_blocks + 1, memory)
        resolve(memory.num_gpu_blocks + 1, memory, CUDAGraphMode.NONE)


def test_a_given_number_above_the_blocks_is_refused_and_a_wish_is_lowered() -> None:
    setup = EngineSetup(*TIGHT, limits=EngineLimits(max_model_len=2024, enable_prefix_caching=False))
    lowered, memory = setup.placed()
    most = lowered.limits.max_num_seqs
    given = replace(setup, limits=replace(setup.limits, max_num_seqs=256))
    with pytest.raises(CapacityError, match=rf"max_num_seqs is 256.*189 blocks.*type --max-num-seqs {most} "):
        given.placed()
    wish = replace(setup, limits=replace(setup.limits, max_num_seqs=Lowerable(256)))
    assert wish.placed() == (lowered, memory)
    assert lowered.placed() == (lowered, memory)
    eager = replace(given, limits=replace(given.limits, enforce_eager=True))
    assert eager.placed()[0] is eager
    imposed = replace(setup, limits=replace(setup.limits, num_gpu_blocks=99))
    assert imposed.placed()[0].limits.max_num_seqs == 100  # with the null block, which vLLM counts too
    assert EngineSetup("Qwen/Qwen3-8B", "h200").placed()[0].limits.max_num_seqs == 1024


def test_every_choice_of_a_plan_is_emitted_with_its_own_number() -> None:
    made = plan(*TIGHT, WORK, engine_version="0.32.0")
    runnable = [i for i, choice in enumerate(made.choices) if choice.available]
    numbers = {made.vllm_kwargs(i, kv_scales="calibrated")["max_num_seqs"] for i in runnable}
    assert len(numbers) > 1
    for i in runnable:
        setup = made.setup(i)
        assert setup.limits.max_num_seqs <= setup.memory().num_gpu_blocks
        if "verl" not in made.choices[i].refused_by:
            assert f"rollout.max_num_seqs={setup.limits.max_num_seqs} " in made.emit("verl", i)
    again = Plan.from_json(made.to_json())
    assert [again.setup(i).limits for i in runnable] == [made.setup(i).limits for i in runnable]
    assert made.choices[made.chosen].max_num_seqs is None
    assert not any("recurrent state" in warning for warning in made.warnings)  # the chosen FP8 has room for 256
    (warning,) = (x for x in plan(*TIGHT, WORK, precisions=["bf16"]).warnings if "recurrent state" in x)
    assert "instead of 256" in warning


def test_the_search_stays_within_the_blocks_of_each_candidate() -> None:
    tuned = search(
        TuneRequest(*TIGHT, Workload(128, 8, 256, 200), engine_version="0.32.0", precisions=["bf16", "fp8_block"])
    )
    candidates = [c for c in tuned.best.tried if c.memory]
    assert len(candidates) == 2
    for candidate in candidates:
        assert candidate.setup.limits.max_num_seqs <= candidate.memory.num_gpu_blocks
    assert tuned.prediction.plan.vllm_kwargs()["max_num_seqs"] <= tuned.best.chosen.memory.num_gpu_blocks
