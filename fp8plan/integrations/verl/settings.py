"""verl's configuration, as fp8plan reads it: fp8plan's own settings, the checks, and the plan of the rollouts.

    +actor_rollout_ref.rollout.custom.fp8plan.plan=/path/plan.json

Also here: the version of verl that the integration needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from fp8plan.errors import ConfigError
from fp8plan.integrations.common import TrainerSettings, check_model, read_plan, read_settings
from fp8plan.integrations.request import Rollouts, plan_of_words, printed_plan, words_of
from fp8plan.integrations.verl.name import NAME
from fp8plan.model.emit.trainers import FP32_SCALES, VERL, precision_of
from fp8plan.model.limits import VERLS, fields_of
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.risk.expected import Level
from fp8plan.model.risk.remedies import Remedies
from fp8plan.model.shards import why_not_shardable
from fp8plan.runtime.apply.engine.options import refuse_unknown
from fp8plan.runtime.apply.vllm_versions import check_vllm_version
from fp8plan.runtime.watch.mismatch.sampling import Sampling

# ----------------------------------------------------------------------------------------------- this verl's inside

TESTED: Final = "0.9.1"

# The function of verl's trainers that corrects a batch.
CORRECTION: Final = "compute_rollout_correction_and_add_to_batch"


def check_verl() -> None:
    """Raise ConfigError if this verl is not the tested one, whose inside the integration uses."""
    installed = version("verl")
    if installed != TESTED:
        raise ConfigError(
            f"verl {installed} with rollout.name=fp8plan is not supported; allowed: {TESTED}; type: pip install "
            f"'verl[verl-core]=={TESTED}', or actor_rollout_ref.rollout.name=vllm"
        )


@contextmanager
def correcting_with(correct: Any) -> Iterator[None]:
    """Let verl call `correct` to correct a batch. verl finds its own function by name in the trainers' module."""
    from verl.trainer.ppo.v1 import trainer_base

    with patch.object(trainer_base, CORRECTION, correct):
        yield


# ------------------------------------------------------------------------------------------------------ settings

WHERE: Final = "actor_rollout_ref.rollout.custom.fp8plan"
ROLLOUT: Final = "actor_rollout_ref.rollout"
COMPOSE: Final = "python -m verl.trainer.main_ppo ... --cfg job > FILE.yaml"  # writes a composed configuration
PLANNED: Final = "fp8plan_plan"  # key in `custom` of the plan that the trainer hands on to the servers

# Settings of verl's rollout that have one allowed value, and the reason.
FIXED: Final[Mapping[str, tuple[Any, str]]] = {
    "quantization": (None, "the precision comes from the plan"),
    "quantization_config_file": (None, "the precision comes from the plan"),
    "data_parallel_size": (1, "a replica is one engine"),
    "pipeline_model_parallel_size": (1, "a replica is one engine"),
    "dtype": ("bfloat16", "FP8 is made of BF16"),
    "logprobs_mode": ("processed_logprobs", "the correction needs the log-probs of what was sampled"),
}


class Settings(TrainerSettings, frozen=True):
    """The keys of custom.fp8plan, beside those of every trainer. Paths are of the machine where the trainer runs.

    Without a plan one is made at the start, from verl's own settings.

    choice:  index into the plan's choices, or one of its precisions; null: the chosen one
    accept:  highest risk of a plan made here: low, moderate (also if it is null) or high
    gpu:     GPU of a plan made here; "auto": the GPU where verl's trainer runs
    correct: false: the mismatch is measured, and all weights are 1
    dry_run: true: print the plan's table, and start neither engines nor training
    allow_biased_sampling: true: allow top_p, top_k and the like, which bias the correction's ratios; false: refuse
             them, unless nothing is corrected
    """

    choice: int | str | None = None
    accept: Level | None = None
    gpu: str = "auto"
    correct: bool = True
    dry_run: bool = False
    allow_biased_sampling: bool = False


def settings_in(config: Any) -> Settings:
    """The settings in verl's configuration. Raises ConfigError for keys, types or combinations that are not allowed."""
    custom = config.actor_rollout_ref.rollout.get("custom") or {}
    data = custom.get(NAME) or {}
    if OmegaConf.is_config(data):
        data = OmegaConf.to_container(data, resolve=True)
    settings = read_settings(data, Settings, WHERE, f"+{WHERE}.accept=moderate")
    if settings.plan is not None and settings.accept is not None:
        raise ConfigError(
            f"{WHERE} has plan and accept; allowed: one of them, as a plan has an accepted risk of its own"
        )
    return settings


def sampling_in(rollout: Any) -> Sampling:
    """The sampling of training rollouts in verl's rollout configuration."""
    return scored({name: rollout.get(name) for name in ("temperature", "top_p", "top_k")}, rollout)


def scored(params: Mapping[str, Any], rollout: Any) -> Sampling:
    """The sampling of a request. verl divides the trainer's logits by its rollout configuration's temperature."""
    sampling = Sampling.of(params, trainer_temperature=rollout.get("temperature") or None)
    assert sampling is not None
    return sampling


def refuse(config: Any) -> None:
    """Raise ConfigError for verl settings that fp8plan's rollouts do not support."""
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
        if (value := rollout.get(name, allowed)) != allowed:
            yield f"{ROLLOUT}.{name} is {value}; allowed: {'null' if allowed is None else allowed}, as {why}"
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
        yield (
            "algorithm.rollout_correction.bypass_mode is on: verl then computes no log-probs of the trainer before the "
            "update, so the mismatch cannot be measured; type algorithm.rollout_correction.bypass_mode=False"
        )
    if rollout.tensor_model_parallel_size > (gpus := int(_nodes(config).n_gpus_per_node)):
        yield f"{ROLLOUT}.tensor_model_parallel_size is {rollout.tensor_model_parallel_size}; allowed: {gpus}, a node's"
    for path, backend in _others(config):
        if backend is None:
            raise ConfigError(f"{path}.name is missing, which verl needs in any case; type {path}.name=vllm")
        if backend == NAME:
            yield f"{path}.name is {NAME}; allowed: vllm, as these weights do not change"


def _others(config: Any) -> Iterator[tuple[str, str | None]]:
    """Yield path and name of the rollouts of other models than the policy. By default a teacher has the policy's name,
    and a reward model none.
    """
    if OmegaConf.select(config, "distillation.enabled"):
        for teacher, settings in config.distillation.teacher_models.items():
            yield f"distillation.teacher_models.{teacher}.inference", settings.inference.name
    if config.reward.reward_model.enable:
        yield "reward.reward_model.rollout", OmegaConf.select(config, "reward.reward_model.rollout.name")


def remedies_in(config: Any) -> Remedies:
    """Router replay and the trainer's precision in verl's configuration. Raises ConfigError for an unknown recipe.

    verl's Megatron and VeOmni engines replay, and Megatron trains in FP8.
    """
    actor = config.actor_rollout_ref.actor
    mode = OmegaConf.select(actor, f"{actor.strategy}.router_replay.mode")
    replay = bool(config.actor_rollout_ref.rollout.enable_rollout_routing_replay and mode == "R3")
    recipe = OmegaConf.select(actor, f"{actor.strategy}.override_transformer_config") or {}
    variables = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {}
    scales = variables.get(FP32_SCALES, os.environ.get(FP32_SCALES))
    return Remedies(replay, precision_of(recipe.get("fp8"), recipe.get("fp8_recipe"), scales))


def engine_kwargs(config: Any) -> dict[str, Any]:
    """vLLM's arguments that verl's configuration adds to its own."""
    return dict((config.actor_rollout_ref.rollout.get("engine_kwargs") or {}).get("vllm") or {})


def separate(config: Any) -> bool:
    """True if the engines that sample have GPUs of their own."""
    return bool(config.trainer.v1.trainer_mode == "separate_async")


def _nodes(config: Any) -> Any:
    """The part of verl's configuration with the number of sampling nodes, and the GPUs of each."""
    return config.actor_rollout_ref.rollout if separate(config) else config.trainer


def hand_on(config: Any, plan: str, max_model_len: int) -> None:
    """Write the plan, as JSON, and its limit into verl's configuration, for its servers and agents."""
    rollout = config.actor_rollout_ref.rollout
    with open_dict(rollout):
        rollout.custom = {**(rollout.get("custom") or {}), PLANNED: plan}
        rollout.max_model_len = max_model_len
        rollout.calculate_log_probs = True  # the correction needs the log-probs of the sampled tokens


def handed_on(custom: Any) -> str:
    """The plan, as JSON, that `hand_on` wrote. Raises ConfigError if no planned trainer wrote one."""
    plan: str | None = (custom or {}).get(PLANNED)
    if plan is None:
        raise ConfigError(
            f"rollout.name={NAME} has no plan: verl's trainer is not fp8plan's; allowed: python -m "
            "verl.trainer.main_ppo with trainer.use_v1=True and a trainer_mode of verl's, where fp8plan is installed "
            "and VERL_USE_EXTERNAL_PLUGINS is not 'none'"
        )
    return plan


# ---------------------------------------------------------------------------------------------------------- plan


def plan_of(config: Any, settings: Settings) -> Plan:
    """The checked plan of the settings, or else one made from verl's configuration; chosen is the settings' choice.

    Raises ConfigError for a plan of another engine, and the errors of `fp8plan.plan`.
    """
    if settings.plan is None:
        installed = check_vllm_version().partition("+")[0]
        made = plan_of_words(words_of(rollouts_of(config, settings), {PlanRequest: {"engine_version": installed}}))
        return replace(made, chosen=made.index(settings.choice))
    allowed = f"the full path of a plan's JSON where verl's trainer runs, which is in {Path.cwd()}"
    read = read_plan(settings.plan, allowed)
    if read is None:
        raise ConfigError(f"plan is {settings.plan!r}; allowed: a path, or no plan, for one that is made here")
    plan = replace(read, chosen=read.index(settings.choice))
    fault = next(_plan_faults(plan, config), None)
    if fault is not None:
        raise ConfigError(f"{fault}, or plan again: fp8plan plan MODEL --gpu GPU --emit verl --json {settings.plan}")
    check_model(plan.setup(), str(config.actor_rollout_ref.model.path))
    return plan


def rollouts_of(config: Any, settings: Settings) -> Rollouts:
    """The rollouts of verl's configuration, of all its engines."""
    actor, data, nodes = config.actor_rollout_ref, config.data, _nodes(config)
    rollout, remedies = actor.rollout, remedies_in(config)
    samples = int(rollout.n)
    limits = {name: rollout[word] for word, name in VERLS.items()}
    limits["enable_expert_parallel"] = rollout.expert_parallel_size > 1
    return Rollouts(
        int(data.train_batch_size) * samples,
        samples,
        int(data.max_response_length),
        longest_prompt=int(data.max_prompt_length),
        own={"model": str(actor.model.path), "gpu": settings.gpu, "target": "verl"},
        limits=limits | fields_of(engine_kwargs(config)),
        budget={} if settings.accept is None else {"accept": settings.accept},
        remedies={
            "router_replay": remedies.router_replay,
            "trainer_precision": remedies.trainer_precision,
        },
        gpus=int(nodes.n_gpus_per_node) * int(nodes.nnodes),
    )


def rollouts_in(config: Any) -> Rollouts:
    """The rollouts of a configuration of verl's, if fp8plan's engines can run them.

    config: composed; or the path of its YAML. Without fp8plan's rollouts it may have verl's own quantisation, in whose
    place the plan has every precision

    Raises ConfigError for any other file or configuration.
    """
    where = "the configuration"
    if isinstance(config, (str, Path)):
        where = str(config)
    try:
        read = OmegaConf.load(config) if isinstance(config, (str, Path)) else OmegaConf.create(config)
        settings, rollout = settings_in(read), read.actor_rollout_ref.rollout
        name = "missing" if OmegaConf.is_missing(rollout, "name") else rollout.name
        if name not in (NAME, "vllm"):
            raise ConfigError(f"{ROLLOUT}.name is {name}, and fp8plan predicts vLLM; allowed: vllm, {NAME}")
        if name != NAME:
            with open_dict(rollout):
                rollout.update(quantization=None, quantization_config_file=None)
        refuse(read)
        return rollouts_of(read, settings)
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{where} is not verl's composed configuration: {reason:.200}; type: {COMPOSE}") from None


def planned(config: Any, **fields: Any) -> Plan:
    """Print the table of the plan that verl's configuration asks for, and return the plan. Nothing is started.

    With the same GPU, a trainer without a saved plan chooses from the same table.

    config: composed by hydra; or the path of its YAML
    fields: of PlanRequest, as `fp8plan.plan` takes them, which go before the configuration, such as gpu="h200"

    Raises ConfigError as `rollouts_in` does, and the errors of `fp8plan.plan`.
    """
    return printed_plan(rollouts_in(config), fields, {})


def _plan_faults(plan: Plan, config: Any) -> Iterator[str]:
    """Yield each difference between the plan and verl's configuration, with the words to type."""
    setup, rollout, data = plan.setup(), config.actor_rollout_ref.rollout, config.data
    limits = setup.limits
    pairs: dict[str, tuple[Any, Any]] = {word: (rollout[word], getattr(limits, name)) for word, name in VERLS.items()}
    pairs["expert_parallel_size"] = max(1, rollout.expert_parallel_size), limits.expert_ranks
    if rollout.max_model_len is None:
        del pairs["max_model_len"]
    if setup.gpu.is_cpu:
        del pairs["gpu_memory_utilization"]
    for word, (theirs, ours) in pairs.items():
        if theirs != ours:
            yield f"{ROLLOUT}.{word} is {theirs}, and the plan has {ours}; type: {ROLLOUT}.{word}={ours}"
    planned, running = plan.remedies, remedies_in(config)
    if planned.router_replay and not running.router_replay:
        words = " ".join(("model_engine=megatron", *VERL.router_replay))
        yield f"the plan has router replay, and verl's is off; type: {words} (verl replays with megatron and veomni)"
    if planned.trainer_precision != running.trainer_precision:
        recipe = " ".join(VERL.words(Remedies(trainer_precision=planned.trainer_precision)))
        todo = f"model_engine=megatron {recipe}" if recipe else "leave override_transformer_config.fp8 out"
        yield (
            f"verl trains in {running.trainer_precision}, and the plan expects {planned.trainer_precision}; type: "
            f"{todo}, or plan with --trainer-precision {running.trainer_precision}"
        )
    longest = int(data.max_prompt_length) + int(data.max_response_length)
    if longest > (limits.max_model_len or longest):
        yield (
            f"data.max_prompt_length and data.max_response_length are {longest} tokens together, and the plan's "
            f"longest request has {limits.max_model_len}; allowed: shorter ones"
        )
    if reason := why_not_shardable(
        setup.shape, setup.precision, limits.tensor_parallel_size, "verl", limits.expert_ranks > 1
    ):
        yield reason
