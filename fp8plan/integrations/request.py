"""A trainer's configuration as the request of a plan, for plans at a trainer's start and for those without a trainer.

A trainer's own module reads its configuration to `Rollouts`. `words_of` makes a request's words of them. What is set
beside the configuration goes before it: options that are typed, or what a running trainer knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, Final

from fp8plan.checks import refuse_names
from fp8plan.errors import ConfigError
from fp8plan.integrations.common import print_table
from fp8plan.model.architecture import ModelShape
from fp8plan.model.distributions import Fixed, LogNormal
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits, Lowerable
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.planner import predict
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.risk.expected import RiskBudget
from fp8plan.model.risk.remedies import Remedies
from fp8plan.model.workload import Workload
from fp8plan.model.workload_turns import Turns
from fp8plan.options import Words
from fp8plan.runtime.this_host import host_loop_s, said
from fp8plan.version import planned_version

# Guesses before the first rollout, as `fp8plan plan` makes them: mean response by longest response, and its sigma.
MEAN_SHARE, SIGMA = 0.3, 0.9
UNKNOWN_PROMPT: Final = 1024  # tokens

LAYOUT: Final = ("tensor_parallel_size", "data_parallel_size", "enable_expert_parallel")  # that --gpus searches


@dataclass(frozen=True)
class Rollouts:
    """The rollouts that a trainer's configuration describes.

    responses, samples: number in one rollout of all engines, and number for each prompt
    longest_response:   tokens
    longest_prompt:     tokens; None: max_model_len without the longest response
    own, limits, budget, remedies: fields of PlanRequest, EngineLimits, RiskBudget and Remedies that it sets
    whole_context:      requests may be as long as the model's context, if no max_model_len is set
    gpus:               GPUs of all engines; None: those of one engine
    all_at_once:        token budget of an engine that runs all of its responses at once; None: as in `limits`
    """

    responses: int
    samples: int
    longest_response: int
    longest_prompt: int | None = None
    own: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    budget: Mapping[str, Any] = field(default_factory=dict)
    remedies: Mapping[str, Any] = field(default_factory=dict)
    whole_context: bool = True
    gpus: int | None = None
    all_at_once: int | None = None


def words_of(rollouts: Rollouts, typed: Words) -> Words:
    """The words of a plan's request. typed: what is set beside the configuration, and goes before it

    Raises ConfigError without a model, and for a model or a GPU that is unknown.
    """
    own = {"gpu": "auto", **rollouts.own, **typed.get(PlanRequest, {})}
    if own.get("model") is None:
        raise ConfigError(
            "the trainer's configuration names no model; type one, a hub id or a folder, and the GPU if this machine "
            "has another: fp8plan plan MODEL --gpu GPU ... (planned(..., model=MODEL, gpu=GPU))"
        )
    on_cpu = find_gpu(own["gpu"]).is_cpu
    typed_work = typed.get(Workload, {})
    if {"prompts", "samples_per_prompt"} & typed_work.keys():
        rollouts = _counted(rollouts, **typed_work)
    limits = _limits(rollouts, own, typed.get(EngineLimits, {}), on_cpu)
    work: dict[str, Any] = {}
    if "workload" not in own:
        longest_request = own["limits"].max_model_len if "limits" in own else limits.get("max_model_len")
        work = _work(rollouts, longest_request, one_turn=not typed.get(Turns))
    remedies = dict(rollouts.remedies)
    if on_cpu:  # whose engine returns no experts
        remedies.pop("router_replay", None)
    return {
        **typed,
        PlanRequest: own,
        Workload: {**work, **typed_work},
        EngineLimits: limits,
        RiskBudget: {**rollouts.budget, **typed.get(RiskBudget, {})},
        Remedies: {**remedies, **typed.get(Remedies, {})},
    }


def _counted(
    rollouts: Rollouts, prompts: int | None = None, samples_per_prompt: int | None = None, **_: Any
) -> Rollouts:
    """The rollouts with another number of prompts, or of samples for each."""
    samples = min(rollouts.samples, rollouts.responses)
    prompts = prompts or ceil(rollouts.responses / samples)
    samples = samples_per_prompt or samples
    return replace(rollouts, responses=prompts * samples, samples=samples)


def _work(rollouts: Rollouts, max_model_len: int | None, one_turn: bool) -> dict[str, Any]:
    """The fields of Workload, with guesses for lengths that the configuration only bounds."""
    longest_prompt, longest = rollouts.longest_prompt, rollouts.longest_response
    if longest_prompt is None:
        longest_prompt = UNKNOWN_PROMPT if max_model_len is None else max_model_len - longest
    samples = min(rollouts.samples, rollouts.responses)
    work: dict[str, Any] = {
        "prompts": ceil(rollouts.responses / samples),
        "samples_per_prompt": samples,
        "prompt_lengths": Fixed(max(1, min(UNKNOWN_PROMPT, longest_prompt))),
    }
    if one_turn:
        work["response_lengths"] = LogNormal(max(1.0, MEAN_SHARE * longest), SIGMA, longest)
    return work


def _limits(rollouts: Rollouts, own: Mapping[str, Any], typed: Mapping[str, Any], on_cpu: bool) -> dict[str, Any]:
    """The fields of EngineLimits. own: fields of PlanRequest; typed: limits that go before the configuration's"""
    limits = {name: value for name, value in rollouts.limits.items() if value is not None}
    every_layout = "gpus" in own
    if every_layout:
        limits = {name: value for name, value in limits.items() if name not in LAYOUT}
    if on_cpu:
        limits.pop("gpu_memory_utilization", None)
    limits |= typed
    if rollouts.whole_context and "max_model_len" not in limits:
        version = planned_version(own.get("engine_version"), on_cpu)
        limits["max_model_len"] = ModelShape.from_hf(own["model"]).context.derived(version)
    if rollouts.gpus is not None and not every_layout:
        limits.setdefault("data_parallel_size", max(1, rollouts.gpus // limits.get("tensor_parallel_size", 1)))
    if rollouts.all_at_once is not None:
        limits.setdefault("max_num_seqs", Lowerable(rollouts.responses))
        limits.setdefault("max_num_batched_tokens", max(rollouts.all_at_once, rollouts.responses))
    return limits


def printed_plan(rollouts: Rollouts, fields: Mapping[str, Any], work: Mapping[str, Any]) -> Plan:
    """Print the table of the plan for a configuration's rollouts, and return the plan. Nothing is started.

    fields: of PlanRequest; work: fields of Workload. Both go before the configuration

    Raises ConfigError for a field that PlanRequest does not have, and the errors of `fp8plan.plan`.
    """
    refuse_names("planned", fields, tuple(PlanRequest.__dataclass_fields__))
    plan = plan_of_words(words_of(rollouts, {PlanRequest: fields, Workload: work}))
    print_table(plan)
    return plan


def plan_of_words(words: Words, timed: str = "here") -> Plan:
    """The plan of words. Without a host_loop_s it is timed, if this machine has the GPU.

    timed: where the given one was, for the plan's note

    Raises the errors of `fp8plan.plan`.
    """
    own = dict(words[PlanRequest])
    if "host_loop_s" not in own and find_gpu(own["gpu"]).is_here:
        own["host_loop_s"] = host_loop_s()
    if "workload" not in own:
        own["workload"] = Workload(**words[Workload])
    plan = predict(PlanRequest.of({**words, PlanRequest: own})).plan
    loop_s = own.get("host_loop_s")
    return plan if loop_s is None else replace(plan, warnings=(*plan.warnings, said(loop_s, timed)))
