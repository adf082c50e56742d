"""A planned engine as Hydra overrides for verl 0.9.1 (verl/trainer/config/ppo_trainer.yaml).

With fp8plan's rollouts, fp8plan.integrations.verl reads the plan's file, and the overrides repeat only the limits that
verl has words for. Without fp8plan they have verl's own words for the precision. `quantization=fp8` are blocks of
128 x 128 without the routers (`_apply_quantization` of vllm_async_server.py); any other argument reaches vLLM through
`engine_kwargs`.
"""

from __future__ import annotations

from typing import Any, Final

from fp8plan.model.emit.job import Job
from fp8plan.model.emit.notes import replicas_note, rollout_notes, shared_gpu_note
from fp8plan.model.emit.spelling import hydra, pasted
from fp8plan.model.emit.stock import Stock, engine_words, notes
from fp8plan.model.emit.trainers import VERL
from fp8plan.model.emit.vllm import vllm_env
from fp8plan.model.limits import VERLS

_ROLLOUT: Final = "actor_rollout_ref.rollout"
_CORRECTION: Final = "algorithm.rollout_correction"
_REPLICAS: Final = "trainer.nnodes * trainer.n_gpus_per_node decides it"
_PASTE: Final = "the end of: python -m verl.trainer.main_ppo ..."

STOCK: Final = Stock(
    title="verl 0.9.1",
    paste=_PASTE,
    engine="vLLM 0.24",
    words={
        "model": "actor_rollout_ref.model.path",
        **{field: f"{_ROLLOUT}.{word}" for word, field in VERLS.items()},
        "expert_ranks": f"{_ROLLOUT}.expert_parallel_size",
    },
    passed=f"+{_ROLLOUT}.engine_kwargs.vllm.",
    omitted=("quantization", "quantization_config"),
    trainer=VERL,
    keeps=False,
)


def verl_overrides(job: Job) -> list[str]:
    """Overrides in Hydra's own syntax, not quoted for a shell. Raises ConfigError for anything that verl cannot do."""
    job.refuse("verl")
    settings = {"actor_rollout_ref.model.path": job.setup.path, **_batch(job), **_planned_rollout(job)}
    return [*_spelled(settings | _correction(job.tis)), *_remedies(job)]


def emit_verl(job: Job) -> str:
    """The overrides as shell words, to paste after `python -m verl.trainer.main_ppo \\`."""
    setup = job.setup
    comments = [
        f"fp8plan: {job.engine}; {_PASTE}, with fp8plan installed on each node",
        job.plan_note,
        _mini_batch(job),
        replicas_note(setup, _REPLICAS),
        shared_gpu_note(setup),
        *rollout_notes(job),
    ]
    return pasted([[word] for word in verl_overrides(job)], comments)


def emit_verl_stock(job: Job) -> str:
    """The same for a verl without fp8plan."""
    engine = engine_words(job, STOCK)
    settings = {**_batch(job), f"{_ROLLOUT}.name": "vllm", f"{_ROLLOUT}.n": job.tokens("samples"), **engine}
    if job.setup.precision.in_blocks:
        settings[f"{_ROLLOUT}.quantization"] = "fp8"
    for name, value in vllm_env(job.setup).items():
        settings[f"+ray_kwargs.ray_init.runtime_env.env_vars.{name}"] = value
    words = [*_spelled(settings | _correction(job.constant_tis)), *_remedies(job)]
    return pasted([[word] for word in words], notes(job, STOCK, _REPLICAS, _mini_batch(job)))


def _spelled(settings: dict[str, Any]) -> list[str]:
    return [hydra(key, value) for key, value in settings.items()]


def _batch(job: Job) -> dict[str, Any]:
    return {
        # Prompts of a whole step, on all replicas: verl repeats each rollout.n times (utils/config.py).
        "data.train_batch_size": job.tokens("prompts"),
        "data.max_prompt_length": job.tokens("max_prompt_tokens"),
        "data.max_response_length": job.tokens("max_response_tokens"),
    }


def _mini_batch(job: Job) -> str:
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size"
    return f"{mini} is yours to set: at most {job.tokens('prompts')}, data.train_batch_size (verl's default is 256)"


def _planned_rollout(job: Job) -> dict[str, Any]:
    limits = job.setup.limits
    settings: dict[str, Any] = {
        "name": "fp8plan",
        "n": job.tokens("samples"),
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


def _remedies(job: Job) -> list[str]:
    """Overrides for router replay and the trainer's precision, which are of verl's Megatron engine."""
    words = VERL.words(job.setup.remedies)
    return ["model_engine=megatron", *words] if words else []


def _correction(tis: float | None) -> dict[str, Any]:
    settings: dict[str, Any] = {"rollout_is": None, "rollout_rs": None}
    if tis is not None:
        settings |= {"rollout_is": "token", "rollout_is_threshold": float(tis)}
    return {f"{_CORRECTION}.{key}": value for key, value in settings.items()}
