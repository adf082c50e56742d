"""A planned engine as settings of SkyRL 0.3.0 (skyrl/train/config/config.py).

It hands `engine_init_kwargs` to vLLM unread (build_vllm_cli_args of skyrl/backends/skyrl_train/inference_servers).
Its weight sync reloads layer by layer, so vLLM quantises the BF16 weights as it did at the start.
"""

from __future__ import annotations

from typing import Final

from fp8plan.model.emit.job import Job
from fp8plan.model.emit.spelling import pasted, yaml
from fp8plan.model.emit.stock import Stock, engine_words, notes, remedy_words, variable_notes
from fp8plan.model.emit.trainers import SKYRL

_ENGINE: Final = "generator.inference_engine"
_CORRECTION: Final = "trainer.algorithm.off_policy_correction"

STOCK: Final = Stock(
    title="SkyRL 0.3.0",
    paste="the end of: python -m skyrl.train.entrypoints.main_base ...",
    engine="vLLM 0.23",
    words={
        "model": "trainer.policy.model.path",
        "tensor_parallel_size": f"{_ENGINE}.tensor_parallel_size",
        "gpu_memory_utilization": f"{_ENGINE}.gpu_memory_utilization",
        "max_num_seqs": f"{_ENGINE}.max_num_seqs",
        "max_num_batched_tokens": f"{_ENGINE}.max_num_batched_tokens",
        "enable_prefix_caching": f"{_ENGINE}.enable_prefix_caching",
        "enforce_eager": f"{_ENGINE}.enforce_eager",
        "expert_ranks": f"{_ENGINE}.expert_parallel_size",
    },
    passed=f"{_ENGINE}.engine_init_kwargs.",
    trainer=SKYRL,
)


def emit_skyrl(job: Job) -> str:
    """The settings as shell words."""
    prompt, response = job.tokens("max_prompt_tokens"), job.tokens("max_response_tokens")
    settings = {
        **engine_words(job, STOCK),
        f"{_ENGINE}.num_engines": job.setup.limits.data_parallel_size,
        "trainer.train_batch_size": job.tokens("prompts"),
        "trainer.max_prompt_length": prompt,
        "generator.max_input_length": prompt,
        "generator.n_samples_per_prompt": job.tokens("samples"),
        "generator.sampling_params.max_generate_length": response,
        f"{_CORRECTION}.tis_ratio_type": None if job.constant_tis is None else "token",
    }
    if job.constant_tis is not None:
        settings[f"{_CORRECTION}.token_tis_ratio_clip_high"] = float(job.constant_tis)
    remedies = remedy_words(job, STOCK)
    if remedies:
        remedies = ["trainer.strategy=megatron", *remedies]
    mini = "trainer.policy_mini_batch_size"
    more = [
        f"{mini} is yours to set: at most {job.tokens('prompts')}, the batch (SkyRL's default is 256)",
        *variable_notes(job, STOCK),
    ]
    if job.at_once:
        more.append("its fully asynchronous trainer alone reads trainer.fully_async; main_base starts the whole batch")
    words = [*(yaml(key, value) for key, value in settings.items()), *remedies]
    return pasted([[word] for word in words], notes(job, STOCK, f"{_ENGINE}.num_engines", *more))
