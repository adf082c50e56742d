"""Planning: list precisions and layouts, predict each, choose within the risk budget, and explain the choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fp8plan.errors import ProfileError
from fp8plan.model.attention_backend import TRITON_NAMED
from fp8plan.model.memory.plan import check_share
from fp8plan.model.plan.anchor import anchored
from fp8plan.model.plan.candidates import Candidate, candidates, evaluated, ruled_out
from fp8plan.model.plan.choice import Answer, as_choices, baseline_of, choose
from fp8plan.model.plan.explain import explain
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.request import PlanRequest, of_fields
from fp8plan.model.plan.scene import Lever, Scene
from fp8plan.model.plan.turn_levers import turn_levers
from fp8plan.model.plan.turn_sentences import lever_sentences
from fp8plan.model.plan.ways import way_of
from fp8plan.model.profile.library import NO_BLOCKS, load_profile, with_kernels
from fp8plan.model.profile.profile import HOST_LOOP, Profile
from fp8plan.model.risk.expected import THRESHOLD, recommended_tis
from fp8plan.model.rollout import Rollout
from fp8plan.model.validate.records import Record, host_of
from fp8plan.model.workload import Batch, Workload
from fp8plan.version import version_warnings


@dataclass(frozen=True, slots=True)
class Prediction:
    """A Plan and the candidates behind it; `tried[i]` belongs to `plan.choices[i]`.

    request: the question
    profile: the one that they were predicted by
    levers:  those of a rollout of turns; empty for one turn, and before `priced`
    """

    plan: Plan
    tried: tuple[Candidate, ...]
    request: PlanRequest
    profile: Profile
    levers: tuple[Lever, ...] = ()

    @property
    def rollouts(self) -> tuple[Rollout | None, ...]:
        """None where unavailable."""
        return tuple(c.rollout for c in self.tried)

    @property
    def chosen(self) -> Candidate:
        """The plan's choice."""
        return self.tried[self.plan.chosen]


@of_fields(PlanRequest)
def plan(request: PlanRequest) -> Plan:
    """Predict every rollout precision for a workload, and choose one.

    The arguments are the fields of PlanRequest.

    Raises ConfigError for bad or contradictory input, CapacityError if no choice fits the GPU, ProfileError if there
    is no profile that may be used.
    """
    return predict(request).plan


def predict(request: PlanRequest) -> Prediction:
    """The Plan of a request, with the rollouts behind it. Raises as `plan` does."""
    return priced(unpriced(request))


def priced(made: Prediction) -> Prediction:
    """A prediction with the levers of its turns, and the sentences on them; itself if it has one turn."""
    chosen, plan = made.chosen, made.plan
    if chosen.timed.turns is None:
        return made
    scene = Scene.of(chosen, made.request, made.profile)
    levers = tuple(turn_levers(scene))
    answer = Answer(plan.choices, plan.chosen, made.rollouts, made.profile)
    reasons = (*plan.reasons, *lever_sentences(answer, scene, levers))
    return replace(made, plan=replace(plan, reasons=reasons), levers=levers)


def unpriced(request: PlanRequest) -> Prediction:
    """The prediction of a request, without the levers of turns and the sentences on them."""
    card, limits, budget = request.card, request.engine, request.risk_budget
    risky = check_share(card, limits)
    alone, warnings = _profile(request)
    anchor = anchored(alone, request.shape, request.vllm, request.observed) if request.observed else None
    used = anchor.applied(alone) if anchor else alone
    layouts = candidates(request)
    warnings += _engine_warnings(request, layouts)
    tried = evaluated(layouts, request, used)
    rollouts = tuple(c.rollout for c in tried)
    kernels = {name.rpartition(".")[0] for rollout in rollouts if rollout for name in rollout.log_gradient}
    used = with_kernels(used, card, kernels)  # as the candidates' cost models had them
    seen = [record.limits for record in request.observed if _bf16_of(record, request)]
    baseline, chosen = baseline_of(tried, seen), choose(tried, budget)
    best = tried[chosen]
    for index in ruled_out(tried, chosen, budget):
        tried[index] = replace(tried[index], way=way_of(tried[index], request, used))
    choices = as_choices(tried, used, best.setup.limits.max_num_seqs, baseline)
    bound, corrections = recommended_tis(best.expected, request.batch.responses, budget=budget)
    answer = Answer(choices, chosen, rollouts, used, budget, baseline, observed=bool(seen))
    reasons = explain(answer, best.expected, corrections, request, tried)
    planned = Plan(
        model=best.setup.path,
        gpu=card.name,
        profile={"kind": used.kind, "engine_version": used.engine_version, "source": used.source},
        limits=best.setup.limits.settled(),
        workload=_describe(request.workload, request.batch),
        seed=request.workload.seed,
        choices=choices,
        chosen=chosen,
        baseline=baseline,
        thresholds={THRESHOLD: bound},
        reasons=(*reasons, *(anchor.sentences(alone, answer) if anchor else ())),
        warnings=(
            *version_warnings(request.vllm),
            *warnings,
            *risky,
            *best.setup.lowered_from(limits.derived(card)),
        ),
        budget=budget,
        remedies=request.remedies,
        kv_scales="calibrated" if request.measures_scales else "unit",
        anchor=anchor,
        inside=request.caller,
        engine_version=request.vllm,
    )
    return Prediction(planned, tuple(tried), request, used)


def _profile(request: PlanRequest) -> tuple[Profile, list[str]]:
    """The profile of the request's GPU on its host, before any correction, and warnings."""
    if request.profile is None:
        profile, warnings = load_profile(request.card, request.vllm, request.strict)
    else:
        profile, warnings = request.profile, []
    warnings = [*warnings, *_not_measured(request, profile)]
    loop_s = request.host_loop_s
    if loop_s is None and request.observed:
        loop_s = host_of(request.observed, request.card.name)
    profile = profile.on_host(loop_s)
    if loop_s is not None and HOST_LOOP not in profile.coefficients:
        warnings.append(f"the host of the profile of {profile.gpu} was not timed, so that host_loop_s changes nothing")
    return profile, warnings


def _not_measured(request: PlanRequest, profile: Profile) -> list[str]:
    """A warning if the model is an FP8 checkpoint whose GEMMs the profile did not measure; ProfileError if strict."""
    stored = request.shape.stored
    if stored is None or stored.weights == "fp8_block" or any(x.startswith(NO_BLOCKS) for x in profile.coefficients):
        return []
    fact = f"no GEMM of {stored.label} was measured on {profile.gpu}"
    if request.strict:
        raise ProfileError(f"{fact}, and --strict allows nothing else; leave it out, or plan a checkpoint in blocks")
    return [f"{fact}: its time follows AIConfigurator's timings of vLLM's kernel on this or another GPU, not our own"]


def _engine_warnings(request: PlanRequest, layouts: Sequence[Candidate]) -> list[str]:
    """Warnings about the engines: scales that stay, a kernel that is named, and launches without CUDA graphs."""
    warnings = []
    if any(c.setup.precision.kv == "fp8" and c.memory for c in layouts):
        if request.fixed_scales:
            warnings.append(f"K and V scales of an FP8 KV cache are taken to stay at 1.0: {request.fixed_scales}")
        if request.names_triton:
            warnings.append(TRITON_NAMED)
    if request.engine.enforce_eager and not request.card.is_cpu:
        warnings.append("enforce_eager: engines without CUDA graphs were not measured; their launches are assumed")
    return warnings


def _bf16_of(record: Record, request: PlanRequest) -> bool:
    """True for a measured rollout of the request's model on its GPU in BF16."""
    setup = record.setup
    return setup.precision.name == "bf16" and setup.gpu == request.card and setup.shape.is_like(request.shape)


def _describe(workload: Workload, batch: Batch) -> dict[str, Any]:
    described = workload.describe()
    if batch.turns is not None:
        described["mean_turn_tokens"] = float(np.mean(batch.turns.generated))
    return {
        **described,
        "mean_response_tokens": float(np.mean(batch.responses)),
        "longest_response_tokens": int(batch.responses.max()),
        "response_tokens": int(batch.responses.sum()),
    }
