"""Planning: list precisions and layouts, predict each, choose within the risk budget, and explain the choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from inspect import signature
from pathlib import Path
from types import NoneType
from typing import Any, ParamSpec

import numpy as np

from fp8plan.checks import whole
from fp8plan.errors import ConfigError, ProfileError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.attention_backend import TRITON_NAMED, Backend, named_backend, why_fixed_kv_scales
from fp8plan.model.cost.host import OWN
from fp8plan.model.hardware import Gpu, find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.plan import check_share
from fp8plan.model.plan.anchor import alike, anchored, changes_of, host_of
from fp8plan.model.plan.candidates import Candidate, Problem, Progress, candidates, evaluated
from fp8plan.model.plan.choice import as_choices, baseline_of, choose
from fp8plan.model.plan.explain import explain
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.syncs import sync_sentences
from fp8plan.model.precision import FP8_KV, PRESETS
from fp8plan.model.profile.library import NO_BLOCKS, load_profile, with_kernels
from fp8plan.model.profile.profile import HOST_LOOP, Profile
from fp8plan.model.risk.expected import LEAST_GAIN, RiskBudget, recommended_thresholds
from fp8plan.model.rl_step import DEFAULT_LINK, SENDERS, StepTimes, WeightSync
from fp8plan.model.rollout import Rollout
from fp8plan.model.setup import check_inside
from fp8plan.model.shards import check_target
from fp8plan.model.validate.records import Record
from fp8plan.model.weight_changes import TopK
from fp8plan.model.weights import sampled
from fp8plan.model.workload import Batch, Workload
from fp8plan.version import planned_version, version_warnings

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Prediction:
    """A Plan and the candidates behind it; `tried[i]` belongs to `plan.choices[i]`."""

    plan: Plan
    tried: tuple[Candidate, ...]
    problem: Problem  # with the profile that they used

    @property
    def rollouts(self) -> tuple[Rollout | None, ...]:
        """None where unavailable."""
        return tuple(c.rollout for c in self.tried)

    @property
    def pools(self) -> tuple[int | None, ...]:
        """KV blocks the scheduler can hand out."""
        return tuple(c.memory.usable_blocks if c.memory else None for c in self.tried)

    @property
    def chosen(self) -> Candidate:
        """The plan's choice."""
        return self.tried[self.plan.chosen]


def predict(
    model: ModelShape | str,
    gpu: Gpu | str,
    workload: Workload,
    *,
    limits: EngineLimits | None = None,
    gpus: int | None = None,
    gpus_per_node: int | None = None,
    target: str = "vllm",
    inside: str | None = None,
    precisions: Sequence[str] | None = None,
    trainer: StepTimes | None = None,
    link: str | None = None,
    learning_rate: float | None = None,
    optimizer: str | None = None,
    top_k: TopK | None = None,
    budget: RiskBudget | None = None,
    kv_scales_calibrated: bool = True,
    engine_version: str | None = None,
    strict: bool = False,
    profile: Profile | None = None,
    host_loop_s: float | None = None,
    observed: Sequence[Record] = (),
    progress: Progress = iter,
    workers: int = 1,
) -> Prediction:
    """Predict every rollout precision for a workload, and choose one.

    model:          a ModelShape, a hub id, or a folder with config.json
    gpu:            a Gpu or its name; "auto" asks the driver
    limits:         limits of each engine. One that is not set takes vLLM's default for this GPU and model
    gpus:           GPUs in all. Every tensor-parallel size that divides them, a node and the model is tried, for MoE
                    models with expert parallelism too; the rest are replicas. None: the layout in `limits`
    gpus_per_node:  GPUs that reach each other without the network; None: the usual number for this GPU
    target:         the program that starts the engines, "vllm", "verl" or "trl". Each cuts FP8 weights in its own way
    inside:         the program that calls the engines, one of fp8plan.model.cost.host.INSIDE. None: the target's;
                    for trl "server" if an engine may have several GPUs, else "trl"
    precisions:     preset names; None: all, and those that this GPU cannot run are listed as unavailable
    trainer:        the other parts of an RL step; None: only the rollout is compared
    link:           bandwidth of a weight sync to one engine GPU, such as "25Gb/s" or "3GB/s"; None: 400Gb/s
    learning_rate:  predicts the bytes of a sync that sends only what has changed. The RL step takes the fastest mode,
                    and the reasons name it. Without effect where verl or TRL sends. None: syncs send all of BF16
    optimizer:      with it, one of fp8plan.model.weight_changes.OPTIMIZERS; None: adamw
    top_k:          with it, also a sparse sync, which is not lossless; None: all modes are
    budget:         the highest mismatch risk that may be chosen
    kv_scales_calibrated: K and V scales of FP8 KV are measured after each sync. False: they stay at 1.0, as in engines
                    that keep the scales they started with (EngineSetup.why_fixed_kv_scales)
    engine_version: version of vLLM; None: that of `version.default_version`
    strict:         refuse a profile of another engine version
    profile:        used instead of the best known one
    host_loop_s:    speed of the engine's host, which `fp8plan doctor --host` measures there, in seconds as in
                    RolloutRecord; None: that of the observed rollouts, else not known: as on the hosts that were seen,
                    with a wide error
    observed:       rollouts that were measured on this machine, which correct the profile (`read_records`). With
                    `delta_bytes` they correct the bytes of a delta
    progress:       wraps the candidates while they are predicted, as tqdm does
    workers:        processes for the layouts of a large batch. They are forked: leave it at 1 beside threads

    `plan` returns the Plan, `predict` a Prediction, which also has the rollouts behind it.

    Raises ConfigError for bad or contradictory input, CapacityError if no choice fits the GPU, ProfileError if there
    is no profile that may be used.
    """
    _check_kinds(locals())
    check_target(target)
    sync = _sync(trainer, link, learning_rate, optimizer, top_k)
    shape = model if isinstance(model, ModelShape) else ModelShape.from_hf(model)
    most_gpus = gpus or (limits or EngineLimits()).tensor_parallel_size
    inside = check_inside(_calls(target, most_gpus) if inside is None else inside)
    if sync is not None:
        sync = replace(sync, sender=SENDERS[inside if target == "vllm" else target])
    if sync is not None and learning_rate is not None:
        if top_k is not None and sync.sender is not None:
            raise ConfigError(f"top_k is {top_k}, and {sync.sender}'s own sync sends no patches; leave one of them out")
        folder = Path(shape.source).parent
        weights = sampled(folder) if Path(shape.source).is_file() else {}
        sync = replace(sync, weights=weights)
        sync = replace(sync, measured=changes_of(observed, shape, sync))
    card = gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
    card = card if gpus_per_node is None else replace(card, gpus_per_node=gpus_per_node)
    engine_version = planned_version(engine_version, card.is_cpu)
    batch = workload.batch()
    longest = workload.prompt_lengths.longest + workload.longest_response
    limits = (limits or EngineLimits.for_gpu(card, shape.recurrent)).holding(longest)
    shape.check_max_model_len(limits.max_model_len or longest, engine_version)
    budget, risky = budget or RiskBudget(), check_share(card, limits)
    used, warnings = (profile, []) if profile else load_profile(card, engine_version, strict)
    warnings = [*warnings, *_not_measured(shape, used, strict)]
    host_loop_s = host_of(observed, card.name) if host_loop_s is None else host_loop_s
    used = used.on_host(host_loop_s)
    if host_loop_s is not None and HOST_LOOP not in used.coefficients:
        warnings = [
            *warnings,
            f"the host of the profile of {used.gpu} was not timed, so that host_loop_s changes nothing",
        ]
    anchor = anchored(used, shape, engine_version, observed) if observed else None
    alone, used = used, anchor.applied(used) if anchor else used
    layouts = candidates(
        shape,
        card,
        limits,
        gpus=gpus,
        precisions=precisions,
        requests=len(batch.prompts),
        target=target,
        inside=inside,
        engine_version=engine_version,
    )
    fixed_scales = why_fixed_kv_scales(card, FP8_KV, shape)
    reads_fp8 = any(c.setup.precision.kv == "fp8" and c.memory for c in layouts)
    if reads_fp8 and fixed_scales:
        warnings = [*warnings, f"K and V scales of an FP8 KV cache are taken to stay at 1.0: {fixed_scales}"]
    if reads_fp8 and named_backend(card, FP8_KV, shape) == Backend.TRITON_ATTN:
        warnings = [*warnings, TRITON_NAMED]
    if limits.enforce_eager and not card.is_cpu:
        warnings = [
            *warnings,
            "enforce_eager: engines without CUDA graphs were not measured; their launches are assumed",
        ]
    kv_scales_calibrated = kv_scales_calibrated and fixed_scales is None
    problem = Problem(batch, used, trainer, sync, budget, kv_scales_calibrated)
    tried = evaluated(layouts, problem, progress, workers)
    rollouts = tuple(c.rollout for c in tried)
    kernels = {name.rpartition(".")[0] for rollout in rollouts if rollout for name in rollout.log_gradient}
    used = with_kernels(used, card, kernels)  # as the candidates' cost models had them
    seen = [record.limits for record in observed if _bf16_of(record, shape, card)]
    baseline, chosen = baseline_of(tried, seen), choose(tried, budget)
    best = tried[chosen]
    choices = as_choices(tried, used, best.setup.limits.max_num_seqs, baseline)
    advice = recommended_thresholds(best.expected, batch.responses, budget=budget)
    answer = Plan(
        model=best.setup.path,
        gpu=card.name,
        profile={"kind": used.kind, "engine_version": used.engine_version, "source": used.source},
        limits=best.setup.limits.settled(),
        workload=_describe(workload, batch),
        seed=workload.seed,
        choices=choices,
        chosen=chosen,
        baseline=baseline,
        thresholds=advice.thresholds,
        reasons=workload.turns.sentence()
        + explain(
            choices,
            chosen,
            rollouts,
            best.expected,
            advice,
            budget,
            used,
            gpus_per_node=card.gpus_per_node,
            shape=shape,
            baseline=baseline,
            observed=bool(seen),
        )
        + limits_matter(best)
        + (() if sync is None else sync_sentences(tried, best, sync))
        + (anchor.sentences(alone, used, choices, chosen, rollouts) if anchor else ()),
        warnings=(*version_warnings(engine_version), *warnings, *risky, *best.setup.lowered_from(limits.derived(card))),
        budget=budget,
        kv_scales="calibrated" if kv_scales_calibrated else "unit",
        anchor=anchor,
        inside=inside,
        engine_version=engine_version,
    )
    return Prediction(answer, tuple(tried), replace(problem, profile=used))


def limits_matter(chosen: Candidate) -> tuple[str, ...]:
    """A sentence that names `fp8plan tune`, if the limits cost the chosen candidate LEAST_GAIN of its time or more."""
    setup, rollout, costs = chosen.setup, chosen.timed, list[str]()
    largest, most = max(setup.cudagraph_sizes, default=0), rollout.timeline.decode_requests.max(initial=0)
    if 0 < largest < most and rollout.parts.get("host", 0.0) >= LEAST_GAIN:
        costs.append(f"the GPU waits for the host in steps of more than {largest:,} requests, which have no CUDA graph")
    if rollout.recomputed_tokens >= LEAST_GAIN * rollout.output_tokens:
        costs.append(f"{rollout.preemptions:,} preemptions lose {rollout.recomputed_tokens:,} tokens of work")
    return (f"Other limits may be faster: {', and '.join(costs)}. fp8plan tune searches them.",) if costs else ()


def _sync(
    trainer: StepTimes | None,
    link: str | None,
    learning_rate: float | None,
    optimizer: str | None,
    top_k: TopK | None,
) -> WeightSync | None:
    """The sync of `predict`'s arguments, if anything depends on it. Raises ConfigError for one that changes nothing."""
    if link is not None and trainer is None and learning_rate is None:
        raise ConfigError(
            f"link is {link!r}, and there is neither a learning rate nor an RL step that a sync is part of; give "
            "--learning-rate 1e-6, or --train-s SECONDS --logprob-s SECONDS (learning_rate, or trainer)"
        )
    for name, value in {"optimizer": optimizer and repr(optimizer), "top_k": top_k}.items():
        if value is not None and learning_rate is None:
            raise ConfigError(f"{name} is {value} without a learning rate; give --learning-rate 1e-6, too")
    if trainer is None and learning_rate is None:
        return None
    return WeightSync(DEFAULT_LINK if link is None else link, learning_rate, optimizer or "adamw", top_k=top_k)


def _calls(target: str, gpus: int) -> str:
    """The program that calls the engines that `target` starts. gpus: at most so many for an engine"""
    by_target = {"vllm": OWN, "verl": "verl", "trl": "trl" if gpus == 1 else "server"}
    return by_target[target]


def _without_rollouts(predict: Callable[P, Prediction]) -> Callable[P, Plan]:
    """`predict` with the same parameters and documentation, which returns the Plan alone."""
    parameters = signature(predict)

    @wraps(predict, assigned=("__module__", "__doc__"))
    def plan(*args: P.args, **kwargs: P.kwargs) -> Plan:
        try:
            parameters.bind(*args, **kwargs)
        except TypeError as error:  # else it would name `predict`
            raise TypeError(f"plan() {error}") from None
        return predict(*args, **kwargs).plan

    plan.__qualname__ = "plan"
    plan.__signature__ = parameters.replace(return_annotation="Plan")  # type: ignore[attr-defined]
    return plan


plan = _without_rollouts(predict)


_KINDS: dict[str, tuple[type, ...]] = {
    "top_k": (TopK, NoneType),
    "gpu": (Gpu, str),
    "workload": (Workload,),
    "limits": (EngineLimits, NoneType),
    "trainer": (StepTimes, NoneType),
    "budget": (RiskBudget, NoneType),
    "kv_scales_calibrated": (bool,),
    "engine_version": (str, NoneType),
    "strict": (bool,),
    "profile": (Profile, NoneType),
}


def _check_kinds(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument of the wrong type: the text "unit" would count as True."""
    for name, kinds in _KINDS.items():
        value = arguments[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            allowed = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
            raise ConfigError(f"{name} is {value!r}; allowed: {allowed}")
    for name in ("gpus", "gpus_per_node"):
        if arguments[name] is not None:
            whole(name, arguments[name], otherwise=", or leave it out")
    names = arguments["precisions"]
    if not (names is None or (isinstance(names, Sequence) and all(isinstance(name, str) for name in names))):
        raise ConfigError(f"precisions is {names!r}; allowed: some of {', '.join(PRESETS)}, or None for all")


def _not_measured(shape: ModelShape, profile: Profile, strict: bool) -> list[str]:
    """A warning if the model is an FP8 checkpoint whose GEMMs the profile did not measure; ProfileError if strict."""
    stored = shape.stored
    if stored is None or stored.weights == "fp8_block" or any(x.startswith(NO_BLOCKS) for x in profile.coefficients):
        return []
    fact = f"no GEMM of {stored.label} was measured on {profile.gpu}"
    if strict:
        raise ProfileError(f"{fact}, and --strict allows nothing else; leave it out, or plan a checkpoint in blocks")
    return [f"{fact}: its time follows AIConfigurator's timings of vLLM's kernel on this or another GPU, not our own"]


def _bf16_of(record: Record, shape: ModelShape, card: Gpu) -> bool:
    """True for a measured rollout of this model on this GPU in BF16."""
    setup = record.setup
    return setup.precision.name == "bf16" and setup.gpu == card and alike(setup.shape, shape)


def _describe(workload: Workload, batch: Batch) -> dict[str, Any]:
    return {
        "prompts": workload.prompts,
        "samples": workload.samples_per_prompt,
        "prompt_lengths": workload.prompt_lengths.describe(),
        "response_lengths": workload.response_lengths.describe(),
        "max_prompt_tokens": workload.prompt_lengths.longest,
        "max_response_tokens": workload.longest_response,
        "mean_response_tokens": float(np.mean(batch.responses)),
        "longest_response_tokens": int(batch.responses.max()),
        "response_tokens": int(batch.responses.sum()),
        **workload.turns.describe(),
    }
