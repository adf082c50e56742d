"""A plan for the rollouts that verl's configuration describes, and the check of one that was made before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.integrations.planning import plan_for, read_plan
from fp8plan.integrations.verl.settings import ROLLOUT, Settings, engine_kwargs, gpus_per_node, separate
from fp8plan.model.architecture import ModelShape
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.plan import Plan
from fp8plan.model.risk.budget import RiskBudget
from fp8plan.model.shards import why_not_shardable
from fp8plan.runtime.vllm_versions import check_vllm_version

# Limits of an engine -> verl's words for them.
WORDS: Final = {
    "gpu_memory_utilization": "gpu_memory_utilization",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "enable_prefix_caching": "enable_prefix_caching",
    "enforce_eager": "enforce_eager",
    "tensor_parallel_size": "tensor_model_parallel_size",
}


def plan_of(config: Any, settings: Settings) -> Plan:
    """The plan that the settings name, checked; else one made from verl's configuration. The settings' choice is its
    chosen one.

    Raises ConfigError for a plan of another engine, and what `fp8plan.plan` raises.
    """
    if settings.plan is None:
        made = made_plan(config, settings)
        return replace(made, chosen=made.index(settings.choice))
    allowed = f"the full path of a plan's JSON where verl's trainer runs, which is in {Path.cwd()}"
    read = read_plan(settings.plan, allowed)
    if read is None:
        raise ConfigError(f"plan is {settings.plan!r}; allowed: a path, or none of it for a plan that is made here")
    plan = replace(read, chosen=read.index(settings.choice))
    fault = next(_faults(plan, config), None)
    if fault is not None:
        raise ConfigError(f"{fault}, or plan again: fp8plan plan MODEL --gpu GPU --emit verl --json {settings.plan}")
    plan.setup().check_model(str(config.actor_rollout_ref.model.path))
    return plan


def made_plan(config: Any, settings: Settings) -> Plan:
    """Plan the rollouts of verl's configuration. Only the precision is to be found."""
    model, data = str(config.actor_rollout_ref.model.path), config.data
    samples = int(config.actor_rollout_ref.rollout.n)
    return plan_for(
        model,
        settings.gpu,
        limits_of(config, settings.gpu),
        responses=int(data.train_batch_size) * samples,
        samples=samples,
        longest_response=int(data.max_response_length),
        longest_prompt=int(data.max_prompt_length),
        target="verl",
        budget=RiskBudget() if settings.accept is None else RiskBudget(accept=settings.accept),
    )


def limits_of(config: Any, gpu: str) -> EngineLimits:
    """The limits of the engines that verl would start, and how many of them there are.

    gpu: as find_gpu takes it. Raises ConfigError for a model that is not modelled or not found.
    """
    rollout = config.actor_rollout_ref.rollout
    shape = ModelShape.from_hf(str(config.actor_rollout_ref.model.path))
    found: dict[str, Any] = {name: rollout[word] for name, word in WORDS.items()}
    found["max_model_len"] = rollout.max_model_len or shape.context.derived(check_vllm_version())
    found["enable_expert_parallel"] = rollout.expert_parallel_size > 1
    found["data_parallel_size"] = max(1, _gpus(config) // rollout.tensor_model_parallel_size)
    options = engine_kwargs(config)
    known = {field.name for field in fields(EngineLimits)}
    found |= {name: value for name, value in options.items() if name in known and value is not None}
    if (pool := options.get("num_gpu_blocks_override")) is not None:
        found["num_gpu_blocks"] = pool - 1  # and the null block, which no request can use
    card = find_gpu(gpu)
    if card.is_cpu:
        del found["gpu_memory_utilization"]
    return EngineLimits.for_gpu(card, shape.recurrent, **found)


def _gpus(config: Any) -> int:
    """GPUs that sample, in all."""
    where = config.actor_rollout_ref.rollout if separate(config) else config.trainer
    return gpus_per_node(config) * int(where.nnodes)


def _faults(plan: Plan, config: Any) -> Iterator[str]:
    """Yield what is planned otherwise than verl's configuration says, with what to type."""
    setup, rollout, data = plan.setup(), config.actor_rollout_ref.rollout, config.data
    limits = setup.limits
    told: dict[str, tuple[Any, Any]] = {word: (rollout[word], getattr(limits, name)) for name, word in WORDS.items()}
    told["expert_parallel_size"] = max(1, rollout.expert_parallel_size), limits.expert_ranks
    if rollout.max_model_len is not None:
        told["max_model_len"] = rollout.max_model_len, limits.max_model_len
    if setup.gpu.is_cpu:
        del told["gpu_memory_utilization"]
    for word, (theirs, ours) in told.items():
        if theirs != ours:
            yield f"{ROLLOUT}.{word} is {theirs}, and the plan has {ours}; type: {ROLLOUT}.{word}={ours}"
    longest = int(data.max_prompt_length) + int(data.max_response_length)
    if longest > (limits.max_model_len or longest):
        yield (
            f"data.max_prompt_length and data.max_response_length are {longest} tokens together, and the plan's "
            f"longest request has {limits.max_model_len}; allowed: shorter ones"
        )
    if reason := why_not_shardable(
        setup.shape, setup.precision, limits.tensor_parallel_size, "verl", limits.expert_ranks > 1, setup.gpu
    ):
        yield reason
