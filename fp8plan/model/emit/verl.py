"""A planned engine as Hydra overrides for verl 0.9.1 (verl/trainer/config/ppo_trainer.yaml), with fp8plan's rollouts.

fp8plan.integrations.verl reads the plan's file. The overrides repeat only the limits that verl has words for.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any, Final

from fp8plan.model.emit.concurrent import concurrent_notes
from fp8plan.model.emit.trainers import VERL
from fp8plan.model.emit.vllm import (
    Job,
    grid_notes,
    measured_notes,
    model_name,
    refuse_for,
    replicas_note,
    shared_gpu_note,
)
from fp8plan.model.limits import VERLS
from fp8plan.model.risk.expected import THRESHOLD

_ROLLOUT: Final = "actor_rollout_ref.rollout"
_CORRECTION: Final = "algorithm.rollout_correction"
_PLAIN_TEXT: Final = re.compile(r"[A-Za-z/][\w./-]*")  # Hydra's grammar takes it without quotes
_RESERVED: Final = {"null", "true", "false", "inf", "nan"}


def verl_overrides(job: Job) -> list[str]:
    """Overrides in Hydra's own syntax, not quoted for a shell. Raises ConfigError for anything that verl cannot do."""
    refuse_for(job, "verl")
    settings = {**_model_settings(job), **_rollout_settings(job), **_correction(job.thresholds)}
    return [*(f"{key}={_hydra(value)}" for key, value in settings.items()), *_remedies(job)]


def emit_verl(job: Job) -> str:
    """The overrides as shell words, to paste after `python -m verl.trainer.main_ppo \\`.

    Each line but the last ends in a continuation. The comments come last, as bash would drop any words after them.
    """
    setup = job.setup
    engine = f"{model_name(setup)} on {setup.gpu.name}, {setup.precision.name}"
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size"
    notes = [
        f"fp8plan: {engine}; the end of: python -m verl.trainer.main_ppo ..., with fp8plan installed on each node",
        job.plan_note,
        f"{mini} is yours to set: at most {job.tokens('prompts')}, data.train_batch_size (verl's default is 256)",
        replicas_note(setup, "trainer.nnodes * trainer.n_gpus_per_node decides it"),
        shared_gpu_note(setup),
        *concurrent_notes(job.workload, "verl"),
        *measured_notes(job),
        *grid_notes(job),
    ]
    words = " \\\n".join(map(shlex.quote, verl_overrides(job)))
    return "\n".join([words, *(f"# {' '.join(note.split())}" for note in notes)])


def _model_settings(job: Job) -> dict[str, Any]:
    return {
        "actor_rollout_ref.model.path": job.setup.path,
        # Prompts of a whole step, on all replicas: verl repeats each rollout.n times (utils/config.py).
        "data.train_batch_size": job.tokens("prompts"),
        "data.max_prompt_length": job.tokens("max_prompt_tokens"),
        "data.max_response_length": job.tokens("max_response_tokens"),
    }


def _rollout_settings(job: Job) -> dict[str, Any]:
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


def _correction(thresholds: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {"rollout_is": None, "rollout_rs": None}
    if THRESHOLD in thresholds:
        settings |= {"rollout_is": "token", "rollout_is_threshold": float(thresholds[THRESHOLD])}
    return {f"{_CORRECTION}.{key}": value for key, value in settings.items()}


def _hydra(value: Any) -> str:
    """Write `value` in the grammar of Hydra overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return repr(value)
    if _PLAIN_TEXT.fullmatch(value) and value.lower() not in _RESERVED:
        return value
    # A backslash is only special before a quote, where it doubles; "${" would start an interpolation.
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value).replace("${", "\\${")
    return f"'{escaped}'"
