"""Options of vLLM's: a misspelt one is refused before anything starts, and what fp8plan does not model is said."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import checkpoint, cpu_plan, generate, started, weights

from fp8plan.errors import ConfigError
from fp8plan.model.limits import EngineLimits
from fp8plan.runtime.apply.engine import options
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.engine.launch import NOT_SUPPORTED, THE_SETUPS, launch
from fp8plan.runtime.apply.engine.options import arguments_of, not_predicted, refuse_unknown, remarks

pytestmark = pytest.mark.vllm

TABLED = {
    name
    for table in (options.NOT_PREDICTED, options.NOT_THE_POLICYS)
    for names in table.values()
    for name in names.split()
}
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}

# Options of vLLM, up to 0.33, that change neither what is sampled nor how fast, as far as an RL rollout of text goes.
# Or they do so only through one of the tables, or their outcome is measured: the pool (kv_cache_memory_bytes), and the
# kernels that really run (*_backend), which the guard compares with the profile's.
WITHOUT_EFFECT = """
    enable_return_routed_experts return_sampling_mask model_weights served_model_name tokenizer hf_config_path runner
    convert skip_tokenizer_init enable_prompt_embeds tokenizer_mode trust_remote_code allowed_local_media_path
    allowed_media_domains download_dir safetensors_load_strategy safetensors_prefetch_num_threads
    safetensors_prefetch_block_size load_format config_format seed distributed_executor_backend master_addr master_port
    node_rank distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus
    device_ids dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size
    data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port
    data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend
    enable_ep_weight_filter moe_backend linear_backend elastic_ep_max_dp_size dbo_decode_token_threshold
    dp_sync_interval dbo_prefill_token_threshold disable_nccl_for_dp_synchronization eplb_config
    max_parallel_loading_workers prefix_caching_hash_algo offload_num_in_group offload_prefetch_step
    kv_cache_memory_bytes max_num_queued_reqs max_num_queued_tokens max_logprobs enable_trace_replay disable_log_stats
    aggregate_engine_logging revision code_revision hf_token tokenizer_revision allow_deprecated_quantization
    language_model_only limit_mm_per_prompt enable_mm_embeds interleave_mm_strings media_io_kwargs mm_processor_kwargs
    mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only
    mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
    mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin io_processor_plugin renderer_num_workers
    skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb
    mm_device_do_normalize max_loras max_lora_rank fully_sharded_loras max_cpu_loras lora_dtype lora_target_modules
    enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras
    ray_workers_use_nsight num_gpu_blocks_override model_loader_extra_config ignore_patterns disable_chunked_mm_input
    structured_outputs_config reasoning_parser reasoning_parser_plugin show_hidden_metrics_for_version
    otlp_traces_endpoint per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample cudagraph_metrics
    enable_mfu_metrics enable_logging_iteration_details jit_monitor_mode jit_monitor_verbose enable_mm_processor_stats
    pooler_config attention_config worker_cls kv_events_config ec_manager_config reasoning_config enable_sleep_mode
    enable_cumem_allocator enable_nccl_comm_suspend attention_backend replayssm_buffer_len mamba_cache_philox_rounds
    additional_config use_tqdm_on_load pt_load_map_location stream_interval fault_tolerance_config
    enable_fault_tolerance kv_offloading_backend tokens_only shutdown_timeout weight_transfer_config
    fail_on_environ_validation aux_output_config custom_histogram_buckets enable_shm_tensor_arena log_config_file
    log_level logging_config max_lora_cls_labels sleep_mode_backend sleep_mode_offload_cudagraph
    sleep_preserve_parameter_names swa_bounded_replay watchdog_config
""".split()


def engine_args() -> dict[str, Any]:
    """vLLM's options -> their defaults, where these are plain values."""
    from vllm import AsyncEngineArgs, EngineArgs

    known = {field.name for field in fields(AsyncEngineArgs)} - {"enable_log_requests"}
    return {x.name: x.default for x in fields(EngineArgs) if x.name in known and not x.name.startswith("_")}


def test_every_option_of_vllm_has_its_place() -> None:
    """A new one is to be looked at: does it change speed or samples?"""
    placed = {*TABLED, *WITHOUT_EFFECT, *THE_SETUPS, *NOT_SUPPORTED, *(field.name for field in fields(EngineLimits))}
    assert set(engine_args()) - placed == set()
    assert not TABLED.intersection(WITHOUT_EFFECT)


def test_vllms_own_defaults_are_no_remark() -> None:
    plain = {x: value for x, value in engine_args().items() if value is not dataclasses.MISSING}
    assert TABLED & plain.keys() > {"speculative_config", "pipeline_parallel_size", "disable_cascade_attn"}
    assert remarks(plain | {"logprobs_mode": "processed_logprobs"}) == ()


def test_the_names_read_from_vllms_sources_are_those_of_its_classes() -> None:
    from inspect import signature

    from vllm import LLM, AsyncEngineArgs

    known = options._engine_options()
    assert {field.name for field in fields(AsyncEngineArgs) if not field.name.startswith("_")} <= known
    assert set(signature(LLM.__init__).parameters) - {"self", "kwargs"} <= known
    refuse_unknown({"tool_call_parser": "hermes", "max_num_seqs": 8}, server=True)


@given(name=st.sampled_from(sorted(options._engine_options())), at=st.integers(0, 40))
def test_a_letter_left_out_is_answered_by_the_name(name: str, at: int) -> None:
    misspelt = name[: at % len(name)] + name[at % len(name) + 1 :]
    if misspelt in options._engine_options() or len(name) < 4:
        return
    with pytest.raises(ConfigError, match=f"vLLM takes no {misspelt} .did you mean {name}") as refused:
        refuse_unknown({misspelt: 1, "max_num_seqs": 8})
    assert "max_num_seqs" not in str(refused.value) or name == "max_num_seqs"


REFUSED = """
import asyncio, inspect, sys
import fp8plan

async def started(kind, **misspelt):
    made = kind.from_setup(fp8plan.EngineSetup(sys.argv[1], "cpu", "bf16"), **misspelt)
    return await made if inspect.isawaitable(made) else made

for kind in (fp8plan.RolloutEngine, fp8plan.AsyncRolloutEngine, fp8plan.RolloutFleet):
    for misspelt in ("max_num_seq", "gard", "choise"):
        try:
            asyncio.run(started(kind, **{misspelt: None}))
        except fp8plan.Fp8PlanError as error:
            print(error)
print({"vllm", "torch", "ray"} & set(sys.modules))
"""


def test_engines_refuse_before_anything_starts() -> None:
    """vLLM is not even imported, which takes seconds."""
    words = [sys.executable, "-c", REFUSED, str(checkpoint("dense", "a"))]
    *said, imported = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    meant = {"max_num_seq": "max_num_seqs", "gard": "guard", "choise": "choice"}
    expected = [f"vLLM takes no {x} (did you mean {meant[x]}?); allowed: names that it has" for x in meant]
    assert said == expected * 3
    assert imported == "set()"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"speculative_config": SPECULATIVE},
            "speculative_config=.*ngram.*not model speculative decoding.*guard",
        ),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2: .*layouts beyond tensor.*the guard is off"),
        (
            {"cpu_offload_gb": 4, "kv_offloading_size": 1.0},
            "cpu_offload_gb=4, kv_offloading_size=1.0: .*outside",
        ),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill=False: .*another scheduler"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode='raw_logprobs': log-probs are not those of what is sampled"),
        ({"logits_processors": ["a.b:C"]}, "logits_processors=.*changed after the model"),
    ],
)
def test_what_is_not_modelled_is_said_at_the_start(given: dict[str, Any], says: str) -> None:
    with pytest.warns(RuntimeWarning, match=f"fp8plan: {says}") as warned:
        launched = launch(cpu_plan("bf16").setup(), str(checkpoint("dense", "a")), more=given)
    assert len(warned) == 1
    assert launched.not_predicted == not_predicted(given)
    assert bool(launched.not_predicted) == ("the guard is off" in str(warned[0].message))


def test_logits_are_no_log_probs() -> None:
    with pytest.raises(ConfigError, match="logprobs_mode is 'raw_logits'; allowed: 'processed_logprobs' or 'raw_logp"):
        launch(cpu_plan("bf16").setup(), str(checkpoint("dense", "a")), more={"logprobs_mode": "raw_logits"})


def test_own_arguments_are_those_of_both_makers() -> None:
    assert {"choice", "keep_bf16", "guard", "mode"} <= arguments_of(RolloutEngine)
    assert not {"settings", "vllm_kwargs"} & arguments_of(RolloutEngine)


def test_an_engine_with_lora_runs_and_is_not_judged() -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with started("dense", "a", "bf16", enable_lora=True) as engine:
            generate(engine)
            assert engine.verdict is None
            assert engine.observation is not None
            assert "cannot predict this engine: enable_lora=True (LoRA" in str(engine.guard_off)
            assert engine.sync_weights(weights("dense", "b")).tensors
    said = [str(x.message) for x in warned if str(x.message).startswith("fp8plan: ")]
    assert len(said) == 2
    assert "the guard is off" in said[0]
    assert "another policy" in said[1]
