"""A finite batch of rollouts on one GPU setting: its schedule, timed step by step -> makespan and timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fp8plan.model.cost.base import Array, FloatArray, IntArray, StepBatch, WindowReads, joined
from fp8plan.model.cost.host import start_cost
from fp8plan.model.cost.step import StepModel, TimedSteps
from fp8plan.model.kv_cache.plan import KvPlan
from fp8plan.model.limits import EngineLimits
from fp8plan.model.schedule.sample import WHOLE, pace_error, schedules_of
from fp8plan.model.schedule.scheduler import Schedule, schedule
from fp8plan.model.workload import Batch

Z90 = 1.6449  # a normal variable stays within +-Z90 standard deviations 90% of the time
TAIL_SHARE = 0.25
ROWS_AT_ONCE = 1_000_000  # of several replicas that are timed together: a row takes about a kilobyte meanwhile


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
    """The time of rolling out one batch, and what it is made of.

    makespan_s:          from the call to the last token of the slowest replica; low and high: 90% interval
    output_tokens:       response tokens of all replicas
    preemptions:         of all replicas
    recomputed_tokens:   tokens whose KV was thrown away by a preemption
    cached_tokens:       tokens the prefix cache saved from prefill
    num_steps, tail_fraction, parts, extrapolated, timeline: of the slowest replica
    tail_fraction:       share of the makespan at its end in which no request waits and fewer than a quarter of those
                         that could run together do
    parts, tail_parts:   component of the cost model -> its share of the makespan, and of the tail
    extrapolated:        reasons why the profile was not measured for this; empty when it was
    log_gradient:        d log(makespan_s) / d log(coefficient of the profile)
    simulated:           share of the responses that were simulated; below 1 the rest goes on at their pace
    sampling_sd:         standard deviation of log(makespan_s) that this adds; the interval contains it
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

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.makespan_s


def schedules(
    batches: Sequence[Batch], kv: KvPlan, limits: EngineLimits, known: Sequence[Schedule] | None = None
) -> list[Schedule]:
    """The schedule of each replica's batch. Of a large one a sample is simulated (`schedules_of`).

    kv:    the KV cache of one replica
    known: the same batches' schedules with another KV cache, taken over where they hold for this one
    """
    reusable = [plan.holds_for(kv.usable_blocks, kv.specs) for plan in known or ()]
    if known and all(reusable):
        return list(known)
    if max(len(batch.prompts) for batch in batches) > WHOLE:
        return schedules_of(batches, lambda batch: schedule_with(batch, kv, limits))
    return [
        known[replica] if known and reusable[replica] else schedule_with(batch, kv, limits)
        for replica, batch in enumerate(batches)
    ]


def schedule_with(batch: Batch, kv: KvPlan, limits: EngineLimits, longest_run: int = 2**62) -> Schedule:
    """The schedule of a batch on an engine with this KV cache. longest_run: most steps in one row"""
    return schedule(*batch, kv.usable_blocks, limits, longest_run, kv.specs, kv.retains_all)


def rollout(replicas: Sequence[Schedule], model: StepModel) -> Rollout:
    """Time the schedules of all replicas of one engine setting.

    A step's time is linear in the KV tokens read but for kinks where a kernel's bound changes, so a run of alike
    steps costs its length times the step at its mean KV.
    """
    distinct = {
        id(plan.steps): step_batch(plan) for plan in replicas
    }  # replicas that share a sample have the same rows
    at = [list(distinct).index(id(plan.steps)) for plan in replicas]
    batches = list(distinct.values())
    step_seconds, steps_of = _timed(batches, model)
    seconds = [step_seconds[i] * plan.weights for i, plan in zip(at, replicas, strict=True)]
    slowest = int(np.argmax([row.sum() for row in seconds]))
    batch, plan, steps = batches[at[slowest]], replicas[slowest], steps_of(at[slowest])
    starting = start_cost(plan.requests, plan.prompt_tokens, model.profile)
    start = float(starting.seconds[0])
    makespan = start + float(seconds[slowest].sum())
    low, high = (start + end for end in steps.interval(plan.weights, Z90))
    if sampling := pace_error(plan, seconds[slowest]):
        low, high = (
            makespan * float(np.exp(side * np.hypot(np.log(end / makespan), Z90 * sampling)))
            for side, end in ((-1, low), (1, high))
        )
    ends: FloatArray = start + np.cumsum(seconds[slowest], dtype=np.float64)
    tail = _tail_rows(plan, model.limits.max_num_seqs)
    breakdown = {name: part * plan.weights for name, part in steps.breakdown().items()}
    breakdown["host"][0] += start
    gradient = steps.gradient(plan.weights)
    for name, partial in starting.partials.items():
        gradient[name] = gradient.get(name, 0.0) + float(partial[0])
    return Rollout(
        makespan_s=makespan,
        makespan_low_s=low,
        makespan_high_s=high,
        output_tokens=sum(p.total(p.steps * p.sampled_requests) for p in replicas),
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
            output_tokens=plan.weights * plan.sampled_requests,
        ),
        log_gradient={name: value / makespan for name, value in gradient.items()},
        simulated=plan.sampled.requests / sum(p.requests for p in replicas) if plan.sampled else 1.0,
        sampling_sd=sampling,
    )


def _timed(batches: Sequence[StepBatch], model: StepModel) -> tuple[list[Array], Callable[[int], TimedSteps]]:
    """The seconds of each step of each batch, and a function that gives a batch's TimedSteps by its index."""
    sizes = [batch.decode_requests.size for batch in batches]
    ends = np.cumsum(sizes).tolist()
    if len(batches) > 1 and ends[-1] > ROWS_AT_ONCE:
        return [model.timed(batch).seconds() for batch in batches], lambda i: model.timed(batches[i])
    all_steps = model.timed(joined(batches))  # at once: most of the work is per distinct number of tokens
    return np.split(all_steps.seconds(), ends[:-1]), lambda i: all_steps.rows(slice(ends[i] - sizes[i], ends[i]))


def step_batch(plan: Schedule) -> StepBatch:
    """The mean step of each row. A row of one step follows the row before it; in longer ones most follow their like."""
    return StepBatch(
        decode_requests=plan.decode_requests,
        decode_kv_tokens=plan.decode_kv_tokens + plan.decode_requests * (plan.steps - 1) / 2,
        prefill_tokens=plan.prefill_tokens,
        prefill_requests=plan.prefill_requests,
        prefill_kv_tokens=plan.prefill_kv_tokens,
        prefill_pairs=plan.prefill_pairs,
        sampled_requests=plan.sampled_requests,
        windows=tuple(
            WindowReads(x.kind, x.window, x.decode_kv_tokens / plan.steps, x.prefill_kv_tokens, x.prefill_pairs)
            for x in plan.windows
        ),
        follows=plan.steps == 1,
    )


def _tail_rows(plan: Schedule, max_num_seqs: int) -> slice:
    """Rows after the last one in which a request waited or a quarter of those that could run together did."""
    together = min(plan.requests, max_num_seqs)
    busy = np.flatnonzero((plan.waiting > 0) | (plan.running >= TAIL_SHARE * together))
    return slice(int(busy[-1]) + 1, None)


def _shares(seconds: dict[str, float]) -> dict[str, float]:
    """Each part as a fraction of their sum, largest first; {} if the sum is 0."""
    total = sum(seconds.values())
    return {name: part / total for name, part in sorted(seconds.items(), key=lambda x: -x[1]) if total and part}
