"""The settings of fp8plan in verl's configuration, actor_rollout_ref.rollout.custom.fp8plan, and what refuses them.

    +actor_rollout_ref.rollout.custom.fp8plan.plan=/path/plan.json

Every key may be left out. Settings lists them.

A plan for the rollouts that verl's configuration describes, and the check of one that was made before.

The parts of verl that the integration leans on: its version, and the names that are overridden or called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal
from unittest.mock import patch

import msgspec
from omegaconf import OmegaConf, open_dict

from fp8plan.checks import refuse_names
from fp8plan.errors import ConfigError
from fp8plan.integrations.common import plan_for, read_plan
from fp8plan.integrations.verl import NAME
from fp8plan.model.architecture import ModelShape
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import VERLS, EngineLimits, fields_of
from fp8plan.model.plan.plan import Plan
from fp8plan.model.risk.expected import Level, RiskBudget
from fp8plan.model.shards import why_not_shardable
from fp8plan.runtime.engine.options import refuse_unknown
from fp8plan.runtime.mismatch.sampling import Sampling
from fp8plan.runtime.vllm_versions import check_vllm_version
from fp8plan.schemas import checked

WHERE: Final = "actor_rollout_ref.rollout.custom.fp8plan"
ROLLOUT: Final = "actor_rollout_ref.rollout"
PLANNED: Final = "fp8plan_plan"  # in `custom`: what the trainer hands on to the servers

# Settings of a rollout: the only value that each may have, and why.
FIXED: Final[Mapping[str, tuple[Any, str]]] = {
    "quantization": (None, "the precision comes from the plan"),
    "quantization_config_file": (None, "the precision comes from the plan"),
    "data_parallel_size": (1, "a replica is one engine"),
    "pipeline_model_parallel_size": (1, "a replica is one engine"),
    "dtype": ("bfloat16", "FP8 is made of BF16"),
    "logprobs_mode": ("processed_logprobs", "the correction needs the log-probs of what was sampled"),
}


class Settings(msgspec.Struct, frozen=True):
    """The keys of custom.fp8plan.

    plan:       path of a plan's JSON, where the trainer runs; null: made at the start, from verl's own settings
    choice:     index into the plan's choices, or one of its precisions; null: the chosen one
    accept:     highest risk that a plan made here may choose: low, moderate (also if it is null) or high
    gpu:        of a plan made here; "auto": the one of the machine where verl's trainer runs
    correct:    false: the mismatch is measured, and all weights are 1
    thresholds: "constant", or "adaptive" (AdaptiveThresholds)
    target_kl:  of adaptive ones, in nats per token; null: as the plan expects, or else its default
    limit_kl:   of either, likewise
    run_file:   path of a file for `fp8plan monitor`, where the trainer runs; null: none is written
    allow_biased_sampling: true: train with top_p, top_k and the like, which bias the correction's ratios; false: they
                are refused, unless nothing is corrected
    """

    plan: str | None = None
    choice: int | str | None = None
    accept: Level | None = None
    gpu: str = "auto"
    correct: bool = True
    thresholds: Literal["constant", "adaptive"] = "constant"
    target_kl: float | None = None
    limit_kl: float | None = None
    run_file: str | None = None
    allow_biased_sampling: bool = False


def settings_in(config: Any) -> Settings:
    """The settings in verl's configuration. Raises ConfigError for what cannot be."""
    custom = config.actor_rollout_ref.rollout.get("custom") or {}
    data = custom.get(NAME) or {}
    if OmegaConf.is_config(data):
        data = OmegaConf.to_container(data, resolve=True)
    if not isinstance(data, Mapping):
        raise ConfigError(f"{WHERE} is {data!r}; allowed: keys, as in +{WHERE}.accept=moderate")
    refuse_names(WHERE, data, Settings.__struct_fields__)
    found = checked(dict(data), Settings, WHERE)
    if found.plan is not None and found.accept is not None:
        raise ConfigError(f"{WHERE} has plan and accept; allowed: one of them, as a plan says what it accepts")
    return found


def sampling_in(rollout: Any) -> Sampling:
    """The sampling of training rollouts that verl's rollout configuration asks for."""
    found = {name: rollout.get(name) for name in ("temperature", "top_p", "top_k")}
    return scored(found, rollout)


def scored(params: Mapping[str, Any], rollout: Any) -> Sampling:
    """The sampling of a request. verl divides the trainer's logits by the temperature of its rollout configuration."""
    sampling = Sampling.of(params, trainer_temperature=rollout.get("temperature") or None)
    assert sampling is not None
    return sampling


def refuse(config: Any) -> None:
    """Raise ConfigError for settings of verl's that fp8plan's rollouts do not go with."""
    refuse_unknown(engine_kwargs(config), server=True, where=f"{ROLLOUT}.engine_kwargs.vllm")
    fault = next(_faults(config), None)
    if fault is not None:
        raise ConfigError(f"{fault}; or type {ROLLOUT}.name=vllm, without fp8plan")
    settings = settings_in(config)
    if settings.correct and not settings.allow_biased_sampling:
        sampling_in(config.actor_rollout_ref.rollout).refuse(ROLLOUT, f"+{WHERE}.allow_biased_sampling=True")


def _faults(config: Any) -> Iterator[str]:
    actor, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    for name, (allowed, why) in FIXED.items():
        if (found := rollout.get(name, allowed)) != allowed:
            yield f"{ROLLOUT}.{name} is {found}; allowed: {'null' if allowed is None else allowed}, as {why}"
    if (rollout.get("qat") or {}).get("enable"):
        yield f"{ROLLOUT}.qat is on; allowed: off, as the precision comes from the plan"
    if rollout.checkpoint_engine.backend == "delta_sharded":
        yield f"{ROLLOUT}.checkpoint_engine.backend is delta_sharded; allowed: one that sends whole tensors, as nccl"
    mtp = rollout.get("mtp") or {}
    if mtp.get("enable") and mtp.get("enable_rollout"):
        yield f"{ROLLOUT}.mtp is on, and no sync reaches its draft; allowed: enable_rollout=False"
    lora = actor.model.get("lora") or {}
    if max(lora.get("rank") or 0, actor.model.get("lora_rank") or 0) > 0 and not lora.get("merge"):
        yield "the policy has a LoRA adapter; allowed: one that is merged, actor_rollout_ref.model.lora.merge=True"
    if config.algorithm.get("rollout_correction", {}) is None:
        yield (
            "algorithm.rollout_correction is null, and verl then corrects nothing; allowed: leave it out, and to "
            f"measure only +{WHERE}.correct=False"
        )
    if (config.algorithm.get("rollout_correction") or {}).get("bypass_mode"):
        yield "algorithm.rollout_correction.bypass_mode is on, where there is nothing to correct; allowed: False"
    if rollout.tensor_model_parallel_size > (gpus := gpus_per_node(config)):
        yield f"{ROLLOUT}.tensor_model_parallel_size is {rollout.tensor_model_parallel_size}; allowed: {gpus}, a node's"
    for what, name in _others(config):
        if name == NAME:
            yield f"{what}.name is {NAME}; allowed: vllm, as these weights do not change"


def _others(config: Any) -> Iterator[tuple[str, str]]:
    """The rollouts of other models than the policy, which have its name unless they say another."""
    if OmegaConf.select(config, "distillation.enabled"):
        for teacher, found in config.distillation.teacher_models.items():
            yield f"distillation.teacher_models.{teacher}.inference", found.inference.name
    if config.reward.reward_model.enable:
        yield "reward.reward_model.rollout", config.reward.reward_model.rollout.name


def engine_kwargs(config: Any) -> dict[str, Any]:
    """Arguments of vLLM's that verl's configuration adds to its own."""
    return dict((config.actor_rollout_ref.rollout.get("engine_kwargs") or {}).get("vllm") or {})


def separate(config: Any) -> bool:
    """True if the engines that sample have GPUs of their own."""
    return bool(config.trainer.v1.trainer_mode == "separate_async")


def gpus_per_node(config: Any) -> int:
    """GPUs of a node that samples."""
    return int((config.actor_rollout_ref.rollout if separate(config) else config.trainer).n_gpus_per_node)


def hand_on(config: Any, plan: str, max_model_len: int) -> None:
    """Write into verl's configuration what its servers and its agents need to know. plan: as JSON"""
    rollout = config.actor_rollout_ref.rollout
    with open_dict(rollout):
        rollout.custom = {**(rollout.get("custom") or {}), PLANNED: plan}
        rollout.max_model_len = max_model_len
        rollout.calculate_log_probs = True  # of what was sampled: without them nothing can be corrected


def handed_on(custom: Any) -> str:
    """The plan that `hand_on` wrote, in a server. Raises ConfigError where no trainer of fp8plan's has."""
    found: str | None = (custom or {}).get(PLANNED)
    if found is None:
        raise ConfigError(
            f"rollout.name={NAME} has no plan: verl's trainer is not fp8plan's; allowed: python -m "
            "verl.trainer.main_ppo with trainer.use_v1=True and a trainer_mode of verl's, where fp8plan is installed "
            "and VERL_USE_EXTERNAL_PLUGINS is not 'none'"
        )
    return found


TESTED: Final = "0.9.1"

# Of a trainer's class, and of the module that it finds its correction in, by name.
TRAINER: Final = (
    "_compute_advantage", "_rollout_server_managers", "_save_checkpoint", "init", "on_sample_begin",
)  # fmt: skip
CORRECTION: Final = "compute_rollout_correction_and_add_to_batch"
SERVER: Final = (
    "_apply_quantization", "_get_worker_extension_cls", "_preprocess_engine_kwargs", "_validate_configs",
    "collective_rpc", "generate", "run_server",
)  # fmt: skip
REPLICA: Final = ("_get_server_name_prefix",)
WORKER: Final = ("_get_zmq_handle", "_iter_all_models", "monkey_patch_model", "update_weights_from_ipc")


def check_verl(needed: Mapping[Any, Sequence[str]]) -> None:
    """Raise ConfigError if this verl is not the one that was tested, or lacks a name.

    needed: object of verl's -> names that it must have
    """
    found = version("verl")
    hint = f"type: pip install 'verl[verl-core]=={TESTED}', or actor_rollout_ref.rollout.name=vllm"
    if found != TESTED:
        raise ConfigError(f"verl {found} with rollout.name=fp8plan is not supported; allowed: {TESTED}; {hint}")
    if gone := [
        f"{kind.__name__}.{name}" for kind, names in needed.items() for name in names if not hasattr(kind, name)
    ]:
        raise ConfigError(f"verl {found} lacks what rollout.name=fp8plan needs of it: {', '.join(gone)}; {hint}")


@contextmanager
def correcting_with(correct: Any) -> Iterator[None]:
    """Let verl call `correct` where it would correct a batch: it finds its function by name in the trainers' module."""
    from verl.trainer.ppo.v1 import trainer_base

    with patch.object(trainer_base, CORRECTION, correct):
        yield


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
    fault = next(_plan_faults(plan, config), None)
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
    found: dict[str, Any] = {name: rollout[word] for word, name in VERLS.items()}
    found["max_model_len"] = rollout.max_model_len or shape.context.derived(check_vllm_version())
    found["enable_expert_parallel"] = rollout.expert_parallel_size > 1
    found["data_parallel_size"] = max(1, _gpus(config) // rollout.tensor_model_parallel_size)
    found |= fields_of(engine_kwargs(config))
    card = find_gpu(gpu)
    if card.is_cpu:
        del found["gpu_memory_utilization"]
    return EngineLimits.for_gpu(card, shape.recurrent, **found)


def _gpus(config: Any) -> int:
    """GPUs that sample, in all."""
    where = config.actor_rollout_ref.rollout if separate(config) else config.trainer
    return gpus_per_node(config) * int(where.nnodes)


def _plan_faults(plan: Plan, config: Any) -> Iterator[str]:
    """Yield what is planned otherwise than verl's configuration says, with what to type."""
    setup, rollout, data = plan.setup(), config.actor_rollout_ref.rollout, config.data
    limits = setup.limits
    told: dict[str, tuple[Any, Any]] = {word: (rollout[word], getattr(limits, name)) for word, name in VERLS.items()}
    told["expert_parallel_size"] = max(1, rollout.expert_parallel_size), limits.expert_ranks
    if rollout.max_model_len is None:
        del told["max_model_len"]
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
