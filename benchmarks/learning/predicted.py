"""The limits and the plan of an arm, written before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.learning.policies.tasks import Task
from fp8plan.errors import Fp8PlanError
from fp8plan.model.distributions import Trace
from fp8plan.model.hardware import Gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.planner import plan
from fp8plan.model.rl_step import StepTimes
from fp8plan.model.workload import Workload

# What the plan says of a choice, under its own names.
FORESEEN: Final = (
    "precision", "speedup", "speedup_low", "speedup_high", "step_speedup", "kl_k3", "kl_k3_low", "kl_k3_high",
    "ess_raw", "clip_fraction", "makespan_s", "makespan_low_s", "makespan_high_s", "risk", "extrapolated",
)  # fmt: skip
POOL: Final = 0.7  # KV cache, of an engine's share of a GPU


def limits_of(gpu: Gpu, task: Task, share: float) -> tuple[EngineLimits, dict[str, int]]:
    """The limits of an engine for a task that has a share of a GPU's memory, and vLLM's argument for its KV cache.

    Left alone, vLLM would take for its own what others take while it looks. A CPU is not shared.
    """
    limits = replace(EngineLimits.for_gpu(gpu), max_model_len=task.max_prompt_tokens + task.max_response_tokens)
    if gpu.is_cpu:
        return limits, {}
    pool = {"kv_cache_memory_bytes": int(POOL * share * gpu.memory_bytes)}
    return replace(limits, gpu_memory_utilization=share), pool


def plan_of_pilot(
    model: Path,
    gpu: str,
    shape: tuple[int, int],
    seen: Sequence[tuple[int, int]],
    limits: EngineLimits,
    times: StepTimes,
) -> Plan:
    """The plan of the arm. seen: lengths (prompt, response) of a pilot rollout; times: the trainer's own seconds

    Raises ProfileError where nothing was measured that could predict it.
    """
    import vllm

    prompts, responses = (tuple(lengths) for lengths in zip(*seen, strict=True))
    of_prompts = Trace(prompts[:: shape[1]], "the pilot rollout")  # samples of a prompt follow each other
    work = Workload(*shape, prompt_lengths=of_prompts, response_lengths=Trace(responses, "the pilot rollout"))
    version = vllm.__version__.partition("+")[0]
    return plan(str(model), gpu, work, limits=limits, gpus=1, trainer=times, engine_version=version)


def foreseen(plan: Plan | Fp8PlanError, precision: str) -> dict[str, Any]:
    """The plan's figures of a precision, for predicted.json; why there are none, if there could be no plan."""
    if isinstance(plan, Fp8PlanError):
        return dict.fromkeys(FORESEEN) | {"precision": precision, "warnings": [str(plan)]}
    choice = plan.select(precision)
    return {name: getattr(choice, name) for name in FORESEEN} | {"warnings": list(plan.warnings)}
