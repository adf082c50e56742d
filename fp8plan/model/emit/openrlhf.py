"""A planned engine as arguments of OpenRLHF 0.11.2 (openrlhf/cli/train_ppo_ray.py).

`create_vllm_engines` (openrlhf/trainer/ray/vllm_engine.py) has a fixed set of arguments for vLLM. A precision is none
of them, so every FP8 of the plan is refused (TARGETS of fp8plan/model/targets.py).
"""

from __future__ import annotations

from typing import Final

from fp8plan.model.emit.job import Job
from fp8plan.model.emit.stock import Stock, common_settings, stock_words, under
from fp8plan.model.emit.trainers import OPENRLHF

_CORRECTION: Final = "--algo.advantage.is_correction"

STOCK: Final = Stock(
    title="OpenRLHF 0.11.2",
    paste="the end of: python -m openrlhf.cli.train_ppo_ray ...",
    engine="vLLM 0.29",
    words={
        "model": "--actor.model_name_or_path",
        **under("--vllm.", "tensor_parallel_size", "gpu_memory_utilization", "enable_prefix_caching", "enforce_eager"),
        "max_model_len": "--data.max_len",
        "data_parallel_size": "--vllm.num_engines",
        "prompts": "--rollout.batch_size",
        "samples": "--rollout.n_samples_per_prompt",
        "max_response_tokens": "--rollout.max_new_tokens",
    },
    replicas="--vllm.num_engines",
    passed=None,
    trainer=OPENRLHF,
)


def emit_openrlhf(job: Job) -> str:
    """The settings as shell words."""
    settings = common_settings(job, STOCK) | {f"{_CORRECTION}_level": "off"}
    if job.constant_tis is not None:
        # The ratio is pi_train / pi_rollout, as in fp8plan (openrlhf/models/loss.py).
        settings |= {
            f"{_CORRECTION}_level": "token",
            f"{_CORRECTION}_mode": "clip",
            f"{_CORRECTION}_gating": "ratio",
            f"{_CORRECTION}_threshold": [0.0, float(job.constant_tis)],
        }
    return stock_words(job, STOCK, settings)
