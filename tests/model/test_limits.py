"""Limits that nobody gave, as vLLM derives them, and the share of a GPU's memory with which it can start."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fp8plan.errors import ConfigError
from fp8plan.model.hardware import find_gpu, gpus
from fp8plan.model.limits import Derived, EngineLimits
from fp8plan.model.memory.plan import check_share
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.planner import plan
from fp8plan.model.setup import EngineSetup
from fp8plan.model.validate.records import recorded_limits
from fp8plan.model.workload import Workload

WORK = Workload(2, 2, 16, 20)
DEVICES = [*gpus(), find_gpu("cpu")]
GIVEN = st.fixed_dictionaries(
    {},
    optional={
        "max_num_seqs": st.integers(1, 40_000),
        "max_num_batched_tokens": st.integers(1, 40_000),
        "max_model_len": st.integers(1, 200_000),
    },
)


def sizes(limits: EngineLimits) -> tuple[int, int]:
    return limits.max_num_seqs, limits.max_num_batched_tokens


@pytest.mark.parametrize(
    ("gpu", "given", "expected"),
    [
        ("h200", {}, (1024, 16384)),
        ("a100", {}, (256, 8192)),  # 80 GB, but vLLM looks at the name
        ("l40s", {}, (256, 8192)),
        ("cpu", {}, (256, 4096)),
        ("h200", {"max_num_batched_tokens": 512}, (512, 512)),
        ("l40s", {"max_num_batched_tokens": 512}, (256, 512)),
        ("h200", {"max_num_seqs": 4, "max_model_len": 100}, (4, 400)),
        ("h200", {"max_model_len": 3}, (1024, 3072)),
        ("h200", {"max_num_seqs": 4, "max_num_batched_tokens": 9000, "max_model_len": 100}, (4, 9000)),
        ("h200", {"max_num_seqs": None, "max_num_batched_tokens": None}, (1024, 16384)),
    ],
)
def test_what_nobody_gave_is_derived(gpu: str, given: dict[str, int], expected: tuple[int, int]) -> None:
    assert sizes(EngineLimits.for_gpu(find_gpu(gpu), **given)) == expected


def test_more_requests_than_the_default_budget_are_refused() -> None:
    """Each GPU's own default counts, also where the limits are made before the GPU is known."""
    with pytest.raises(ConfigError, match=r"max_num_seqs is 9000.*8192, vLLM's default on NVIDIA L40S.*tokens 9000"):
        plan("dense-50m", "l40s", WORK, limits=EngineLimits(max_num_seqs=9000))
    assert sizes(EngineSetup("dense-50m", "h200", "bf16", EngineLimits(max_num_seqs=9000)).limits) == (9000, 16384)
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 512, max_num_seqs is 1024"):
        EngineLimits(max_num_seqs=1024, max_num_batched_tokens=512)


def test_a_setup_derives_for_its_gpu_and_again_when_limits_change() -> None:
    setup = EngineSetup("dense-50m", "l40s", "bf16", EngineLimits(gpu_memory_utilization=0.5))
    assert sizes(setup.limits) == (256, 8192)
    lower = replace(setup, limits=replace(setup.limits, max_num_batched_tokens=64))  # as RolloutEngine.from_setup does
    assert sizes(lower.limits) == (64, 64)
    assert sizes(replace(lower, limits=replace(lower.limits, max_num_batched_tokens=4096)).limits) == (256, 4096)
    assert EngineSetup("dense-50m", "cpu", "bf16", EngineLimits()).limits.block_size == 128


def test_a_saved_plan_holds_plain_numbers_that_stay() -> None:
    made = plan("dense-50m", "l40s", WORK, limits=EngineLimits(max_num_batched_tokens=512))
    saved = json.loads(made.to_json())["limits"]
    assert (saved["max_num_seqs"], saved["max_num_batched_tokens"]) == (256, 512)
    again = Plan.from_json(made.to_json())
    assert again == made
    handed_on = [*made.vllm_kwargs().values(), made.limits.max_num_seqs, made.limits.block_size]
    assert not any(isinstance(value, Derived) for value in handed_on)  # libraries such as msgspec take plain ones only
    assert again.setup().limits == made.setup().limits


def test_a_record_without_a_limit_has_vllm_s() -> None:
    record = {"gpu": "h200", "max_num_batched_tokens": 512}
    assert sizes(recorded_limits(record)) == (512, 512)
    assert recorded_limits({"gpu": "cpu", "kv_cache_tokens": 1280}).num_gpu_blocks == 9


def _device(gpu):
    """vLLM's platform object as it would be on this GPU."""
    return SimpleNamespace(
        get_device_total_memory=lambda: gpu.memory_bytes,
        get_device_name=lambda: gpu.product,
        is_tpu=lambda: False,
        is_cpu=lambda: gpu.is_cpu,
    )


@pytest.mark.vllm
@given(name=st.sampled_from([gpu.name for gpu in DEVICES]), given=GIVEN)
def test_limits_are_those_of_vllm_s_own_engine_args(name: str, given: dict[str, int]) -> None:
    """vLLM's EngineArgs on a faked device, and the check of its SchedulerConfig."""
    gpu = find_gpu(name)
    from vllm.config import SchedulerConfig
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext

    length = given.get("max_model_len", 4096)
    args = SimpleNamespace(
        max_num_seqs=given.get("max_num_seqs"),
        max_num_batched_tokens=given.get("max_num_batched_tokens"),
        pipeline_parallel_size=1,
        tensor_parallel_size=1,
        enable_chunked_prefill=True,
        performance_mode="balanced",
        get_batch_defaults=arg_utils.EngineArgs.get_batch_defaults,
    )
    model = SimpleNamespace(max_model_len=length, is_multimodal_model=False)
    with mock.patch.object(arg_utils, "current_platform", _device(gpu)):
        arg_utils.EngineArgs._set_default_max_num_seqs_and_batched_tokens_args(
            args, UsageContext.LLM_CLASS, model, SimpleNamespace(use_batched_dp_moe=False)
        )
    theirs = args.max_num_seqs, args.max_num_batched_tokens
    try:
        SchedulerConfig(
            max_num_seqs=theirs[0], max_num_batched_tokens=theirs[1], max_model_len=length, is_encoder_decoder=False
        )
    except ValueError:
        with pytest.raises(ConfigError, match="at least one token of budget per running request"):
            EngineLimits.for_gpu(gpu, **given | {"max_model_len": length})
    else:
        assert sizes(EngineLimits.for_gpu(gpu, **given | {"max_model_len": length})) == theirs


@given(gpu=st.sampled_from(gpus()), share=st.floats(0.01, 1.0), lost=st.floats(0.41, 3.0))
def test_no_share_is_refused_with_which_an_engine_can_start(gpu, share: float, lost: float) -> None:
    """vLLM compares the share with what its CUDA context leaves (request_memory); the least that was seen is 0.41."""
    starts = gpu.memory_bytes - lost * 2**30 >= share * gpu.memory_bytes + 1
    assume(starts)
    check_share(gpu, EngineLimits(gpu_memory_utilization=share))


@pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.name)
def test_a_share_with_which_no_engine_starts_is_refused(gpu) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization is 1, .*allowed: at most 0\.9[89]; type 0\.97"):
        check_share(gpu, EngineLimits(gpu_memory_utilization=1))
    assert check_share(gpu, EngineLimits()) == check_share(gpu, EngineLimits(gpu_memory_utilization=0.97)) == []
    (warning,) = check_share(gpu, EngineLimits(gpu_memory_utilization=0.98))
    assert "vLLM may not start; 0.97 is safer" in warning


def test_a_plan_warns_where_a_record_is_taken_as_it_ran() -> None:
    limits = EngineLimits(gpu_memory_utilization=0.99)
    assert any("0.99 leaves 1.4 GiB" in warning for warning in plan("dense-50m", "h200", WORK, limits=limits).warnings)
    with pytest.raises(ConfigError, match="gpu_memory_utilization is 1"):
        plan("dense-50m", "h200", WORK, limits=EngineLimits(gpu_memory_utilization=1))
    assert recorded_limits({"gpu": "h200", "gpu_memory_utilization": 1.0}).gpu_memory_utilization == 1
