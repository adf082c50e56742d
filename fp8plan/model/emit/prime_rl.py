"""A planned engine as TOML for prime-rl, as of 21 August 2026 (packages/prime-rl-configs/src/prime_rl/configs).

`inference.vllm` hands any argument to vLLM. A weight update reloads layer by layer, so vLLM quantises the BF16 weights
as it did at the start (src/prime_rl/inference/vllm/worker).
"""

from __future__ import annotations

from typing import Any, Final

from fp8plan.model.emit.job import Job
from fp8plan.model.emit.spelling import toml, with_comments
from fp8plan.model.emit.stock import Stock, common_settings, notes, remedy_words
from fp8plan.model.emit.trainers import PRIME_RL

STOCK: Final = Stock(
    title="prime-rl of 21 August 2026 (559b4477)",
    paste="a file for: uv run rl @ rl.toml @ FILE.toml",
    engine="vLLM 0.26 or later",
    words={
        "model": "model.name",
        "data_parallel_size": "inference.vllm.data_parallel_size",
        "samples": "orchestrator.group_size",
        "max_response_tokens": "orchestrator.train.sampling.max_completion_tokens",
    },
    replicas="deployment and inference.vllm decide it",
    passed="inference.vllm.",
    trainer=PRIME_RL,
    variables="inference.env_vars.",
    shares=False,
    tis=False,
)
_NODE: Final = 8  # GPUs, of which the trainer needs one


def emit_prime_rl(job: Job) -> str:
    """The settings as a file."""
    limits = job.setup.limits
    settings: dict[str, Any] = {
        **common_settings(job, STOCK),
        "seq_len": limits.max_model_len,
        "orchestrator.batch_size": job.tokens("prompts") * job.tokens("samples"),
    }
    if limits.gpus < _NODE:
        settings["deployment.num_infer_gpus"] = limits.gpus
    if job.setup.precision.in_blocks:
        settings["inference.use_deep_gemm"] = True  # otherwise it turns DeepGEMM off
    lines = [*(toml(key, value) for key, value in settings.items()), *remedy_words(job, STOCK)]
    more = [f"the longest prompt was planned with {job.tokens('max_prompt_tokens')} tokens: it has no word for that"]
    if job.constant_tis is not None:
        more.append(_no_tis(job))
    return with_comments("\n".join(lines), notes(job, STOCK, *more))


def _no_tis(job: Job) -> str:
    share = job.picked.clip_fraction
    clipped = "" if share is None else f", which clips {share:.1e} of the tokens by the plan"
    return (
        f"it has no bound of the ratio, as token TIS has at {job.constant_tis:g}{clipped}: its loss masks tokens whose "
        "probability moved by more than trainer.loss.dppo_mask_low and dppo_mask_high (0.2)"
    )
