"""A finite batch of rollouts on one GPU setting: its schedule, timed step by step -> makespan and timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

from fp8plan.model.arrays import FloatArray, IntArray
from fp8plan.model.batch import StepBatch
from fp8plan.model.limits import EngineLimits
from fp8plan.model.scheduler import Schedule, schedule
from fp8plan.model.step import StepModel
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
    """What rolling out one batch costs.

    makespan_s:          from the first step to the last token of the slowest replica; low and high: 90% interval
    output_tokens:       response tokens of all replicas
    preemptions:         of all replicas
    recomputed_tokens:   tokens whose KV was thrown away by a preemption
    cached_tokens:       tokens the prefix cache saved from prefill
    tail_fraction:       share of the makespan after the decode batch last held a quarter of its largest size
    extrapolated:        reasons why the profile was not measured for this; empty when it was
    timeline:            of the slowest replica
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
    extrapolated: tuple[str, ...]
    timeline: Timeline

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.makespan_s


def schedules(batches: Sequence[Batch], pools: Sequence[int], limits: EngineLimits) -> list[list[Schedule]]:
    """For each pool size (KV blocks), the schedule of each replica's batch.

    A larger pool is scheduled first: while it neither preempts nor runs short, the smaller one has the same schedule.
    """
    found: dict[int, list[Schedule]] = {}
    larger: list[Schedule] = []
    for pool in sorted(set(pools), reverse=True):
        found[pool] = [
            larger[replica] if larger and _same_in(pool, larger[replica]) else schedule(*batch, pool, limits)
            for replica, batch in enumerate(batches)
        ]
        larger = found[pool]
    return [found[pool] for pool in pools]


def _same_in(pool: int, plan: Schedule) -> bool:
    return plan.blocks_wanted is not None and plan.blocks_wanted <= pool


def rollout(replicas: Sequence[Schedule], model: StepModel) -> Rollout:
    """Time the schedules of all replicas of one engine setting.

    A step's time is linear in the KV tokens read but for kinks where a kernel's bound changes, so a run of alike
    steps costs its length times the step at its mean KV.
    """
    timed = [(step_batch(plan), plan) for plan in replicas]
    seconds = [model.seconds(batch) * plan.steps for batch, plan in timed]
    slowest = int(np.argmax([row.sum() for row in seconds]))
    batch, plan = timed[slowest]
    makespan = float(seconds[slowest].sum())
    spread = exp(Z90 * model.interval_sigma(batch, plan.steps))
    ends: FloatArray = np.cumsum(seconds[slowest], dtype=np.float64)
    return Rollout(
        makespan_s=makespan,
        makespan_low_s=makespan / spread,
        makespan_high_s=makespan * spread,
        output_tokens=sum(int((p.steps * p.sampled_requests).sum()) for p in replicas),
        num_steps=plan.num_steps,
        preemptions=sum(p.num_preemptions for p in replicas),
        recomputed_tokens=sum(int(p.recomputed_tokens.sum()) for p in replicas),
        cached_tokens=sum(int(p.cached_tokens.sum()) for p in replicas),
        tail_fraction=_tail_fraction(plan, ends),
        extrapolated=tuple(model.outside_hull(batch)),
        timeline=Timeline(
            seconds=ends,
            decode_requests=plan.decode_requests,
            waiting=plan.waiting,
            used_blocks=plan.used_blocks,
            output_tokens=plan.steps * plan.sampled_requests,
        ),
    )


def step_batch(plan: Schedule) -> StepBatch:
    """The mean step of each row."""
    return StepBatch(
        decode_requests=plan.decode_requests,
        decode_kv_tokens=plan.decode_kv_tokens + plan.decode_requests * (plan.steps - 1) / 2,
        prefill_tokens=plan.prefill_tokens,
        prefill_requests=plan.prefill_requests,
        prefill_kv_tokens=plan.prefill_kv_tokens,
        prefill_pairs=plan.prefill_pairs,
        sampled_requests=plan.sampled_requests,
    )


def _tail_fraction(plan: Schedule, ends: FloatArray) -> float:
    full = np.flatnonzero(plan.decode_requests >= TAIL_SHARE * plan.decode_requests.max())
    return float(1 - ends[full[-1]] / ends[-1])
