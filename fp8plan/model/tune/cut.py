"""A rollout that is cut when enough responses have ended: the others are aborted, or go on in the next step.

The schedule up to the cut is that of the whole rollout, because no decision of the scheduler depends on what comes
later. A response that goes on has its prompt and its tokens so far as a prompt of its own, which is computed anew: the
weights have changed, so the cache is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from fp8plan.model.cost.base import READS, Array, FloatArray, IntArray, WindowReads
from fp8plan.model.cost.step import StepModel
from fp8plan.model.memory.kv_plan import KvPlan
from fp8plan.model.rollout import Rollout, clocks, rollout, schedules
from fp8plan.model.schedule.scheduler import Schedule
from fp8plan.model.setup import EngineSetup
from fp8plan.model.workload import Batch

LONG = 0.9  # a response counts as long from this quantile of the lengths on
WARM_UP, STEPS = 3, 2  # steps of partial rollouts before those that are averaged, and those


@dataclass(frozen=True, slots=True)
class Cut:
    """A rollout up to its cut. Arrays have one entry for each request, in order over all replicas.

    ended:     True for a response that has ended
    generated: its tokens at the cut, if it has one turn; a lower bound for a response that is preempted later
    rollout:   up to the cut
    """

    ended: Array
    generated: IntArray
    rollout: Rollout


def cut_after(responses: int, batches: Sequence[Batch], planned: Sequence[Schedule], model: StepModel) -> Cut:
    """Cut a rollout when so many responses have ended, on whichever replicas.

    planned: the whole schedules of all replicas, none of them a sample
    """
    ends = clocks([planned], model)[0]
    rows = [_ended(plan) for plan in planned]
    at = np.concatenate([clock[row] for clock, row in zip(ends, rows, strict=True)])
    moment = float(np.sort(at)[min(responses, len(at)) - 1])
    generated, kept = [], []
    for batch, plan, clock, row in zip(batches, planned, ends, rows, strict=True):
        done, part = _past(plan, clock, moment)
        steps = np.append(0, np.cumsum(plan.steps))
        left = steps[row + 1] - steps[done] - part  # steps after the cut
        generated.append(np.clip(batch.responses - left, 0, batch.responses))
        kept.append(_first_rows(plan, done, part))
    return Cut(at <= moment, np.concatenate(generated), rollout(kept, model))


def _past(plan: Schedule, clock: FloatArray, moment: float) -> tuple[int, int]:
    """The rows that have ended by a moment, and the whole steps of the next one."""
    done = int(np.searchsorted(clock, moment, side="right"))
    if done == len(clock):
        return done, 0
    begin = float(clock[done - 1]) if done else 0.0
    return done, int(plan.steps[done] * (moment - begin) / (float(clock[done]) - begin))


def _ended(plan: Schedule) -> IntArray:
    assert plan.ended is not None
    return plan.ended


def _first_rows(plan: Schedule, done: int, part: int) -> Schedule:
    """The schedule up to a cut, with `part` steps of the row after those that are done; at least a step in all."""
    rows = max(1, done + (part > 0))
    by_row = [f.name for f in fields(plan) if f.type in ("IntArray", "FloatArray")]
    columns: dict[str, Any] = {name: getattr(plan, name)[:rows] for name in by_row}
    windows = tuple(replace(x, **{name: getattr(x, name)[:rows] for name in READS}) for x in plan.windows)
    if rows > done:
        before, after = int(plan.steps[done]), max(1, part)
        columns["steps"] = np.append(columns["steps"][:-1], after)
        windows = tuple(_shorter(window, after / before) for window in windows)
    return replace(plan, **columns, windows=windows, ended=None)


def _shorter(window: WindowReads, share: float) -> WindowReads:
    """The reads with this share of the last row's steps. Those of decoding are summed over the steps."""
    reads = window.decode_kv_tokens.copy()
    reads[-1] = round(float(reads[-1]) * share)
    return replace(window, decode_kv_tokens=reads)


@dataclass(frozen=True, slots=True)
class Bias:
    """The cost of aborted responses to the lengths of those that are kept.

    mean_shift: mean length of the kept over that of all, less 1
    long_lost:  share of the long responses that are lost: those from the quantile LONG of the lengths on
    """

    mean_shift: float
    long_lost: float


def bias(lengths: IntArray, kept: Array) -> Bias:
    """The Bias of keeping some responses. lengths: tokens of each, if it had gone on"""
    long = lengths >= np.quantile(lengths, LONG)
    return Bias(float(lengths[kept].mean() / lengths.mean()) - 1, 1 - float(kept[long].mean()))


def drawn(batch: Batch, requests: int, seed: int) -> Batch:
    """So many requests: prompts of the batch in random order, each with its responses, all again if they run out."""
    rng, rows, ids, count = np.random.default_rng(seed), list[IntArray](), list[IntArray](), 0
    while count < requests:
        for prompt in rng.permutation(int(batch.prompt_ids.max()) + 1):
            rows.append(np.flatnonzero(batch.prompt_ids == prompt)[: requests - count])
            ids.append(np.full(len(rows[-1]), len(ids), dtype=np.int64))
            count += len(rows[-1])
    at = np.concatenate([np.zeros(0, dtype=np.int64), *rows])
    return batch.take(at)._replace(prompt_ids=np.concatenate([np.zeros(0, dtype=np.int64), *ids]))


def beside(first: Batch, second: Batch) -> Batch:
    """The requests of both batches, whose prompts are different ones."""
    ids = np.append(first.prompt_ids, second.prompt_ids + first.prompt_ids.max(initial=-1) + 1)
    turns = None
    if first.turns is not None and second.turns is not None:
        turns = first.turns.beside(second.turns)
    return Batch(np.append(first.prompts, second.prompts), np.append(first.responses, second.responses), ids, turns)


@dataclass(frozen=True, slots=True)
class Partial:
    """Steps of partial rollouts, after the first ones.

    rollout:   the last one
    seconds:   of a step's rollout, the mean of STEPS
    old_share: share of the tokens of ended responses that an older policy made
    age:       mean number of steps since those tokens were made; most_age: the largest
    """

    rollout: Rollout
    seconds: float
    old_share: float
    age: float
    most_age: int

    @property
    def lag(self) -> float:
        """The mean number of versions that a token is behind the trainer, which trains on the last step's responses."""
        return 1 + self.old_share * self.age

    @property
    def most_lag(self) -> int:
        """The largest number of versions that a token is behind the trainer."""
        return 1 + self.most_age


def partial_rollouts(
    batch: Batch, share: float, setup: EngineSetup, kv: KvPlan, model: StepModel, warm_up: int = WARM_UP
) -> Partial:
    """Steps that each end with as many responses as the batch has, with `share` more in flight. The rest goes on.

    warm_up: steps before those that are averaged; tokens of at most warm_up + STEPS - 1 steps ago are seen
    """
    wanted, replicas = len(batch.prompts), setup.limits.data_parallel_size
    going = drawn(batch, 0, 0)
    history = np.zeros((0, 0), dtype=np.int64)  # tokens of each request in `going`, by step
    seconds, by_age = list[float](), np.zeros(warm_up + STEPS)
    for step in range(warm_up + STEPS):
        fresh = drawn(batch, max(0, wanted + round(share * wanted) - len(going.prompts)), step)
        both = beside(going, fresh)
        halves = np.split(np.arange(len(both.prompts)), [len(going.prompts)])
        order = [np.concatenate(x) for x in zip(*(np.array_split(half, replicas) for half in halves), strict=True)]
        batches = [both.take(rows) for rows in order]
        cut = cut_after(wanted, batches, schedules(batches, kv, setup.limits), model)
        at = np.concatenate(order)
        before = np.vstack([history, np.zeros((len(fresh.prompts), step), dtype=np.int64)])[at]
        history = np.column_stack([before, cut.generated])
        if step >= warm_up:
            seconds.append(cut.rollout.makespan_s)
            by_age[: step + 1] += history[cut.ended].sum(axis=0)[::-1]
        going, history = _going_on(both.take(at[~cut.ended]), cut.generated[~cut.ended]), history[~cut.ended]
    old, ages = by_age[1:], np.arange(1, len(by_age))
    age = float((old * ages).sum() / max(old.sum(), 1.0))
    most = int(np.flatnonzero(by_age).max())
    return Partial(cut.rollout, float(np.mean(seconds)), float(old.sum() / by_age.sum()), age, most)


def _going_on(left: Batch, made: IntArray) -> Batch:
    """The requests of the next step. One with tokens of its own shares its prompt no longer."""
    own = np.where(made > 0, left.prompt_ids.max(initial=0) + 1 + np.arange(len(made)), left.prompt_ids)
    return Batch(left.prompts + made, left.responses - made, own).take(slice(None))
