"""Enumerate precisions and layouts -> predict each -> choose within the risk budget -> explain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import numpy as np

from fp8plan.checks import whole
from fp8plan.errors import CapacityError, ConfigError, Fp8PlanError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.cost.step import StepModel
from fp8plan.model.hardware import Gpu
from fp8plan.model.hardware import gpu as find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory import MemoryPlan, check_pool, memory_plan
from fp8plan.model.plan.explain import explain
from fp8plan.model.plan.plan import Choice, Plan
from fp8plan.model.precision import PRESETS, Precision
from fp8plan.model.precision import precision as find_precision
from fp8plan.model.profile.library import load_profile
from fp8plan.model.profile.profile import Profile
from fp8plan.model.risk.budget import LEAST_GAIN
from fp8plan.model.risk.expected import MismatchRisk, RiskBudget, mismatch_risk, recommended_thresholds
from fp8plan.model.rl_step import Trainer, weight_sync_seconds
from fp8plan.model.rollout import Rollout, rollout, schedules, speedup_interval
from fp8plan.model.schedule.scheduler import Schedule
from fp8plan.model.shards import check_target, refusals, why_not_shardable
from fp8plan.model.workload import Batch, Workload

# Responses, over all candidates, from which on processes of their own pay: half a second of work.
WORTH_PROCESSES = 40_000

T = TypeVar("T")


def _silent(items: Iterable[T]) -> Iterable[T]:
    return items


@dataclass(frozen=True, slots=True)
class Problem:
    """What is the same for every candidate."""

    shape: ModelShape
    gpu: Gpu
    batch: Batch
    profile: Profile
    trainer: Trainer | None
    budget: RiskBudget
    kv_scales_calibrated: bool


@dataclass(frozen=True, slots=True)
class Candidate:
    """One precision on one layout: what is predicted of it, or why it cannot run."""

    precision: Precision
    limits: EngineLimits
    reason: str | None = None
    unfit: bool = False  # the reason is that memory is too small
    memory: MemoryPlan | None = None
    rollout: Rollout | None = None
    risk: MismatchRisk | None = None
    unit_risk: MismatchRisk | None = None  # with K and V scales left at 1.0; None without an FP8 KV cache
    step_s: float | None = None  # of the whole RL step; None without trainer figures
    measured: bool = True  # a rollout on this tensor_parallel_size is behind the profile

    @property
    def seconds(self) -> float:
        """What is minimised."""
        return _timed(self).makespan_s if self.step_s is None else self.step_s

    @property
    def low(self) -> float:
        """The lower end of its 90% interval: of an RL step only the rollout is uncertain here."""
        return self.seconds - _timed(self).makespan_s + _timed(self).makespan_low_s

    @property
    def high(self) -> float:
        return self.seconds - _timed(self).makespan_s + _timed(self).makespan_high_s


@dataclass(frozen=True, slots=True)
class Prediction:
    """A Plan and the rollouts behind it; `rollouts[i]` belongs to `plan.choices[i]`, None where unavailable."""

    plan: Plan
    rollouts: tuple[Rollout | None, ...]
    pools: tuple[int | None, ...]  # KV blocks the scheduler can hand out

    @property
    def warnings(self) -> tuple[str, ...]:
        """The plan's."""
        return self.plan.warnings


def plan(
    model: ModelShape | str,
    gpu: Gpu | str,
    workload: Workload,
    *,
    limits: EngineLimits | None = None,
    gpus: int | None = None,
    gpus_per_node: int | None = None,
    target: str = "vllm",
    precisions: Sequence[str] | None = None,
    trainer: Trainer | None = None,
    budget: RiskBudget | None = None,
    kv_scales_calibrated: bool = True,
    engine_version: str = "0.26.0",
    strict: bool = False,
    profile: Profile | None = None,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = _silent,
    workers: int = 1,
) -> Plan:
    """Predict every rollout precision for a workload, and choose one: the Plan of `predict`.

    model:          a ModelShape, a hub id, or a folder with config.json
    gpu:            a Gpu or its name; "auto" asks the driver
    limits:         of each engine; None: vLLM's own defaults for this GPU
    gpus:           GPUs in all; every tensor-parallel size that divides them, a node and the model is tried, the rest
                    are replicas. None: the layout in `limits` only
    gpus_per_node:  GPUs that reach each other without the network; None: what is usual for this GPU
    target:         who starts the engines, "vllm", "verl" or "trl": each cuts FP8 weights in its own way
    precisions:     preset names; None: all, and those this GPU cannot run are listed as unavailable
    trainer:        the other parts of an RL step; None: only the rollout is compared
    budget:         the highest mismatch risk that may be chosen
    kv_scales_calibrated: the K and V scales of FP8 KV follow the weights after each sync; False: they stay 1.0
    engine_version: of vLLM
    strict:         refuse a profile of another engine version
    profile:        use this one instead of the best that is found
    progress:       wraps the candidates while they are predicted, as tqdm does
    workers:        processes that predict the layouts of a large batch; they are forked, so leave it 1 beside threads

    Raises ConfigError for bad or contradictory input, CapacityError if no choice fits the GPU, ProfileError if there
    is no profile that may be used.
    """
    return predict(
        model,
        gpu,
        workload,
        limits=limits,
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        target=target,
        precisions=precisions,
        trainer=trainer,
        budget=budget,
        kv_scales_calibrated=kv_scales_calibrated,
        engine_version=engine_version,
        strict=strict,
        profile=profile,
        progress=progress,
        workers=workers,
    ).plan


def predict(
    model: ModelShape | str,
    gpu: Gpu | str,
    workload: Workload,
    *,
    limits: EngineLimits | None = None,
    gpus: int | None = None,
    gpus_per_node: int | None = None,
    target: str = "vllm",
    precisions: Sequence[str] | None = None,
    trainer: Trainer | None = None,
    budget: RiskBudget | None = None,
    kv_scales_calibrated: bool = True,
    engine_version: str = "0.26.0",
    strict: bool = False,
    profile: Profile | None = None,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = _silent,
    workers: int = 1,
) -> Prediction:
    """What `plan` does, with the rollouts behind the Plan. Takes and raises the same."""
    _check_kinds(locals())
    shape = model if isinstance(model, ModelShape) else ModelShape.from_hf(model)
    card = gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
    card = card if gpus_per_node is None else replace(card, gpus_per_node=gpus_per_node)
    check_target(target)
    batch = workload.batch()
    longest = workload.prompt_lengths.longest + workload.response_lengths.longest
    limits = (limits or EngineLimits.for_gpu(card)).holding(longest)
    shape.check_max_model_len(limits.max_model_len or longest)
    budget = budget or RiskBudget()
    used, warnings = (profile, []) if profile else load_profile(card, engine_version, strict)
    candidates = [
        _place(shape, Candidate(wanted, layout), card, len(batch.prompts), target, explicit=precisions is not None)
        for layout in _layouts(shape, limits, gpus, card)
        for wanted in _precisions(precisions)
    ]
    if all(c.memory is None for c in candidates):
        raise _nothing_runs(candidates)
    problem = Problem(shape, card, batch, used, trainer, budget, kv_scales_calibrated)
    predicted = _predict_all(candidates, problem, progress, workers)
    choices = tuple(_choice(c, _baseline(c, predicted), problem) for c in predicted)
    chosen = choose(predicted, budget)
    best = predicted[chosen]
    advice = recommended_thresholds(_risk(best), batch.responses, budget=budget)
    answer = Plan(
        model=_loadable_name(shape),
        gpu=card.name,
        profile={"kind": used.kind, "engine_version": used.engine_version, "source": used.source},
        limits=best.limits,
        workload=_describe(workload, batch),
        seed=workload.seed,
        choices=choices,
        chosen=chosen,
        thresholds=advice.thresholds,
        reasons=explain(
            choices,
            chosen,
            _timed(best),
            _risk(best),
            advice,
            budget,
            used,
            whole_step=trainer is not None,
            gpus_per_node=card.gpus_per_node,
        ),
        warnings=tuple(warnings),
        budget=budget,
        kv_scales="calibrated" if kv_scales_calibrated else "unit",
    )
    return Prediction(
        answer,
        tuple(c.rollout for c in predicted),
        tuple(c.memory.usable_blocks if c.memory else None for c in predicted),
    )


_KINDS: dict[str, tuple[type, ...]] = {
    "gpu": (Gpu, str),
    "workload": (Workload,),
    "limits": (EngineLimits, NoneType),
    "trainer": (Trainer, NoneType),
    "budget": (RiskBudget, NoneType),
    "kv_scales_calibrated": (bool,),
    "engine_version": (str,),
    "strict": (bool,),
    "profile": (Profile, NoneType),
}


def _check_kinds(arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError for an argument that is another kind of thing: "unit" would be true for a bool."""
    for name, kinds in _KINDS.items():
        value = arguments[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            allowed = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
            raise ConfigError(f"{name} is {value!r}; allowed: {allowed}")
    for name in ("gpus", "gpus_per_node"):
        if arguments[name] is not None:
            whole(name, arguments[name], otherwise=", or None")
    names = arguments["precisions"]
    if not (names is None or (isinstance(names, Sequence) and all(isinstance(name, str) for name in names))):
        raise ConfigError(f"precisions is {names!r}; allowed: some of {', '.join(PRESETS)}, or None for all")


def _loadable_name(shape: ModelShape) -> str:
    """What an engine is given to load it: its folder if it came from one, else its hub id."""
    config = Path(shape.source)
    return str(config.parent.resolve()) if config.is_file() else shape.name


def choose(candidates: Sequence[Candidate], budget: RiskBudget) -> int:
    """Index of the fastest candidate whose risk the budget accepts; of those within LEAST_GAIN of it, the one with
    the lowest KL. If the budget accepts none, the one with the lowest KL.

    Layouts that no measurement has seen stand back, unless the fastest candidate's interval ends before that of any
    measured layout begins.
    """
    runnable = [i for i, c in enumerate(candidates) if c.rollout is not None]
    accepted = [i for i in runnable if budget.accepts(_risk(candidates[i]).level)]
    compared = _measured_first(candidates, accepted or runnable)
    fastest = min(candidates[i].seconds for i in compared)
    close = [i for i in compared if candidates[i].seconds <= fastest * (1 + LEAST_GAIN)]
    return min(close if accepted else compared, key=lambda i: (_risk(candidates[i]).kl_k3, candidates[i].seconds))


def _measured_first(candidates: Sequence[Candidate], compared: list[int]) -> list[int]:
    """Of `compared`, those on measured layouts, if the best of them may be as fast as the fastest."""
    measured = [i for i in compared if candidates[i].measured]
    if not measured:
        return compared
    fastest = min((candidates[i] for i in compared), key=lambda c: c.seconds)
    return measured if min(candidates[i].low for i in measured) <= fastest.high else compared


def _layouts(shape: ModelShape, limits: EngineLimits, gpus: int | None, gpu: Gpu) -> list[EngineLimits]:
    if gpus is None:
        shape.check_tensor_parallel(limits.tensor_parallel_size)
        return [limits.on(gpu)]
    within = min(gpus, gpu.gpus_per_node)
    sizes = [tp for tp in shape.allowed_tensor_parallel(within) if gpus % tp == 0 and within % tp == 0]
    return [replace(limits, tensor_parallel_size=tp, data_parallel_size=gpus // tp).on(gpu) for tp in sizes]


def _precisions(names: Sequence[str] | None) -> list[Precision]:
    if names is None:
        return list(PRESETS.values())
    found = [find_precision(name) for name in dict.fromkeys([names] if isinstance(names, str) else names)]
    if not found:
        raise ConfigError(f"precisions is []; allowed: some of {', '.join(PRESETS)}, or None for all")
    return found


def _place(shape: ModelShape, candidate: Candidate, gpu: Gpu, requests: int, target: str, explicit: bool) -> Candidate:
    """With its memory plan, or the reason why it cannot run."""
    if reason := gpu.why_not(candidate.precision):
        if explicit:
            raise ConfigError(f"{candidate.precision.name} was asked for: {reason}; use bf16, or another GPU")
        return replace(candidate, reason=reason)
    limits = candidate.limits
    if reason := _idle(limits, requests) or why_not_shardable(
        shape, candidate.precision, limits.tensor_parallel_size, target
    ):
        return replace(candidate, reason=reason)
    try:
        memory = memory_plan(shape, candidate.precision, gpu, limits)
        check_pool(memory, gpu, limits)
        return replace(candidate, memory=memory)
    except CapacityError as error:
        return replace(candidate, reason=str(error), unfit=True)


def _idle(limits: EngineLimits, requests: int) -> str | None:
    """Why so many replicas make no sense."""
    replicas = limits.data_parallel_size
    if replicas <= requests:
        return None
    return (
        f"{replicas} replicas for {requests} requests leave {replicas - requests} without any; allowed: at most "
        f"{requests} replicas (data_parallel_size; of --gpus what tensor parallelism leaves)"
    )


def _nothing_runs(candidates: Sequence[Candidate]) -> Fp8PlanError:
    """The error for candidates that all have a reason why not."""
    unfit = [c for c in candidates if c.unfit]
    return CapacityError(unfit[0].reason) if unfit else ConfigError(candidates[0].reason)


def _predict_all(
    candidates: Sequence[Candidate],
    problem: Problem,
    progress: Callable[[Iterable[Any]], Iterable[Any]],
    workers: int,
) -> list[Candidate]:
    """Candidates with as many replicas share their schedules; such groups go to `workers` processes if there is so
    much to do that starting those pays. Most replicas is most work, so that group starts first."""
    done = list(candidates)
    order = sorted(
        (-c.limits.data_parallel_size, -c.memory.usable_blocks, i) for i, c in enumerate(candidates) if c.memory
    )
    groups = [[candidates[i] for *_, i in group] for _, group in groupby(order, key=lambda key: key[0])]
    if len(order) * len(problem.batch.prompts) < WORTH_PROCESSES:
        workers = 1
    wanted = dict.fromkeys(candidates[i].precision for *_, i in order)
    risks = {precision: _expected_mismatch(precision, problem) for precision in wanted}  # the layout does not matter
    with _mapper(min(workers, len(groups))) as map_groups:
        predicted = chain.from_iterable(map_groups(partial(_predict_group, problem=problem), groups))
        for (*_, i), candidate in zip(progress(order), predicted, strict=True):
            risk, unit_risk = risks[candidate.precision]
            done[i] = replace(candidate, risk=risk, unit_risk=unit_risk)
    return done


@contextmanager
def _mapper(workers: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """`map`, in so many processes. They are forked, so that a caller's script needs no guard against being imported."""
    if workers > 1:
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor
    if workers < 2 or "fork" not in multiprocessing.get_all_start_methods():
        yield map
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        yield pool.map


def _predict_group(candidates: Sequence[Candidate], problem: Problem) -> list[Candidate]:
    """Candidates with as many replicas, from the largest KV pool down: a schedule is taken over where it holds."""
    parts = problem.batch.split(candidates[0].limits.data_parallel_size)
    known: list[Schedule] | None = None
    predicted = []
    for candidate in candidates:
        assert candidate.memory is not None
        known = schedules(parts, candidate.memory.usable_blocks, candidate.limits, known)
        predicted.append(_predict(candidate, known, problem))
    return predicted


def _predict(candidate: Candidate, plans: Sequence[Schedule], problem: Problem) -> Candidate:
    """With its rollout, and the RL step around it."""
    model = StepModel(problem.shape, problem.gpu, candidate.precision, candidate.limits, problem.profile)
    timed = rollout(plans, model)
    step_s = None
    if problem.trainer is not None:
        tokens = int((problem.batch.prompts + problem.batch.responses).sum())
        sync = weight_sync_seconds(model, problem.trainer, problem.kv_scales_calibrated)
        step_s = timed.makespan_s + problem.trainer.seconds(tokens) + sum(sync.values())
    measured = problem.profile.has_measured(candidate.limits.tensor_parallel_size)
    return replace(candidate, rollout=timed, step_s=step_s, measured=measured)


def _expected_mismatch(precision: Precision, problem: Problem) -> tuple[MismatchRisk, MismatchRisk | None]:
    """A Candidate's `risk`, and its `unit_risk` with an FP8 KV cache."""

    def at(calibrated: bool) -> MismatchRisk:
        return mismatch_risk(
            problem.shape,
            precision,
            problem.batch.responses,
            e8m0=problem.gpu.e8m0_scales,
            kv_scales_calibrated=calibrated,
            budget=problem.budget,
        )

    risk = at(problem.kv_scales_calibrated)
    if precision.kv != "fp8":
        return risk, None
    return risk, at(False) if problem.kv_scales_calibrated else risk


def _timed(candidate: Candidate) -> Rollout:
    assert candidate.rollout is not None
    return candidate.rollout


def _risk(candidate: Candidate) -> MismatchRisk:
    assert candidate.risk is not None
    return candidate.risk


def _baseline(candidate: Candidate, predicted: Sequence[Candidate]) -> Candidate | None:
    """BF16 under the same limits."""
    for other in predicted:
        if other.precision.name == "bf16" and other.limits == candidate.limits and other.rollout is not None:
            return other
    return None


def _choice(candidate: Candidate, baseline: Candidate | None, problem: Problem) -> Choice:
    timed, risk, memory = candidate.rollout, candidate.risk, candidate.memory
    size = candidate.limits.tensor_parallel_size
    where: dict[str, Any] = {
        "precision": candidate.precision.name,
        "tensor_parallel": size,
        "data_parallel": candidate.limits.data_parallel_size,
    }
    if timed is None or risk is None or memory is None:
        known = where | {"available": False, "reason": candidate.reason, "refused_by": {}}
        missing: dict[str, Any] = dict.fromkeys(set(Choice.__slots__) - set(known))
        return Choice(**known, **missing)
    speedup = low = high = step_speedup = None
    if baseline is not None and baseline.rollout is not None:
        speedup = baseline.rollout.makespan_s / timed.makespan_s
        low, high = speedup_interval(baseline.rollout, timed, problem.profile, size)
        step_speedup = baseline.step_s / candidate.step_s if baseline.step_s and candidate.step_s else None
    return Choice(
        **where,
        available=True,
        reason=None,
        makespan_s=timed.makespan_s,
        makespan_low_s=timed.makespan_low_s,
        makespan_high_s=timed.makespan_high_s,
        output_tokens_per_s=timed.output_tokens_per_s,
        speedup=speedup,
        speedup_low=low,
        speedup_high=high,
        rl_step_s=candidate.step_s,
        step_speedup=step_speedup,
        kv_cache_tokens=memory.kv_cache_tokens,
        preemptions=timed.preemptions,
        tail_fraction=timed.tail_fraction,
        kl_k3=risk.kl_k3,
        kl_k3_low=risk.kl_k3_low,
        kl_k3_high=risk.kl_k3_high,
        ess_raw=risk.ess_raw,
        clip_fraction=risk.clip_fraction,
        seq_reject_fraction=risk.seq_reject_fraction,
        risk=risk.level,
        unit_kv_scales=_unit_kv_scales(candidate.unit_risk),
        extrapolated=bool(timed.extrapolated) or problem.profile.layout_error(size) > 0,
        refused_by=refusals(problem.shape, candidate.precision, size),
    )


def _unit_kv_scales(risk: MismatchRisk | None) -> dict[str, Any] | None:
    if risk is None:
        return None
    return {"kl_k3": risk.kl_k3, "kl_k3_low": risk.kl_k3_low, "kl_k3_high": risk.kl_k3_high, "risk": risk.level}


def _describe(workload: Workload, batch: Batch) -> dict[str, Any]:
    return {
        "prompts": workload.prompts,
        "samples": workload.samples_per_prompt,
        "prompt_lengths": workload.prompt_lengths.describe(),
        "response_lengths": workload.response_lengths.describe(),
        "max_prompt_tokens": workload.prompt_lengths.longest,
        "max_response_tokens": workload.response_lengths.longest,
        "mean_response_tokens": float(np.mean(batch.responses)),
        "longest_response_tokens": int(batch.responses.max()),
        "response_tokens": int(batch.responses.sum()),
    }
