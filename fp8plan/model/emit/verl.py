"""A planned engine as Hydra overrides for verl 0.9.1 (verl/trainer/config/ppo_trainer.yaml).

With fp8plan's rollouts, fp8plan.integrations.verl reads the plan's file, and the overrides repeat only the limits that
verl has words for. Without fp8plan they have verl's own words for the precision. `quantization=fp8` are blocks of
128 x 128 without the routers (`_apply_quantization` of vllm_async_server.py); any other argument reaches vLLM through
`engine_kwargs`.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, Final

from fp8plan.model.emit.job import Job
from fp8plan.model.emit.notes import mini_batch_note, replicas_note, rollout_notes, shared_gpu_note
from fp8plan.model.emit.spelling import hydra, pasted
from fp8plan.model.emit.stock import Stock, batch_settings, common_settings, remedy_words, stock_words
from fp8plan.model.emit.trainers import VERL
from fp8plan.model.limits import VERLS

_ROLLOUT: Final = "actor_rollout_ref.rollout"
_MINI_BATCH: Final = "actor_rollout_ref.actor.ppo_mini_batch_size"
_CORRECTION: Final = "algorithm.rollout_correction"

STOCK: Final = Stock(
    title="verl 0.9.1",
    paste="the end of: python -m verl.trainer.main_ppo ...",
    engine="vLLM 0.24",
    words={
        "model": "actor_rollout_ref.model.path",
        **{field: f"{_ROLLOUT}.{word}" for word, field in VERLS.items()},
        "expert_ranks": f"{_ROLLOUT}.expert_parallel_size",
        # Prompts of a whole step, on all replicas: verl repeats each rollout.n times (utils/config.py).
        "prompts": "data.train_batch_size",
        "samples": f"{_ROLLOUT}.n",
        "max_prompt_tokens": "data.max_prompt_length",
        "max_response_tokens": "data.max_response_length",
    },
    replicas="trainer.nnodes * trainer.n_gpus_per_node decides it",
    passed=f"+{_ROLLOUT}.engine_kwargs.vllm.",
    trainer=VERL,
    spelled=hydra,
    variables="+ray_kwargs.ray_init.runtime_env.env_vars.",
    megatron="model_engine=megatron",
    omitted=("quantization", "quantization_config"),
    keeps=False,
)


def verl_overrides(job: Job) -> list[str]:
    """Overrides in Hydra's own syntax, not quoted for a shell. Raises ConfigError for anything that verl cannot do."""
    job.refuse("verl")
    settings = {
        "actor_rollout_ref.model.path": job.setup.path,
        **batch_settings(job, STOCK),
        **_planned_rollout(job),
        **_correction(job.tis),
    }
    return [*chain.from_iterable(hydra(key, value) for key, value in settings.items()), *remedy_words(job, STOCK)]


def emit_verl(job: Job) -> str:
    """The overrides as shell words, to paste after `python -m verl.trainer.main_ppo \\`."""
    comments = [
        f"fp8plan: {job.engine}; {STOCK.paste}, with fp8plan installed on each node",
        job.plan_note,
        mini_batch_note(job, _MINI_BATCH),
        replicas_note(job.setup, STOCK.replicas),
        shared_gpu_note(job.setup),
        *rollout_notes(job),
    ]
    return pasted([[word] for word in verl_overrides(job)], comments)


def emit_verl_stock(job: Job) -> str:
    """The same for a verl without fp8plan."""
    settings = {f"{_ROLLOUT}.name": "vllm", **common_settings(job, STOCK), **_correction(job.constant_tis)}
    if job.setup.precision.in_blocks:
        settings[f"{_ROLLOUT}.quantization"] = "fp8"
    return stock_words(job, STOCK, settings, mini_batch_note(job, _MINI_BATCH))


def _planned_rollout(job: Job) -> dict[str, Any]:
    limits = job.setup.limits
    settings: dict[str, Any] = {
        "name": "fp8plan",
        **{word: getattr(limits, name) for word, name in VERLS.items()},
        # verl's replicas are the GPUs divided by the tensor-parallel size; this key is vLLM's own data parallelism.
        "data_parallel_size": 1,
    }
    if limits.expert_ranks > 1:
        # Any number above 1 sets vLLM's enable_expert_parallel (vllm_async_server.py). RolloutConfig wants this one.
        settings["expert_parallel_size"] = limits.expert_ranks
    ours = {"plan": job.plan, "choice": job.choice}
    return {f"{_ROLLOUT}.{key}": value for key, value in settings.items()} | {
        f"+{_ROLLOUT}.custom.fp8plan.{key}": value for key, value in ours.items()
    }


def _correction(tis: float | None) -> dict[str, Any]:
    settings: dict[str, Any] = {"rollout_is": None, "rollout_rs": None}
    if tis is not None:
        settings |= {"rollout_is": "token", "rollout_is_threshold": float(tis)}
    return {f"{_CORRECTION}.{key}": value for key, value in settings.items()}
