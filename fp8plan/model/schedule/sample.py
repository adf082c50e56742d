"""Schedules of batches that are too large to simulate whole, made from a sample of their requests.

A long rollout has three parts. It fills up, it goes on with as much work in flight as slots and blocks allow, and it
runs dry. Requests are admitted in order of arrival, so the middle of a batch is served in the middle part alone, and
there nothing depends on how many requests still wait. A sample therefore keeps the head and the end of the batch as
they are, and of the middle some prompts that are spread evenly over it. The rows in which they are admitted then take
place several times each, so often that all response tokens of the batch are made.

The head must be long enough that the middle begins in the state that lasts: few of the requests that were in flight at
the start may be left. `_memory_steps` says how long that takes, and the sample grows until its head lasts as long. A
batch of which it would take more than half is simulated whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fp8plan.model.cost.base import Array, IntArray
from fp8plan.model.schedule.scheduler import Sampled, Schedule
from fp8plan.model.workload import Batch

WHOLE = 20_000  # requests of a replica that are simulated whole
SAMPLE = 10_000  # requests of a larger one that are simulated, at least
HEAD, END = 0.2, 0.1  # of the sample
LEFT = 0.01  # of the work in flight that may be older than the head
PIECE = 128  # most requests of one prompt that are left out or taken together
DRAWS = 200  # of which the sample is the one most like the batch
CHUNKS = 10  # of the middle, whose paces are compared


@dataclass(frozen=True, slots=True)
class Sample:
    """Requests that stand for a batch. Those from `start` to `end` in order of arrival are a sample of the middle."""

    batch: Batch
    start: int
    end: int


def schedules_of(batches: Sequence[Batch], simulate: Callable[[Batch], Schedule], size: int = SAMPLE) -> list[Schedule]:
    """The schedules of the batches of several replicas, nearly alike parts of one that is too large to simulate whole.

    simulate: gives the schedule of all requests of a batch
    size:     requests to simulate, at least

    The replica with most response tokens is simulated, and the other ones go at its pace. With a sample for each, the
    slowest would be the one whose sample is furthest off.
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
    """About `size` requests of a batch: its head, its end, and prompts spread evenly over what is between them."""
    ids = batch.prompt_ids
    begins = np.flatnonzero(np.diff(ids, prepend=ids[0] - 1))  # runs of one prompt
    lengths = np.diff(begins, append=len(ids))
    pieces = np.repeat(begins, -(-lengths // PIECE))  # the same, cut where they are long
    pieces += PIECE * (np.arange(len(pieces)) - np.searchsorted(pieces, pieces))
    bounds = np.append(pieces, len(ids))
    first = int(np.searchsorted(bounds, size * HEAD))
    last = int(np.searchsorted(bounds, len(ids) - size * END, side="right")) - 1
    head, end = int(bounds[first]), int(bounds[last])
    strata = np.linspace(first, last, max(1, round((last - first) * size * (1 - HEAD - END) / (end - head))) + 1)
    taken = _alike(batch, bounds, strata.astype(int))
    rows = np.concatenate(
        [np.arange(head), *(np.arange(bounds[i], bounds[i + 1]) for i in taken), np.arange(end, len(ids))]
    )
    return Sample(batch.take(rows), head, len(rows) - (len(ids) - end))


def _alike(batch: Batch, bounds: IntArray, strata: IntArray) -> IntArray:
    """A piece from each stratum, such that all together are most like all pieces in these strata.

    Of DRAWS random draws, the one is taken whose requests, prompt tokens and KV tokens to read are nearest, for as many
    response tokens: they decide the pace.
    """
    prompts, responses = batch.prompts.astype(np.float64), batch.responses.astype(np.float64)
    work = np.stack([responses, np.ones_like(responses), prompts, responses * (prompts + responses / 2)])
    pieces = np.add.reduceat(work, bounds[:-1], axis=1)
    many = max(1, min(DRAWS, 1_000_000 // len(strata)))  # a large sample is like the batch in any draw
    draws = np.random.default_rng(0).integers(strata[:-1], strata[1:], (many, len(strata) - 1))
    tokens, *drawn = pieces[:, draws].sum(axis=2)
    of_all, *wanted = pieces[:, strata[0] : strata[-1]].sum(axis=1)
    off = [(x / tokens) / (y / of_all) - 1 for x, y in zip(drawn, wanted, strict=True)]
    best: IntArray = draws[int(np.argmin(np.square(off).sum(axis=0)))]
    return best


def pace_error(plan: Schedule, seconds: Array) -> float:
    """The standard deviation of the log of the makespan that comes from simulating a sample; 0 without one.

    seconds: of each row, all its steps and repeats together, shape (rows,)

    The sample's middle is cut into CHUNKS of as many tokens. How far the pace of one is from that of the next says how
    far the mean of all may be off. A trend over the batch is no error: the sample follows it.
    """
    if plan.sampled is None:
        return 0.0
    middle = plan.sampled.repeats > 1
    tokens = np.cumsum((plan.weights * plan.sampled_requests)[middle])
    times = np.cumsum(seconds[middle])
    ends = np.interp(np.linspace(0, tokens[-1], CHUNKS + 1), np.append(0, tokens), np.append(0, times))
    paces = np.diff(ends)
    of_mean = float(np.sqrt(np.mean(np.diff(paces) ** 2) / 2 / CHUNKS)) * CHUNKS
    return of_mean / float(seconds.sum())


def _memory_steps(responses: IntArray) -> float:
    """Steps after which at most LEFT of the work in flight was there before.

    Of the slots, sum(max(length - t, 0)) / sum(length) are still held by requests that held them t steps earlier.
    """
    lengths = np.sort(responses)[::-1].astype(np.float64)
    counts = np.arange(1, len(lengths) + 1)
    left = np.cumsum(lengths) - counts * lengths  # at t = lengths[i]; grows as t falls
    return float(lengths[int(np.searchsorted(left, LEFT * lengths.sum(), side="right")) - 1])


def _first_admitting(plan: Schedule, request: int) -> int:
    """The first row after which the request that arrived as number `request` has been admitted."""
    admitted = np.maximum.accumulate(plan.requests - plan.waiting)
    return int(np.searchsorted(admitted, request, side="right"))


def _repeated(plan: Schedule, middle: slice, batch: Batch) -> Schedule:
    """The schedule of a sample as that of its batch: each row of the middle stands for several."""
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
    )
