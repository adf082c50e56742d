"""The candidates of a plan: every precision on every layout, each with its time and risk, or the reason against it.

Large batches are predicted in several processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby

import numpy as np

from fp8plan.errors import CapacityError, ConfigError
from fp8plan.model.architecture import Experts, Linear, ModelShape
from fp8plan.model.cost.front import wait_seconds
from fp8plan.model.cost.routes import RouteBytes, route_bytes
from fp8plan.model.cost.step import StepModel
from fp8plan.model.hardware import Gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import why_not_kept
from fp8plan.model.memory.plan import MemoryPlan, check_pool
from fp8plan.model.plan.request import PlanRequest, Progress
from fp8plan.model.precision import PRESETS, Precision, find_precision, presets_of
from fp8plan.model.profile.profile import Profile
from fp8plan.model.risk.expected import MismatchRisk, RiskBudget, mismatch_risk
from fp8plan.model.risk.remedies import Remedies
from fp8plan.model.rl_step import DEFAULT_LINK, SyncCost, WeightSync, sync_costs
from fp8plan.model.rollout import Rollout, Simulated, makespans, simulate
from fp8plan.model.schedule.scheduler import Schedule
from fp8plan.model.setup import EngineSetup
from fp8plan.model.shards import why_not_shardable
from fp8plan.model.workers import mapper
from fp8plan.model.workload import Batch

# The fewest responses, over all candidates, for which more processes pay off: half a second of work.
WORTH_PROCESSES = 40_000
ENDLESS = 2**40  # blocks of a KV cache that no rollout fills
LEAST_SAVED = 0.1  # share of a rollout of turns that its limit takes


@dataclass(frozen=True, slots=True)
class Way:
    """The remedies with which a choice is within the risk budget, those of the plan among them.

    kl_k3, kl_k3_low, kl_k3_high, risk: with them
    added_s: seconds that they add to the RL step if the trainer's times are known, else to the rollout
    trainer: a trainer precision that would be enough alone; None: none would, or the remedies have one
    """

    remedies: Remedies
    kl_k3: float
    kl_k3_low: float
    kl_k3_high: float
    risk: str
    added_s: float
    trainer: str | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One precision on one layout, with its predictions or the reason why it cannot run."""

    setup: EngineSetup
    reason: str | None = None
    unfit: bool = False  # the reason is that memory is too small
    memory: MemoryPlan | None = None
    rollout: Rollout | None = None
    quick_s: float | None = None  # makespan of a rollout that was timed without its parts and interval
    extrapolated: bool = False
    risk: MismatchRisk | None = None
    unit_risk: MismatchRisk | None = None  # with K and V scales left at 1.0; None without an FP8 KV cache
    step_s: float | None = None  # seconds of the whole RL step; None without trainer figures
    syncs: tuple[SyncCost, ...] = ()  # from the fastest on; empty where no sync is asked for
    layout_doubt: float = 0.0  # Profile.layout_error of its layout
    routes: RouteBytes | None = None  # of the experts that its engines return; None: they return none
    way: Way | None = None  # of one that the risk budget rules out

    @property
    def timed(self) -> Rollout:
        """The rollout of a candidate that can run."""
        assert self.rollout is not None
        return self.rollout

    @property
    def makespan_s(self) -> float | None:
        """Seconds of the rollout; None if the candidate cannot run, or has not been timed."""
        return self.quick_s if self.rollout is None else self.rollout.makespan_s

    @property
    def expected(self) -> MismatchRisk:
        """The mismatch risk of a candidate that can run."""
        assert self.risk is not None
        return self.risk

    @property
    def seconds(self) -> float:
        """Seconds of the RL step if the trainer's times are known, else of the rollout: the time that is minimised."""
        known = self.makespan_s if self.step_s is None else self.step_s
        assert known is not None
        return known

    @property
    def cautious_s(self) -> float:
        """`seconds` with the rollout lengthened by one standard deviation of the layout's uncertainty."""
        return self.seconds + math.expm1(self.layout_doubt) * (self.makespan_s or 0.0)


def candidates(request: PlanRequest) -> list[Candidate]:
    """Every layout of the request's GPUs in every precision, each with its memory or the reason why it cannot run.

    A replica stays in a node, unless the model fits no node. Those of verl always do.

    Raises ConfigError for a precision that this GPU does not have, and for a `keep_bf16` that the model does not allow,
    or that changes nothing. If no candidate can run, raises CapacityError with the reason of the largest replica with
    the smallest weights, else ConfigError with the first.
    """
    shape, card, limits, gpus = request.shape, request.card, request.engine, request.gpus
    shape.keeping_bf16(request.remedies.keep_bf16)  # refuses numbers that no FP8 weights would have

    def placed(layouts: Iterable[EngineLimits]) -> list[Candidate]:
        return [
            _placed(EngineSetup(shape, card, preset, layout, request.caller, request.vllm, request.remedies), request)
            for layout in layouts
            for preset in _precisions(request.precisions, shape)
        ]

    tried = placed(_layouts(shape, limits, gpus, card))
    none_fits = not any(c.memory for c in tried) and any(c.unfit for c in tried)
    if none_fits and gpus is not None and request.target != "verl":
        tried += placed(_over_nodes(shape, limits, gpus, card))
    if any(c.memory for c in tried):
        _check_kept(tried)
        return tried
    reasons = [c for c in tried if shape.why_not(c.setup.precision) is None] or tried
    if unfit := [c for c in reasons if c.unfit]:
        raise CapacityError(min(unfit, key=_weights_of_a_rank).reason)
    raise ConfigError(reasons[0].reason)


def _check_kept(tried: Sequence[Candidate]) -> None:
    """Raise ConfigError for `keep_bf16` where all linears are in BF16: those of every engine, and of the trainer."""
    remedies = tried[0].setup.remedies
    fp8 = any(c.setup.precision.weights != "bf16" and (c.memory or c.unfit) for c in tried)
    if any(remedies.keep_bf16) and not fp8 and remedies.trainer_precision == "bf16":
        allowed = "leave --keep-bf16 out, or plan fp8_block on a GPU with FP8"
        raise ConfigError(f"keep_bf16 is {remedies.keep_bf16}, and no planned engine has FP8 weights; {allowed}")


def _weights_of_a_rank(candidate: Candidate) -> int:
    setup = candidate.setup
    return setup.shape.weight_bytes(setup.precision, setup.limits.tensor_parallel_size, setup.limits.expert_ranks)


def _layouts(shape: ModelShape, limits: EngineLimits, gpus: int | None, gpu: Gpu) -> list[EngineLimits]:
    """The layouts of `gpus` with replicas within a node; without `gpus` that of `limits`."""
    if gpus is None:
        shape.check_tensor_parallel(limits.tensor_parallel_size, limits.enable_expert_parallel)
        return [limits.on(gpu)]
    within = min(gpus, gpu.gpus_per_node)
    even = [(tp, whole) for tp, whole in _cuts(shape, within) if gpus % tp == 0 and within % tp == 0]
    return [_cut(limits, gpus, *cut).on(gpu) for cut in even]


def _over_nodes(shape: ModelShape, limits: EngineLimits, gpus: int, gpu: Gpu) -> list[EngineLimits]:
    """The layouts of `gpus` with replicas of several whole nodes."""
    node = gpu.gpus_per_node
    whole_nodes = [(tp, whole) for tp, whole in _cuts(shape, gpus) if tp > node and tp % node == 0 and gpus % tp == 0]
    return [_cut(limits, gpus, *cut).on(gpu) for cut in whole_nodes]


def _cuts(shape: ModelShape, most: int) -> list[tuple[int, bool]]:
    """The tensor-parallel sizes of a model up to `most`, each without and, if it has experts, with whole experts."""
    cuts = [(tp, False) for tp in shape.allowed_tensor_parallel(most)]
    if shape.parts_of(Experts):
        cuts += [(tp, True) for tp in shape.allowed_tensor_parallel(most, expert_parallel=True) if tp > 1]
    return sorted(cuts)


def _cut(limits: EngineLimits, gpus: int, tp: int, whole_experts: bool) -> EngineLimits:
    return replace(limits, tensor_parallel_size=tp, data_parallel_size=gpus // tp, enable_expert_parallel=whole_experts)


def _precisions(names: Sequence[str] | None, shape: ModelShape) -> list[Precision]:
    if names is None:
        stored = shape.stored.precisions if shape.stored is not None else presets_of("fp8_block")
        return [*chain.from_iterable(zip(presets_of("bf16"), stored, strict=True))]
    presets = [find_precision(name) for name in dict.fromkeys([names] if isinstance(names, str) else names)]
    if not presets:
        raise ConfigError(f"precisions is []; allowed: some of {', '.join(PRESETS)}, or None for all")
    return presets


def _placed(setup: EngineSetup, request: PlanRequest) -> Candidate:
    """The candidate with its memory, or with the reason why it cannot run."""
    explicit = request.precisions is not None
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
    shardable = why_not_shardable(setup.shape, setup.precision, size, request.target, whole_experts)
    if reason := _idle(setup.limits, request.batch.at_once) or _not_kept(setup) or shardable:
        return Candidate(setup, reason)
    try:
        started, memory = setup.placed()
        check_pool(memory, started.gpu, started.limits)
        return Candidate(started, memory=memory)
    except CapacityError as error:
        return Candidate(setup, str(error), unfit=True)


def _not_kept(setup: EngineSetup) -> str | None:
    """The reason why vLLM cannot keep this model's cache in this precision on this GPU; None if it can."""
    shape, gpu = setup.shape, setup.gpu

    def not_kept(preset: Precision) -> str | None:
        return why_not_kept(shape, preset, gpu.is_cpu, gpu.compute_capability, setup.engine_version)

    if (reason := not_kept(setup.precision)) is None:
        return None
    others = [preset for preset in _precisions(None, shape) if preset.kv != setup.precision.kv]
    known = [x.name for x in others if not (not_kept(x) or shape.why_not(x) or gpu.why_not(x))]
    return f"{reason}; allowed: {', '.join(known) or 'another GPU'}"


def _idle(limits: EngineLimits, requests: int) -> str | None:
    """The reason why there are too many replicas for the requests at once; None if there are not."""
    replicas = limits.data_parallel_size
    if replicas <= requests:
        return None
    return (
        f"{replicas} replicas for {requests} requests leave {replicas - requests} without any; allowed: at most "
        f"{requests} replicas (data_parallel_size; of --gpus what tensor parallelism leaves)"
    )


def evaluated(candidates: Sequence[Candidate], request: PlanRequest, profile: Profile) -> list[Candidate]:
    """The candidates. Those that can run have their rollout, RL step and risk filled in.

    Those that would run in more memory have a risk, too. Layouts on which the same linears stay in BF16 share one.
    """
    known: dict[tuple[Precision, tuple[Linear, ...]], tuple[MismatchRisk, MismatchRisk | None]] = {}
    done = timed(candidates, request, profile, request.progress)
    for i, candidate in enumerate(done):
        setup, kept = candidate.setup, tuple[Linear, ...]()
        if candidate.memory is None and not candidate.unfit:
            continue
        if setup.precision.weights != "bf16":
            kept = setup.shape.left_in_bf16(setup.limits.tensor_parallel_size)
        key = setup.precision, kept
        if key not in known:
            known[key] = risks(setup, request)
        risk, unit_risk = known[key]
        done[i] = replace(candidate, risk=risk, unit_risk=unit_risk)
    return done


def timed(
    candidates: Sequence[Candidate], request: PlanRequest, profile: Profile, progress: Progress = iter
) -> list[Candidate]:
    """The candidates. Those that can run have their rollout and RL step filled in.

    Candidates with the same number of replicas share their schedules, unless their KV pools starve. Such groups go to
    the request's `workers` if there is enough work for them. The group with the most replicas is the most work, and
    starts first.
    """
    done = list(candidates)
    order = sorted(
        (-c.setup.limits.data_parallel_size, -c.memory.usable_blocks, i) for i, c in enumerate(candidates) if c.memory
    )
    groups = [[candidates[i] for *_, i in group] for _, group in groupby(order, key=lambda key: key[0])]
    workers = request.workers if len(order) * len(request.batch.prompts) >= WORTH_PROCESSES else 1
    if workers > 1:
        groups = [part for group in groups for part in _apart(group, request.batch)]
    workers = min(workers, len(groups))
    timing = _timed_group if workers < 2 else _timed_list
    with nullcontext(map) if workers < 2 else mapper(workers) as map_groups:
        results = chain.from_iterable(map_groups(partial(timing, request=request, profile=profile), groups))
        for (*_, i), candidate in zip(progress(order), results, strict=True):
            done[i] = candidate
    return done


def _apart(group: list[Candidate], batch: Batch) -> list[list[Candidate]]:
    """A group from the largest KV pool down, cut so that each candidate whose pool starves stands alone.

    A schedule with preemptions holds for one pool only, so nothing is lost. A pool counts as starving if the requests
    that run at once, each halfway through its response, need more than it holds. The guess affects speed alone.
    """
    tokens = float((batch.prompts + batch.responses / 2).mean())

    def starves(candidate: Candidate) -> bool:
        limits, memory = candidate.setup.limits, candidate.memory
        running = min(limits.max_num_seqs, len(batch.prompts) / limits.data_parallel_size)
        return memory is not None and running * tokens > memory.pool_tokens

    ample = sum(not starves(candidate) for candidate in group)
    return [part for part in (group[:ample], *([candidate] for candidate in group[ample:])) if part]


def _timed_list(candidates: Sequence[Candidate], request: PlanRequest, profile: Profile) -> list[Candidate]:
    """The candidates of `_timed_group` as a list, which another process can hand back."""
    return list(_timed_group(candidates, request, profile))


def _timed_group(candidates: Sequence[Candidate], request: PlanRequest, profile: Profile) -> Iterator[Candidate]:
    """Time candidates with the same number of replicas, from the largest KV pool down. A schedule is reused if it holds
    for the next pool, and as many requests run there.
    """
    known: dict[int, Sequence[Schedule]] = {}  # by the number of requests that run at once
    for candidate in candidates:
        running = min(candidate.setup.limits.max_num_seqs, len(request.batch.prompts))
        setup, again = candidate.setup, known.get(running)
        timed = simulate(setup, request.batch, profile, memory=candidate.memory, known=again)
        known[running] = timed.schedules
        rollout = timed.rollout if timed.clock is None else _with_limit(timed, request.batch)
        candidate = replace(candidate, rollout=rollout, extrapolated=timed.extrapolated)
        yield in_a_step(candidate, timed.model, request)


def _with_limit(timed: Simulated, batch: Batch) -> Rollout:
    """The rollout of a batch of turns, with two more entries of `turns`.

    "saves": "tools", "cache" and "tail" -> the share of the makespan that goes without it, at least 0
    "limit": the one with the largest share, or "compute" if none reaches LEAST_SAVED

    The shares are of tools that answer at once, of a cache that never evicts, and of the tail.
    """
    rollout, turns = timed.rollout, batch.turns
    assert turns is not None
    assert rollout.turns is not None
    no_waits = batch._replace(turns=turns._replace(wait_s=np.zeros_like(turns.wait_s)))
    others = makespans([timed.rescheduled(no_waits), timed.rescheduled(batch, ENDLESS)], timed.model)
    without_waits, endless = (max(0.0, 1 - seconds / rollout.makespan_s) for seconds in others)
    saves = {"tools": without_waits, "cache": endless, "tail": rollout.tail_fraction}
    limit = max(saves, key=lambda name: saves[name])
    if saves[limit] < LEAST_SAVED:
        limit = "compute"
    return replace(rollout, turns=rollout.turns | {"saves": saves, "limit": limit})


def in_a_step(candidate: Candidate, model: StepModel, request: PlanRequest) -> Candidate:
    """A timed candidate with the seconds of the RL step around its rollout, and the doubt of its layout."""
    step_s, sync, profile, setup = None, request.sync, model.profile, candidate.setup
    tokens = int(request.batch.lengths.sum())
    routes, to_trainer_s = None, 0.0
    if setup.limits.enable_return_routed_experts and candidate.memory is not None:
        routes = route_bytes(setup.shape, setup.limits, candidate.memory.kv_cache_tokens, tokens)
        link = WeightSync(request.link or DEFAULT_LINK).bandwidth  # each replica has one
        to_trainer_s = routes.rollout / setup.limits.data_parallel_size / link
    syncs = [] if sync is None else sync_costs(model, sync, request.measures_scales)
    if request.trainer is not None:
        wait = wait_seconds(setup.inside, profile) + to_trainer_s
        step_s = (candidate.makespan_s or 0.0) + request.trainer.seconds(tokens) + syncs[0].seconds + wait
    return replace(candidate, step_s=step_s, syncs=tuple(syncs), layout_doubt=model.layout_error, routes=routes)


def risks(setup: EngineSetup, request: PlanRequest) -> tuple[MismatchRisk, MismatchRisk | None]:
    """The values of a Candidate's `risk` and `unit_risk`."""

    def at(calibrated: bool) -> MismatchRisk:
        return mismatch_risk(
            setup.shape,
            setup.precision,
            request.batch.responses,
            e8m0=setup.e8m0,
            kv_scales_calibrated=calibrated,
            tensor_parallel_size=setup.limits.tensor_parallel_size,
            budget=request.risk_budget,
            remedies=setup.remedies,
        )

    held = setup.shape.stored is not None and setup.shape.stored.kv_fp8  # the checkpoint has the scales
    risk = at(request.measures_scales or held)
    if setup.precision.kv != "fp8" or held:
        return risk, None
    return risk, at(False) if request.measures_scales else risk


def ruled_out(candidates: Sequence[Candidate], chosen: int, budget: RiskBudget) -> list[int]:
    """The chosen candidate, and the fastest of each other precision, if the budget rules it out.

    If the budget allows the chosen one, only faster ones count. Unmeasured layouts do only if it has one.
    """
    picked = candidates[chosen]
    allowed, fastest = budget.accepts(picked.expected.level), {picked.setup.precision: chosen}
    runnable = [i for i, c in enumerate(candidates) if c.rollout is not None]
    for i in sorted(runnable, key=lambda i: candidates[i].seconds):
        if picked.layout_doubt or not candidates[i].layout_doubt:
            fastest.setdefault(candidates[i].setup.precision, i)
    faster = [i for i in fastest.values() if not allowed or candidates[i].seconds < picked.seconds]
    return [i for i in faster if not budget.accepts(candidates[i].expected.level)]
