"""A planned engine as arguments of OpenRLHF 0.11.2 (openrlhf/cli/train_ppo_ray.py).

`create_vllm_engines` (openrlhf/trainer/ray/vllm_engine.py) has a fixed set of arguments for vLLM. A precision is none
of them, so every FP8 of the plan is refused (TARGETS of fp8plan/model/targets.py).
"""

from __future__ import annotations

from typing import Final

from fp8plan.model.emit.job import Job
from fp8plan.model.emit.spelling import flags, pasted
from fp8plan.model.emit.stock import Stock, engine_words, notes, remedy_words
from fp8plan.model.emit.trainers import OPENRLHF

STOCK: Final = Stock(
    title="OpenRLHF 0.11.2",
    paste="the end of: python -m openrlhf.cli.train_ppo_ray ...",
    engine="vLLM 0.29",
    words={
        "model": "--actor.model_name_or_path",
        "tensor_parallel_size": "--vllm.tensor_parallel_size",
        "gpu_memory_utilization": "--vllm.gpu_memory_utilization",
        "max_model_len": "--data.max_len",
        "enable_prefix_caching": "--vllm.enable_prefix_caching",
        "enforce_eager": "--vllm.enforce_eager",
    },
    passed=None,
    trainer=OPENRLHF,
)


def emit_openrlhf(job: Job) -> str:
    """The settings as shell words."""
    settings = {
        **engine_words(job, STOCK),
        "--vllm.num_engines": job.setup.limits.data_parallel_size,
        "--rollout.batch_size": job.tokens("prompts"),
        "--rollout.n_samples_per_prompt": job.tokens("samples"),
        "--rollout.max_new_tokens": job.tokens("max_response_tokens"),
    }
    correction = "--algo.advantage.is_correction"
    if job.constant_tis is None:
        settings[f"{correction}_level"] = "off"
    else:
        # The ratio is pi_train / pi_rollout, as in fp8plan (openrlhf/models/loss.py).
        settings |= {
            f"{correction}_level": "token",
            f"{correction}_mode": "clip",
            f"{correction}_gating": "ratio",
            f"{correction}_threshold": [0.0, float(job.constant_tis)],
        }
    remedy_words(job, STOCK)  # refuses all of them
    words = [flags(name, value) for name, value in settings.items()]
    return pasted(filter(None, words), notes(job, STOCK, "--vllm.num_engines"))
