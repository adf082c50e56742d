"""The candidates of a plan: every precision on every layout, with the reasons why some of them cannot run.

The time and risk of every candidate, found in as many processes as pay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from typing import Any

from fp8plan.errors import CapacityError, ConfigError, Fp8PlanError
from fp8plan.model.architecture import Experts, Linear, ModelShape
from fp8plan.model.hardware import Gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import why_not_kept
from fp8plan.model.memory.plan import MemoryPlan, check_pool
from fp8plan.model.precision import PRESETS, Precision, presets_of
from fp8plan.model.precision import precision as find_precision
from fp8plan.model.profile.profile import Profile
from fp8plan.model.risk.expected import MismatchRisk, RiskBudget, mismatch_risk
from fp8plan.model.rl_step import StepTimes, weight_sync_seconds
from fp8plan.model.rollout import Rollout, simulate
from fp8plan.model.schedule.scheduler import Schedule
from fp8plan.model.setup import EngineSetup
from fp8plan.model.shards import why_not_shardable
from fp8plan.model.workload import Batch


@dataclass(frozen=True, slots=True)
class Candidate:
    """One precision on one layout, with what is predicted of it or the reason why it cannot run."""

    setup: EngineSetup
    reason: str | None = None
    unfit: bool = False  # the reason is that memory is too small
    memory: MemoryPlan | None = None
    rollout: Rollout | None = None
    extrapolated: bool = False
    risk: MismatchRisk | None = None
    unit_risk: MismatchRisk | None = None  # with K and V scales left at 1.0; None without an FP8 KV cache
    step_s: float | None = None  # of the whole RL step; None without trainer figures
    layout_doubt: float = 0.0  # Profile.layout_doubt of its layout

    @property
    def timed(self) -> Rollout:
        """The rollout of a candidate that can run."""
        assert self.rollout is not None
        return self.rollout

    @property
    def expected(self) -> MismatchRisk:
        """The mismatch risk of a candidate that can run."""
        assert self.risk is not None
        return self.risk

    @property
    def seconds(self) -> float:
        """Seconds of the RL step if the trainer's times are known, else of the rollout: the time that is minimised."""
        return self.timed.makespan_s if self.step_s is None else self.step_s

    @property
    def cautious_s(self) -> float:
        """`seconds`, with a rollout that is slower by what its layout is in doubt. The rest of an RL step is not."""
        return self.seconds + math.expm1(self.layout_doubt) * self.timed.makespan_s


def candidates(
    shape: ModelShape,
    gpu: Gpu,
    limits: EngineLimits,
    *,
    gpus: int | None,
    precisions: Sequence[str] | None,
    requests: int,
    target: str,
) -> list[Candidate]:
    """Every layout of `gpus` in every precision, each with its memory or the reason why it cannot run.

    Raises ConfigError for a precision that was asked for by name and that this GPU does not have, and the first reason
    if none of them can run.
    """
    found = [
        _placed(EngineSetup(shape, gpu, wanted, layout), requests, target, explicit=precisions is not None)
        for layout in _layouts(shape, limits, gpus, gpu)
        for wanted in _precisions(precisions, shape)
    ]
    if all(c.memory is None for c in found):
        raise _nothing_runs([c for c in found if shape.why_not(c.setup.precision) is None] or found)
    return found


def _layouts(shape: ModelShape, limits: EngineLimits, gpus: int | None, gpu: Gpu) -> list[EngineLimits]:
    if gpus is None:
        shape.check_tensor_parallel(limits.tensor_parallel_size, limits.enable_expert_parallel)
        return [limits.on(gpu)]
    within = min(gpus, gpu.gpus_per_node)
    cuts = [(tp, False) for tp in shape.allowed_tensor_parallel(within)]
    if shape.parts_of(Experts):
        cuts += [(tp, True) for tp in shape.allowed_tensor_parallel(within, expert_parallel=True) if tp > 1]
    even = sorted((tp, whole) for tp, whole in cuts if gpus % tp == 0 and within % tp == 0)
    return [
        replace(
            limits, tensor_parallel_size=tp, data_parallel_size=gpus // tp, enable_expert_parallel=whole_experts
        ).on(gpu)
        for tp, whole_experts in even
    ]


def _precisions(names: Sequence[str] | None, shape: ModelShape) -> list[Precision]:
    if names is None:
        stored = shape.stored.precisions if shape.stored is not None else presets_of("fp8_block")
        return [x for pair in zip(presets_of("bf16"), stored, strict=True) for x in pair]
    found = [find_precision(name) for name in dict.fromkeys([names] if isinstance(names, str) else names)]
    if not found:
        raise ConfigError(f"precisions is []; allowed: some of {', '.join(PRESETS)}, or None for all")
    return found


def _placed(setup: EngineSetup, requests: int, target: str, explicit: bool) -> Candidate:
    """The candidate with its memory, or with the reason why it cannot run."""
    if reason := setup.shape.why_not(setup.precision):
        if explicit:
            raise ConfigError(f"{setup.precision.name} was asked for: {reason}")
        return Candidate(setup, reason)
    if reason := setup.gpu.why_not(setup.precision):
        stored = setup.shape.stored
        instead = "use bf16" if stored is None else f"plan {stored.bf16_model}"
        if explicit:
            raise ConfigError(f"{setup.precision.name} was asked for: {reason}; {instead}, or another GPU")
        return Candidate(setup, reason if stored is None else f"{reason}; {instead}, or another GPU")
    size, whole_experts = setup.limits.cut
    shardable = why_not_shardable(setup.shape, setup.precision, size, target, whole_experts, setup.gpu)
    if reason := _idle(setup.limits, requests) or _no_fp8_kv(setup) or shardable:
        return Candidate(setup, reason)
    try:
        memory = setup.memory()
        check_pool(memory, setup.gpu, setup.limits)
        return Candidate(setup, memory=memory)
    except CapacityError as error:
        return Candidate(setup, str(error), unfit=True)


def _no_fp8_kv(setup: EngineSetup) -> str | None:
    """The reason why vLLM has no FP8 for what this model caches; None if it has, or is not asked for it."""
    gpu = setup.gpu
    reason = why_not_kept(setup.shape, setup.precision, gpu.is_cpu, gpu.compute_capability)
    known = [x for x in _precisions(None, setup.shape) if x.kv == "bf16" and setup.shape.why_not(x) is None]
    return reason and f"{reason}; allowed: {', '.join(x.name for x in known if gpu.why_not(x) is None)}"


def _idle(limits: EngineLimits, requests: int) -> str | None:
    """The reason why there are too many replicas for the requests; None if there are not."""
    replicas = limits.data_parallel_size
    if replicas <= requests:
        return None
    return (
        f"{replicas} replicas for {requests} requests leave {replicas - requests} without any; allowed: at most "
        f"{requests} replicas (data_parallel_size; of --gpus what tensor parallelism leaves)"
    )


def _nothing_runs(found: Sequence[Candidate]) -> Fp8PlanError:
    """The error for candidates that all have a reason why not."""
    unfit = [c for c in found if c.unfit]
    return CapacityError(unfit[0].reason) if unfit else ConfigError(found[0].reason)


Progress = Callable[[Iterable[Any]], Iterable[Any]]

# Responses, over all candidates, from which on processes of their own pay: half a second of work.
WORTH_PROCESSES = 40_000


@dataclass(frozen=True, slots=True)
class Problem:
    """The part of the question that is the same for every candidate."""

    batch: Batch
    profile: Profile
    times: StepTimes | None
    budget: RiskBudget
    kv_scales_calibrated: bool


def evaluated(candidates: Sequence[Candidate], problem: Problem, progress: Progress, workers: int) -> list[Candidate]:
    """The candidates, each that can run with its rollout, RL step and risk filled in.

    Candidates with the same number of replicas share their schedules, unless their KV pools starve. Such groups go to
    `workers` processes if there is enough work to pay for starting them. The group with the most replicas has the most
    work, so it starts first.
    """
    done = list(candidates)
    order = sorted(
        (-c.setup.limits.data_parallel_size, -c.memory.usable_blocks, i) for i, c in enumerate(candidates) if c.memory
    )
    groups = [[candidates[i] for *_, i in group] for _, group in groupby(order, key=lambda key: key[0])]
    if len(order) * len(problem.batch.prompts) < WORTH_PROCESSES:
        workers = 1
    if workers > 1:
        groups = [part for group in groups for part in _apart(group, problem.batch)]
    setups = {_risk_key(candidates[i].setup): candidates[i].setup for *_, i in order}
    risks = {key: _risks(setup, problem) for key, setup in setups.items()}
    workers = min(workers, len(groups))
    timed_group = _timed_group if workers < 2 else _timed_list
    with _mapper(workers) as map_groups:
        timed = chain.from_iterable(map_groups(partial(timed_group, problem=problem), groups))
        for (*_, i), candidate in zip(progress(order), timed, strict=True):
            risk, unit_risk = risks[_risk_key(candidate.setup)]
            done[i] = replace(candidate, risk=risk, unit_risk=unit_risk)
    return done


@contextmanager
def _mapper(workers: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """A `map` that uses `workers` processes. They are forked, so that a caller's script needs no guard against being
    imported.
    """
    if workers > 1:
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor
    if workers < 2 or "fork" not in multiprocessing.get_all_start_methods():
        yield map
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        yield pool.map


def _apart(group: list[Candidate], batch: Batch) -> list[list[Candidate]]:
    """A group from the largest KV pool down, cut so that each candidate whose pool starves stands alone.

    Schedules with preemptions hold for one pool only, so nothing is lost. A pool counts as starving if the requests
    that run at once, each halfway through its response, need more than it holds. The guess decides speed alone.
    """
    tokens = float((batch.prompts + batch.responses / 2).mean())

    def starves(candidate: Candidate) -> bool:
        limits, memory = candidate.setup.limits, candidate.memory
        running = min(limits.max_num_seqs, len(batch.prompts) / limits.data_parallel_size)
        return memory is not None and running * tokens > memory.pool_tokens

    ample = sum(not starves(candidate) for candidate in group)
    return [part for part in (group[:ample], *([candidate] for candidate in group[ample:])) if part]


def _timed_list(candidates: Sequence[Candidate], problem: Problem) -> list[Candidate]:
    """The candidates of `_timed_group` as a list, which another process can hand back."""
    return list(_timed_group(candidates, problem))


def _timed_group(candidates: Sequence[Candidate], problem: Problem) -> Iterator[Candidate]:
    """Time candidates with the same number of replicas, from the largest KV pool down. A schedule is reused where it
    holds for the next pool.
    """
    known: Sequence[Schedule] | None = None
    for candidate in candidates:
        found = simulate(candidate.setup, problem.batch, problem.profile, memory=candidate.memory, known=known)
        known = found.schedules
        step_s = None
        if problem.times is not None:
            tokens = int((problem.batch.prompts + problem.batch.responses).sum())
            sync = weight_sync_seconds(found.model, problem.times, problem.kv_scales_calibrated)
            step_s = found.rollout.makespan_s + problem.times.seconds(tokens) + sum(sync.values())
        doubt, rollout = problem.profile.layout_doubt(*candidate.setup.limits.cut), found.rollout
        candidate = replace(candidate, rollout=rollout, extrapolated=found.extrapolated)
        yield replace(candidate, step_s=step_s, layout_doubt=doubt)


def _risk_key(setup: EngineSetup) -> tuple[Precision, tuple[Linear, ...]]:
    """What the risk depends on: of the layout only the linears that stay in BF16."""
    kept = setup.shape.left_in_bf16(setup.limits.tensor_parallel_size) if setup.precision.weights != "bf16" else ()
    return setup.precision, kept


def _risks(setup: EngineSetup, problem: Problem) -> tuple[MismatchRisk, MismatchRisk | None]:
    """The values of a Candidate's `risk` and `unit_risk`."""

    def at(calibrated: bool) -> MismatchRisk:
        return mismatch_risk(
            setup.shape,
            setup.precision,
            problem.batch.responses,
            e8m0=setup.gpu.e8m0_scales,
            kv_scales_calibrated=calibrated,
            tensor_parallel_size=setup.limits.tensor_parallel_size,
            budget=problem.budget,
        )

    held = setup.shape.stored is not None and setup.shape.stored.kv_fp8  # the checkpoint has the scales
    risk = at(problem.kv_scales_calibrated or held)
    if setup.precision.kv != "fp8" or held:
        return risk, None
    return risk, at(False) if problem.kv_scales_calibrated else risk
