"""A finite batch of rollouts on one GPU setting: its schedule, timed step by step -> makespan and timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fp8plan.model.cost.base import FloatArray, IntArray, StepBatch, WindowReads, joined
from fp8plan.model.cost.host import start_cost
from fp8plan.model.cost.step import StepModel
from fp8plan.model.kv_cache.plan import KvPlan
from fp8plan.model.limits import EngineLimits
from fp8plan.model.schedule.scheduler import Schedule, schedule
from fp8plan.model.workload import Batch

Z90 = 1.6449  # a normal variable stays within +-Z90 standard deviations 90% of the time
TAIL_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Timeline:
    """One replica over time. Arrays of shape (rows,); a row is a run of alike steps that ends at `seconds`."""

    seconds: FloatArray  # end of the row, from the start of the rollout
    decode_requests: IntArray
    waiting: IntArray
    used_blocks: IntArray
    output_tokens: IntArray  # made in the row


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

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.makespan_s


def schedules(
    batches: Sequence[Batch], kv: KvPlan, limits: EngineLimits, known: Sequence[Schedule] | None = None
) -> list[Schedule]:
    """The schedule of each replica's batch.

    kv:    the KV cache of one replica
    known: the same batches' schedules with another KV cache, taken over where they hold for this one
    """
    reusable = [plan.holds_for(kv.usable_blocks, kv.specs) for plan in known or ()]
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
    batches = [step_batch(plan) for plan in replicas]
    all_steps = model.timed(joined(batches))  # at once: most of the work is per distinct number of tokens
    ends_at = np.cumsum([plan.steps.size for plan in replicas])
    seconds = np.split(all_steps.seconds() * np.concatenate([plan.steps for plan in replicas]), ends_at[:-1])
    slowest = int(np.argmax([row.sum() for row in seconds]))
    batch, plan = batches[slowest], replicas[slowest]
    steps = all_steps.rows(slice(int(ends_at[slowest]) - plan.steps.size, int(ends_at[slowest])))
    starting = start_cost(int(plan.finished.sum()), plan.prompt_tokens, model.profile)
    start = float(starting.seconds[0])
    makespan = start + float(seconds[slowest].sum())
    low, high = (start + end for end in steps.interval(plan.steps, Z90))
    ends: FloatArray = start + np.cumsum(seconds[slowest], dtype=np.float64)
    tail = _tail_rows(plan, model.limits.max_num_seqs)
    breakdown = {name: part * plan.steps for name, part in steps.breakdown().items()}
    breakdown["host"][0] += start
    gradient = steps.gradient(plan.steps)
    for name, partial in starting.partials.items():
        gradient[name] = gradient.get(name, 0.0) + float(partial[0])
    return Rollout(
        makespan_s=makespan,
        makespan_low_s=low,
        makespan_high_s=high,
        output_tokens=sum(int((p.steps * p.sampled_requests).sum()) for p in replicas),
        num_steps=plan.num_steps,
        preemptions=sum(p.num_preemptions for p in replicas),
        recomputed_tokens=sum(int(p.recomputed_tokens.sum()) for p in replicas),
        cached_tokens=sum(int(p.cached_tokens.sum()) for p in replicas),
        tail_fraction=float(seconds[slowest][tail].sum() / makespan),
        parts=_shares({name: float(part.sum()) for name, part in breakdown.items()}),
        tail_parts=_shares({name: float(part[tail].sum()) for name, part in breakdown.items()}),
        extrapolated=tuple(model.outside_hull(batch)),
        timeline=Timeline(
            seconds=ends,
            decode_requests=plan.decode_requests,
            waiting=plan.waiting,
            used_blocks=plan.used_blocks,
            output_tokens=plan.steps * plan.sampled_requests,
        ),
        log_gradient={name: value / makespan for name, value in gradient.items()},
    )


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
    together = min(int(plan.finished.sum()), max_num_seqs)
    busy = np.flatnonzero((plan.waiting > 0) | (plan.running >= TAIL_SHARE * together))
    return slice(int(busy[-1]) + 1, None)


def _shares(seconds: dict[str, float]) -> dict[str, float]:
    """Each part as a fraction of their sum, largest first; {} if the sum is 0."""
    total = sum(seconds.values())
    return {name: part / total for name, part in sorted(seconds.items(), key=lambda x: -x[1]) if total and part}
