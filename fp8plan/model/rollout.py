"""A finite batch of rollouts on one engine: memory, then the schedule, then the time of each step and the makespan.

Of a batch that is too large to simulate whole, a sample is simulated (fp8plan.model.schedule.sample).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from fp8plan.model.cost.base import Array, Cost, FloatArray, IntArray, StepBatch, WindowReads, joined, zero
from fp8plan.model.cost.clock import Clock
from fp8plan.model.cost.front import HTTP, ONE_FOR_ALL, OWN, Front, Passing, front_of
from fp8plan.model.cost.grounds import MOST_UNSEEN, UNSEEN
from fp8plan.model.cost.host import start_cost
from fp8plan.model.cost.routes import route_end_cost
from fp8plan.model.cost.step import StepModel, TimedSteps
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_plan import KvPlan
from fp8plan.model.memory.kv_specs import windows_of
from fp8plan.model.memory.plan import MemoryPlan
from fp8plan.model.profile.profile import Profile
from fp8plan.model.schedule.sample import schedules_of
from fp8plan.model.schedule.scheduler import Schedule, schedule
from fp8plan.model.setup import EngineSetup
from fp8plan.model.workload import Batch

WHOLE = 20_000  # most requests of a replica that are simulated whole
CHUNKS = 10  # parts of the middle, whose paces are compared
Z90 = 1.6449  # a normal variable is within +-Z90 standard deviations with probability 90%
TAIL_SHARE = 0.25
ROWS_AT_ONCE = 1_000_000  # most rows of several replicas that are timed together; a row takes about a kilobyte


@dataclass(frozen=True, slots=True)
class Timeline:
    """One replica over time. Arrays of shape (rows,); a row is a run of alike steps that ends at `seconds`."""

    seconds: FloatArray  # end of the row, from the start of the rollout
    decode_requests: IntArray
    waiting: IntArray
    used_blocks: IntArray
    output_tokens: IntArray | FloatArray  # made in the row


@dataclass(frozen=True, slots=True)
class Rollout:
    """The time of rolling out one batch, and its parts.

    makespan_s:          from the call to the last token of the slowest replica; low and high: 90% interval, within what
                         the GPU's datasheet allows
    output_tokens:       response tokens of all replicas
    preemptions:         preemptions of all replicas
    recomputed_tokens:   tokens whose KV a preemption dropped
    cached_tokens:       tokens that need no prefill, because the prefix cache has them
    num_steps, tail_fraction, parts, extrapolated, timeline: of the slowest replica
    tail_fraction:       share of the makespan at its end in which no request waits, and fewer than a quarter of those
                         that could run together run
    parts, tail_parts:   component of the cost model -> its share of the makespan, and of the tail
    extrapolated:        reasons why the rollout is outside of the profile's measurements; empty if it is inside
    cut:                 of the engine, as in EngineLimits
    rests_on:            of the slowest replica, as in fp8plan.model.cost.grounds
    log_gradient:        d log(makespan_s) / d log(coefficient of the profile)
    simulated:           share of the responses that were simulated; the others are assumed to go at their pace
    sampling_sd:         standard deviation of log(makespan_s) that sampling adds; the interval includes it
    turns:               of trajectories with several turns: "hit_share", the share of prompt tokens that the prefix
                         cache has when a turn is first admitted, as in vLLM's metrics; "again_tokens" in full blocks of
                         earlier turns, which it has not; "tool_share" of the makespan, in which the slowest replica is
                         idle; of a plan's choice also "saves" and "limit", as in fp8plan.model.plan.candidates
    """

    makespan_s: float
    makespan_low_s: float
    makespan_high_s: float
    output_tokens: int
    num_steps: int
    preemptions: int
    recomputed_tokens: int
    cached_tokens: int
    tail_fraction: float
    parts: dict[str, float]
    tail_parts: dict[str, float]
    extrapolated: tuple[str, ...]
    timeline: Timeline
    log_gradient: dict[str, float] = field(default_factory=dict)
    simulated: float = 1.0
    sampling_sd: float = 0.0
    cut: tuple[int, bool] = (1, False)
    rests_on: dict[str, dict[str, Any]] = field(default_factory=dict)
    turns: dict[str, Any] | None = None

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.makespan_s


class Simulated(NamedTuple):
    """A simulated rollout of one batch, with its models and schedules (one per replica). clock: with turns alone"""

    model: StepModel
    memory: MemoryPlan
    schedules: list[Schedule]
    rollout: Rollout
    clock: Clock | None

    @property
    def extrapolated(self) -> bool:
        """True if more than MOST_UNSEEN of the time is extrapolated or theory."""
        shares: dict[str, float] = self.rollout.rests_on.get("shares", {})
        return sum(shares.get(ground, 0.0) for ground in UNSEEN) > MOST_UNSEEN

    def rescheduled(self, batch: Batch, blocks: int | None = None) -> list[Schedule]:
        """The schedules of another batch on this engine. blocks: of the KV cache of each replica; None: its own"""
        kv, limits = self.memory.kv, self.model.limits
        if blocks is not None:
            kv = replace(kv, num_blocks=blocks)
        return schedules(batch.split(limits.data_parallel_size), kv, limits, clock=self.clock)


def simulate(
    setup: EngineSetup,
    batch: Batch,
    profile: Profile,
    *,
    memory: MemoryPlan | None = None,
    known: Sequence[Schedule] | None = None,
    experts_hit: int | None = None,
) -> Simulated:
    """Simulate the rollout of `batch` on an engine.

    memory: the engine's memory, if it is already known
    known:  schedules of the same batch with another KV pool, reused where they hold for this pool too
    experts_hit: as in StepModel

    Raises ConfigError for an unknown model, CapacityError if the model does not fit, and ProfileError for a kernel that
    was never measured.
    """
    memory = memory or setup.memory(batch.longest)
    model = setup.step_model(profile, experts_hit, memory)
    batches = batch.split(setup.limits.data_parallel_size)
    clock = None if batch.turns is None else Clock.of(model, windows_of(memory.kv.specs))
    planned = schedules(batches, memory.kv, setup.limits, known, clock)
    return Simulated(model, memory, planned, rollout(planned, model), clock)


def schedules(
    batches: Sequence[Batch],
    kv: KvPlan,
    limits: EngineLimits,
    known: Sequence[Schedule] | None = None,
    clock: Clock | None = None,
) -> list[Schedule]:
    """The schedule of each replica's batch; for a large one from a sample (`schedules_of`).

    kv:    the KV cache of one replica
    known: the same batches' schedules with another KV cache, reused where they hold for this one
    clock: of batches of turns, which are simulated whole; None: of others
    """
    if clock is not None:
        return [schedule_with(batch, kv, limits, clock) for batch in batches]
    reusable = [plan.holds_for(kv.usable_blocks, kv.specs) for plan in known or ()]
    if known and all(reusable):
        return list(known)
    if max(len(batch.prompts) for batch in batches) > WHOLE:
        return schedules_of(batches, lambda batch: schedule_with(batch, kv, limits))
    return [
        known[replica] if known and reusable[replica] else schedule_with(batch, kv, limits)
        for replica, batch in enumerate(batches)
    ]


def schedule_with(
    batch: Batch, kv: KvPlan, limits: EngineLimits, clock: Clock | None = None, longest_run: int = 2**62
) -> Schedule:
    """The schedule of a batch on an engine with this KV cache. clock, longest_run: as in `schedule`"""
    return schedule(batch, kv.usable_blocks, limits, longest_run, kv.specs, kv.cache_rules, clock)


def rollout(replicas: Sequence[Schedule], model: StepModel) -> Rollout:
    """The time of the schedules of all replicas.

    A step's time is linear in the KV tokens read, apart from kinks where a kernel's bound changes. So a run of alike
    steps takes its length times the step at its mean KV.
    """
    batches, at = _distinct(replicas)
    step_seconds, steps_of = _timed(batches, model)
    in_engine, fronts = _row_seconds(replicas, [step_seconds[i] for i in at], model)
    seconds = _with_waits(replicas, in_engine, fronts)
    slowest = int(np.argmax([row.sum() for row in seconds]))
    batch, plan, steps = batches[at[slowest]], replicas[slowest], steps_of(at[slowest])
    front, slopes = fronts[slowest]
    starting, pace = _beside_steps(plan, model), model.pace
    start, weights = float(starting.seconds[0]) * pace, plan.weights * pace
    makespan = start + float(seconds[slowest].sum())
    in_front, in_tools = float(front.seconds.sum()), float(plan.idle_s.sum())
    doubt = in_front and Z90 * _front_error(front, model.profile)
    low, high = (
        start + end + in_tools + in_front * math.exp(side * doubt)
        for side, end in zip((-1, 1), steps.interval(weights, Z90), strict=True)
    )
    if sampling := pace_error(plan, seconds[slowest]):
        low, high = (
            makespan * float(np.exp(side * np.hypot(np.log(end / makespan), Z90 * sampling)))
            for side, end in ((-1, low), (1, high))
        )
    low = max(low, min(least_seconds(plan, batch, model), makespan))
    ends: FloatArray = start + np.cumsum(seconds[slowest], dtype=np.float64)
    tail = _tail_rows(plan, model.limits.max_num_seqs)
    once = {name: part * plan.weights for name, part in steps.breakdown().items()}
    breakdown = {name: part * pace for name, part in once.items()}
    breakdown["host"][0] += start
    breakdown["front"] = front.seconds
    breakdown["tools"] = plan.idle_s
    gradient = steps.gradient(weights * slopes)
    gradient |= dict.fromkeys(model.paces, start + float((in_engine[slowest] * slopes).sum()))
    for name, partial in starting.partials.items():
        gradient[name] = gradient.get(name, 0.0) + float(partial[0]) * pace
    for name, partial in front.partials.items():
        gradient[name] = gradient.get(name, 0.0) + float(partial.sum())
    return Rollout(
        makespan_s=makespan,
        makespan_low_s=low,
        makespan_high_s=high,
        output_tokens=sum(p.total(p.steps * p.made) for p in replicas),
        num_steps=plan.num_steps,
        preemptions=sum(p.num_preemptions for p in replicas),
        recomputed_tokens=sum(p.total(p.recomputed_tokens) for p in replicas),
        cached_tokens=sum(p.total(p.cached_tokens) for p in replicas),
        tail_fraction=float(seconds[slowest][tail].sum() / makespan),
        parts=_shares({name: float(part.sum()) for name, part in breakdown.items()}),
        tail_parts=_shares({name: float(part[tail].sum()) for name, part in breakdown.items()}),
        extrapolated=tuple(model.outside_hull(batch)),
        timeline=Timeline(
            seconds=ends,
            decode_requests=plan.decode_requests,
            waiting=plan.waiting,
            used_blocks=plan.used_blocks,
            output_tokens=plan.weights * plan.made,
        ),
        log_gradient={name: value / makespan for name, value in gradient.items()},
        simulated=plan.sampled.requests / sum(p.requests for p in replicas) if plan.sampled else 1.0,
        sampling_sd=sampling,
        cut=model.cut,
        rests_on=steps.rests_on(batch, once, starting, front.scaled(1 / pace)),
        turns=_of_turns(replicas, in_tools / makespan) if plan.timed else None,
    )


def _of_turns(replicas: Sequence[Schedule], tool_share: float) -> dict[str, float]:
    names = "hit_tokens", "queried_tokens", "again_tokens"
    hits, queried, again = (sum(plan.total(getattr(plan, name)) for plan in replicas) for name in names)
    return {"hit_share": hits / queried, "again_tokens": again, "tool_share": tool_share}


def _beside_steps(plan: Schedule, model: StepModel) -> Cost:
    """Seconds before the first step, and after the last, shape (1,)."""
    if model.inside == HTTP:  # its front checks a prompt while the engine works
        beside = start_cost(0, 0, model.profile)
    else:
        beside = start_cost(plan.requests, plan.prompt_tokens, model.profile)
    if not model.limits.enable_return_routed_experts:
        return beside
    tokens = (plan.prompt_tokens + plan.total(plan.steps * plan.made)) / plan.requests
    return beside + route_end_cost(float(plan.decode_requests[-1]) * tokens, model.profile)


def makespans(rollouts: Sequence[Sequence[Schedule]], model: StepModel) -> list[float]:
    """The makespan of several rollouts on one engine, timed together: a tenth of the work of `rollout` for each.

    rollouts: the schedules of all replicas, for each rollout
    """
    return [max(float(ends[-1]) for ends in replicas) for replicas in clocks(rollouts, model)]


def clocks(rollouts: Sequence[Sequence[Schedule]], model: StepModel) -> list[list[FloatArray]]:
    """The seconds at which each row ends, from the start, for each replica of several rollouts on one engine."""
    every = [plan for replicas in rollouts for plan in replicas]
    batches, at = _distinct(every)
    step_seconds, _ = _timed(batches, model)
    ends, rest = list[list[FloatArray]](), iter(at)
    for replicas in rollouts:
        in_engine, fronts = _row_seconds(replicas, [step_seconds[next(rest)] for _ in replicas], model)
        starts = [_beside_steps(plan, model).seconds[0] for plan in replicas]
        rows = _with_waits(replicas, in_engine, fronts)
        ends.append([float(start) * model.pace + np.cumsum(row) for start, row in zip(starts, rows, strict=True)])
    return ends


def _distinct(replicas: Sequence[Schedule]) -> tuple[list[StepBatch], list[int]]:
    """The mean steps of distinct schedules, and each replica's index into them: those with one sample share rows."""
    distinct = {id(plan.steps): step_batch(plan) for plan in replicas}
    number = {key: i for i, key in enumerate(distinct)}
    return list(distinct.values()), [number[id(plan.steps)] for plan in replicas]


def _row_seconds(
    replicas: Sequence[Schedule], step_seconds: Sequence[Array], model: StepModel
) -> tuple[list[Array], list[Front]]:
    """The seconds of each row with all its steps: in each replica's engine, and those that its front adds.

    step_seconds: of one step of each row, for each replica
    """
    in_engine = [seconds * plan.weights * model.pace for seconds, plan in zip(step_seconds, replicas, strict=True)]
    passing = len(replicas) if model.inside in ONE_FOR_ALL else 1  # replicas whose tokens pass the same front
    if model.inside == OWN:
        return in_engine, [Front(zero(engine), np.ones(engine.shape)) for engine in in_engine]
    fronts = [
        front_of(model.inside, _passing(plan, engine, passing), model.profile)
        for engine, plan in zip(in_engine, replicas, strict=True)
    ]
    return in_engine, fronts


def _passing(plan: Schedule, engine: Array, replicas: int) -> Passing:
    """The work that passes a replica's front. engine: seconds of each row; replicas: those that share the front"""
    prompts = plan.queried_tokens * (plan.weights / plan.steps)
    return Passing(engine, replicas * plan.weights * plan.made, prompts, plan.requests)


def _with_waits(replicas: Sequence[Schedule], in_engine: Sequence[Array], fronts: Sequence[Front]) -> list[Array]:
    """The seconds of each row of each replica, with those of its front, and those that the engine waits for tools."""
    parts = zip(replicas, in_engine, fronts, strict=True)
    return [engine + front.cost.seconds + plan.idle_s for plan, engine, front in parts]


def _front_error(front: Cost, profile: Profile) -> float:
    """The standard deviation of the log of a front's seconds."""
    shares = np.array([float(partial.sum()) for partial in front.partials.values()]) / float(front.seconds.sum())
    shares = np.minimum(shares, 1.0)  # the engine's own work hides most of a front that is longer than what it adds
    return math.sqrt(shares @ profile.covariance(list(front.partials)) @ shares)


def least_seconds(plan: Schedule, batch: StepBatch, model: StepModel) -> float:
    """The seconds of the steps at the datasheet's bandwidth and peak. A model that stays in a cache may take less."""
    return float((plan.weights * model.least_seconds(batch)).sum())


def _timed(batches: Sequence[StepBatch], model: StepModel) -> tuple[list[Array], Callable[[int], TimedSteps]]:
    """The seconds of each step of each batch, and a function that gives a batch's TimedSteps by its index."""
    sizes = [batch.decode_requests.size for batch in batches]
    ends = np.cumsum(sizes).tolist()
    if len(batches) > 1 and ends[-1] > ROWS_AT_ONCE:
        return [model.timed(batch).seconds() for batch in batches], lambda i: model.timed(batches[i])
    all_steps = model.timed(joined(batches))  # all at once, because most work is per distinct number of tokens
    return np.split(all_steps.seconds(), ends[:-1]), lambda i: all_steps.rows(slice(ends[i] - sizes[i], ends[i]))


def step_batch(plan: Schedule) -> StepBatch:
    """The mean step of each row. Only a row of one step without a wait counts as following the row before."""
    return StepBatch(
        decode_requests=plan.decode_requests,
        decode_kv_tokens=plan.decode_kv_tokens + plan.gained * plan.decode_requests * (plan.steps - 1) / 2,
        prefill_tokens=plan.prefill_tokens,
        prefill_requests=plan.prefill_requests,
        prefill_kv_tokens=plan.prefill_kv_tokens,
        prefill_pairs=plan.prefill_pairs,
        sampled_requests=plan.sampled_requests + (plan.queries - 1) * plan.decode_requests,
        windows=tuple(
            WindowReads(x.kind, x.window, x.decode_kv_tokens / plan.steps, x.prefill_kv_tokens, x.prefill_pairs)
            for x in plan.windows
        ),
        follows=(plan.steps == 1) & (plan.idle_s == 0),
        queries=plan.queries,
    )


def _tail_rows(plan: Schedule, max_num_seqs: int) -> slice:
    """Rows of the tail: after the last one with a request that waits, or with TAIL_SHARE of those that fit at once.

    Trajectories whose tools work count as running, and those that were under way at once as what fits.
    """
    running, together = plan.running, min(plan.requests, max_num_seqs)
    if plan.timed:
        running = plan.running + plan.away
        together = int((plan.waiting + running).max())
    busy = np.flatnonzero((plan.waiting > 0) | (running >= TAIL_SHARE * together))
    return slice(int(busy[-1]) + 1, None)


def _shares(seconds: dict[str, float]) -> dict[str, float]:
    """Each part as a fraction of their sum, largest first; {} if the sum is 0."""
    total = sum(seconds.values())
    return {name: part / total for name, part in sorted(seconds.items(), key=lambda x: -x[1]) if total and part}


def pace_error(plan: Schedule, seconds: Array) -> float:
    """The standard deviation of log(makespan) due to sampling; 0 without a sample.

    seconds: of each row with all its steps and repeats, shape (rows,)

    The sample's middle is cut into CHUNKS of equally many tokens. The differences between the paces of neighbours give
    the error of the mean pace. A trend over the batch is no error, because the sample follows it.
    """
    if plan.sampled is None:
        return 0.0
    middle = plan.sampled.repeats > 1
    tokens = np.cumsum((plan.weights * plan.made)[middle])
    times = np.cumsum(seconds[middle])
    ends = np.interp(np.linspace(0, tokens[-1], CHUNKS + 1), np.append(0, tokens), np.append(0, times))
    paces = np.diff(ends)
    of_mean = float(np.sqrt(np.mean(np.diff(paces) ** 2) / 2 / CHUNKS)) * CHUNKS
    return of_mean / float(seconds.sum())
