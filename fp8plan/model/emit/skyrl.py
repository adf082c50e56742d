"""A planned engine as settings of SkyRL 0.3.0 (skyrl/train/config/config.py).

It hands `engine_init_kwargs` to vLLM unread (build_vllm_cli_args of skyrl/backends/skyrl_train/inference_servers).
Its weight sync reloads layer by layer, so vLLM quantises the BF16 weights as it did at the start.
"""

from __future__ import annotations

from typing import Final

from fp8plan.model.emit.job import Job
from fp8plan.model.emit.notes import mini_batch_note
from fp8plan.model.emit.spelling import yaml
from fp8plan.model.emit.stock import Stock, common_settings, stock_words, under
from fp8plan.model.emit.trainers import SKYRL

_ENGINE: Final = "generator.inference_engine"
_CORRECTION: Final = "trainer.algorithm.off_policy_correction"

STOCK: Final = Stock(
    title="SkyRL 0.3.0",
    paste="the end of: python -m skyrl.train.entrypoints.main_base ...",
    engine="vLLM 0.23",
    words={
        "model": "trainer.policy.model.path",
        **under(f"{_ENGINE}.", "tensor_parallel_size", "gpu_memory_utilization", "max_num_seqs"),
        **under(f"{_ENGINE}.", "max_num_batched_tokens", "enable_prefix_caching", "enforce_eager"),
        "expert_ranks": f"{_ENGINE}.expert_parallel_size",
        "data_parallel_size": f"{_ENGINE}.num_engines",
        "prompts": "trainer.train_batch_size",
        "samples": "generator.n_samples_per_prompt",
        "max_prompt_tokens": "trainer.max_prompt_length",
        "max_response_tokens": "generator.sampling_params.max_generate_length",
    },
    replicas=f"{_ENGINE}.num_engines",
    passed=f"{_ENGINE}.engine_init_kwargs.",
    trainer=SKYRL,
    spelled=yaml,
    megatron="trainer.strategy=megatron",
)


def emit_skyrl(job: Job) -> str:
    """The settings as shell words."""
    settings = {
        **common_settings(job, STOCK),
        "generator.max_input_length": job.tokens("max_prompt_tokens"),
        f"{_CORRECTION}.tis_ratio_type": None if job.constant_tis is None else "token",
    }
    if job.constant_tis is not None:
        settings[f"{_CORRECTION}.token_tis_ratio_clip_high"] = float(job.constant_tis)
    return stock_words(job, STOCK, settings, mini_batch_note(job, "trainer.policy_mini_batch_size"))
