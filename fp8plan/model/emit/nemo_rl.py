"""A planned engine as Hydra overrides for NeMo RL, as of 22 August 2026 (examples/configs/grpo_math_1B.yaml).

`precision=fp8` are blocks of 128 x 128. An FP8 cache needs them, and Megatron, which measures the K and V scales before
each weight sync (`init_fp8` of nemo_rl/models/generation/vllm/quantization/fp8.py; nemo_rl/algorithms/grpo.py).
"""

from __future__ import annotations

from typing import Any, Final

from fp8plan.model.architecture.kept import OUTPUTS, ends_of
from fp8plan.model.emit.job import Job
from fp8plan.model.emit.spelling import hydra
from fp8plan.model.emit.stock import Stock, common_settings, remedy_words, stock_words, under
from fp8plan.model.emit.trainers import NEMO_RL

_VLLM: Final = "++policy.generation.vllm_cfg"
_LOSS: Final = "++loss_fn"
# Parts of the names of attention outputs, as MODULES of fp8plan/model/architecture/held.py has them for vLLM.
_OUTPUTS: Final = ("o_proj", "self_attn.out_proj", "self_attn.dense")

STOCK: Final = Stock(
    title="NeMo RL of 22 August 2026 (7ea279ab)",
    paste="the end of: uv run examples/run_grpo.py ...",
    engine="vLLM 0.25.1",
    words={
        "model": "++policy.model_name",
        "expert_ranks": f"{_VLLM}.expert_parallel_size",
        **under(f"{_VLLM}.", "tensor_parallel_size", "gpu_memory_utilization", "enable_prefix_caching"),
        **under(f"{_VLLM}.", "enforce_eager", "kv_cache_dtype"),
        "max_model_len": "++policy.max_total_sequence_length",
        "prompts": "++grpo.num_prompts_per_step",
        "samples": "++grpo.num_generations_per_prompt",
        "max_prompt_tokens": "++data.max_input_seq_length",
        "max_response_tokens": "++policy.generation.max_new_tokens",
    },
    replicas="cluster.num_nodes * cluster.gpus_per_node decides it",
    passed="++policy.generation.vllm_kwargs.",
    trainer=NEMO_RL,
    spelled=hydra,
    variables=f"{_VLLM}.env_vars.",
    omitted=("quantization", "quantization_config"),
)


def emit_nemo_rl(job: Job) -> str:
    """The overrides as shell words."""
    settings = {**common_settings(job, STOCK), **_precision(job), **_correction(job)}
    more = ["policy.train_global_batch_size is yours to set: at most prompts times samples of a step"]
    if job.setup.precision.kv == "fp8":
        more.append(
            "its FP8 cache needs policy.generation.vllm_cfg.async_engine=false and "
            "policy.megatron_cfg.pipeline_model_parallel_size=1"
        )
    if job.setup.precision.kv == "fp8" or remedy_words(job, STOCK):
        settings |= {"++policy.megatron_cfg.enabled": True, "++policy.dtensor_cfg.enabled": False}
    return stock_words(job, STOCK, settings, *more)


def _precision(job: Job) -> dict[str, Any]:
    setup = job.setup
    if not setup.precision.in_blocks:
        return {f"{_VLLM}.precision": "bfloat16"}
    settings: dict[str, Any] = {f"{_VLLM}.precision": "fp8"}
    if not setup.e8m0:
        settings[f"{_VLLM}.use_deep_gemm"] = True  # keeps the scales in FP32, too
    kept = setup.remedies.keep_bf16
    if any(ends_of(kept)):
        first, last = ends_of(kept)
        settings |= {f"{_VLLM}.num_first_layers_in_bf16": first, f"{_VLLM}.num_last_layers_in_bf16": last}
    if OUTPUTS in kept:
        settings[f"{_VLLM}.quantization_ignored_layer_kws"] = list(_OUTPUTS)
    return settings


def _correction(job: Job) -> dict[str, Any]:
    """Its rollouts in FP8 refuse to run without importance weights."""
    return {
        f"{_LOSS}.use_importance_sampling_correction": job.constant_tis is not None or job.setup.precision.in_blocks,
        f"{_LOSS}.truncated_importance_sampling_type": None if job.constant_tis is None else "tis",
        f"{_LOSS}.truncated_importance_sampling_ratio": job.constant_tis,
    }
