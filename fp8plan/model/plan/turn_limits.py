"""The limit of a rollout of turns: tools, the KV cache, the tail, or compute.

The rollout is simulated without waits for tools, and with an endless cache. What saves the larger share of its time is
the limit, or the tail, if its share is larger. If none reaches LEAST_SAVED, compute is the limit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from fp8plan.model.rollout import Rollout, Simulated, makespans, schedules
from fp8plan.model.schedule.scheduler import Schedule
from fp8plan.model.workload import Batch

ENDLESS: Final = 2**40  # blocks of a KV cache that no rollout fills
LEAST_SAVED: Final = 0.1


def rescheduled(timed: Simulated, batch: Batch, blocks: int | None = None) -> list[Schedule]:
    """The schedules of another batch on the engine of a simulated rollout of turns.

    blocks: of the KV cache of each replica; None: the engine's own number
    """
    kv = timed.memory.kv if blocks is None else replace(timed.memory.kv, num_blocks=blocks)
    limits = timed.model.limits
    return schedules(batch.split(limits.data_parallel_size), kv, limits, clock=timed.clock)


def with_limit(timed: Simulated, batch: Batch) -> Rollout:
    """The rollout of a batch of turns, with two more entries of `turns`.

    "saves": what may limit it -> the share of the makespan that goes with it, at least 0; "limit": the limit's name
    """
    rollout, turns = timed.rollout, batch.turns
    assert turns is not None
    assert rollout.turns is not None
    at_once = batch._replace(turns=turns._replace(wait_s=np.zeros_like(turns.wait_s)))
    others = makespans([rescheduled(timed, at_once), rescheduled(timed, batch, ENDLESS)], timed.model)
    without_waits, endless = (max(0.0, 1 - seconds / rollout.makespan_s) for seconds in others)
    saves = {"tools": without_waits, "cache": endless, "tail": rollout.tail_fraction}
    limit = max(saves, key=lambda name: saves[name])
    if saves[limit] < LEAST_SAVED:
        limit = "compute"
    return replace(rollout, turns=rollout.turns | {"saves": saves, "limit": limit})
