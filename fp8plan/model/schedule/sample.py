"""The schedule of a batch that is too large to simulate whole, from a sample.

A long rollout fills up, goes on with as much work in flight as slots and blocks allow, and runs dry. Requests are
admitted in order of arrival. In the middle part the number of waiting requests changes nothing. So a sample keeps the
head and the end of the batch, and prompts spread evenly over its middle. The middle's rows then count several times,
until all response tokens of the batch are made.

When the middle begins, only few of the first requests in flight may be left. `_memory_steps` gives the steps until
then, and the sample grows until its head lasts as long. A batch of which that takes more than half is simulated
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fp8plan.model.cost.base import IntArray
from fp8plan.model.schedule.scheduler import Sampled, Schedule
from fp8plan.model.workload import Batch

SAMPLE = 10_000  # least requests of a sample
HEAD, END = 0.2, 0.1  # shares of the sample
LEFT = 0.01  # share of the work in flight that may still be from the start when the middle begins
PIECE = 128  # most requests of one prompt that a sample takes or leaves out together
DRAWS = 200  # random samples, of which the one most like the batch is used


@dataclass(frozen=True, slots=True)
class Sample:
    """Requests that represent a batch. In order of arrival, those from `start` to `end` are a sample of its middle."""

    batch: Batch
    start: int
    end: int


def schedules_of(batches: Sequence[Batch], simulate: Callable[[Batch], Schedule], size: int = SAMPLE) -> list[Schedule]:
    """The schedules of several replicas, whose batches are nearly alike and too large to simulate whole.

    simulate: a function from a batch to the schedule of all its requests
    size:     least requests to simulate

    The replica with most response tokens is simulated, and the others go at its pace. With a sample for each, the worst
    sample would make the slowest replica.
    """
    longest = max(batches, key=lambda batch: int(batch.responses.sum()))
    memory = _memory_steps(longest.responses)
    while 2 * size <= len(longest.prompts):
        sample = sample_of(longest, size)
        plan = simulate(sample.batch)
        begins, ends = (_first_admitting(plan, request) for request in (sample.start, sample.end))
        before, within = int(plan.steps[:begins].sum()), int(plan.steps[begins:ends].sum())
        if before >= memory and ends > begins:
            return [_repeated(plan, slice(begins, ends), batch) for batch in batches]
        admitted = (sample.end - sample.start) / max(within, 1)  # requests a step
        size = max(2 * size, int((sample.start + 1.1 * (memory - before) * admitted) / HEAD))
    return [simulate(batch) for batch in batches]


def sample_of(batch: Batch, size: int) -> Sample:
    """About `size` requests of a batch: its head, its end, and prompts spread evenly over its middle."""
    ids = batch.prompt_ids
    begins = np.flatnonzero(np.diff(ids, prepend=ids[0] - 1))  # runs of one prompt
    lengths = np.diff(begins, append=len(ids))
    pieces = np.repeat(begins, -(-lengths // PIECE))  # long runs are cut
    pieces += PIECE * (np.arange(len(pieces)) - np.searchsorted(pieces, pieces))
    bounds = np.append(pieces, len(ids))
    first = int(np.searchsorted(bounds, size * HEAD))
    last = int(np.searchsorted(bounds, len(ids) - size * END, side="right")) - 1
    head, end = int(bounds[first]), int(bounds[last])
    strata = np.linspace(first, last, max(1, round((last - first) * size * (1 - HEAD - END) / (end - head))) + 1)
    chosen = _alike(batch, bounds, strata.astype(int))
    rows = np.concatenate(
        [np.arange(head), *(np.arange(bounds[i], bounds[i + 1]) for i in chosen), np.arange(end, len(ids))]
    )
    return Sample(batch.take(rows), head, len(rows) - (len(ids) - end))


def _alike(batch: Batch, bounds: IntArray, strata: IntArray) -> IntArray:
    """A piece from each stratum; together they are most like all pieces of the strata.

    The best of DRAWS random draws comes nearest in three ratios, which decide the pace: requests, prompt tokens and KV
    tokens to read, each per response token.
    """
    prompts, responses = batch.prompts.astype(np.float64), batch.responses.astype(np.float64)
    work = np.stack([responses, np.ones_like(responses), prompts, responses * (prompts + responses / 2)])
    pieces = np.add.reduceat(work, bounds[:-1], axis=1)
    count = max(1, min(DRAWS, 1_000_000 // len(strata)))  # any large sample is like the batch
    draws = np.random.default_rng(0).integers(strata[:-1], strata[1:], (count, len(strata) - 1))
    tokens, *drawn = pieces[:, draws].sum(axis=2)
    of_all, *wanted = pieces[:, strata[0] : strata[-1]].sum(axis=1)
    off = [(x / tokens) / (y / of_all) - 1 for x, y in zip(drawn, wanted, strict=True)]
    best: IntArray = draws[int(np.argmin(np.square(off).sum(axis=0)))]
    return best


def _memory_steps(responses: IntArray) -> float:
    """Steps after which at most the share LEFT of the work in flight is from the start.

    After t steps, sum(max(length - t, 0)) / sum(length) of the slots still belong to the first requests.
    """
    lengths = np.sort(responses)[::-1].astype(np.float64)
    counts = np.arange(1, len(lengths) + 1)
    left = np.cumsum(lengths) - counts * lengths  # at t = lengths[i]; grows as t falls
    return float(lengths[int(np.searchsorted(left, LEFT * lengths.sum(), side="right")) - 1])


def _first_admitting(plan: Schedule, request: int) -> int:
    """The first row after which request number `request` in order of arrival is admitted."""
    admitted = np.maximum.accumulate(plan.requests - plan.waiting)
    return int(np.searchsorted(admitted, request, side="right"))


def _repeated(plan: Schedule, middle: slice, batch: Batch) -> Schedule:
    """The schedule of a batch from that of its sample: each row of the middle counts several times."""
    made = plan.steps * plan.sampled_requests
    left_out = int(batch.responses.sum() - made.sum())
    repeats = np.ones(len(plan.steps))
    repeats[middle] += left_out / made[middle].sum()
    waiting, behind = plan.waiting.copy(), len(batch.prompts) - plan.requests
    waiting[: middle.start] += behind
    passed = np.cumsum(made[middle]) / made[middle].sum()
    waiting[middle] += np.rint(behind * (1 - passed)).astype(np.int64)
    return replace(
        plan,
        waiting=waiting,
        prompt_tokens=int(batch.prompts.sum()),
        requests=len(batch.prompts),
        sampled=Sampled(repeats, plan.requests),
        ended=None,
    )
