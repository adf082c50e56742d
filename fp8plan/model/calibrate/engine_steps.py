"""Measured engine steps: a rollout record and its trace, cut into windows of time with the steps that ran in each.

Times are the engine's own clock (core_s). The front end sees the same steps with pauses of 0.3 to 1.2 s now and then,
made up for in the next steps; where a trace has its clock only (t_s), windows must be long. A window is matched to the
schedule by the number of tokens given so far, which both the trace and the schedule count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fp8plan.errors import ConfigError
from fp8plan.jsonl import rows
from fp8plan.model.cost.base import Array, Cost, FloatArray, StepBatch
from fp8plan.model.cost.host import start_cost
from fp8plan.model.kv_cache.plan import KvPlan
from fp8plan.model.profile.profile import Profile
from fp8plan.model.rollout import schedule_with, step_batch
from fp8plan.model.schedule.scheduler import Schedule
from fp8plan.model.validate.records import Record

WINDOW_S, FRONT_END_WINDOW_S = 0.5, 12.0
FEWEST_STEPS = 8  # of a window


@dataclass(frozen=True, slots=True)
class Windows:
    """Consecutive windows of one rollout.

    seconds: measured, shape (windows,)
    weights: how often each row of `batch` ran in each window, shape (windows, rows)
    batch:   the rows of the rollout's schedule
    engine:  model and precision; windows of one engine share what the model gets wrong about it
    """

    record: Record
    engine: str
    batch: StepBatch
    weights: FloatArray
    seconds: FloatArray

    def cost(self, profile: Profile) -> Cost:
        """Predicted seconds of each window with their partials, shape (windows,)."""
        model = self.record.setup.step_model(profile, self.record.fields.get("experts_hit"))
        steps = model.cost(self.batch)
        partials = {name: self.weights @ partial for name, partial in steps.partials.items()}
        prompts, first = self.record.batch.prompts, np.eye(1, self.seconds.size)[0]
        start = start_cost(prompts.size, int(prompts.sum()), profile).scaled(first)
        return Cost(self.weights @ steps.seconds, partials) + start


def read_traces(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """The trace of each record, by the record's key, as fp8plan.runtime.measure.rollouts.run wrote it; columns per
    step.
    """
    return {row["key"]: row for path in paths for row in rows(path)}


def windows(record: Record, trace: dict[str, Any]) -> Windows:
    """Cut one rollout into windows. Its KV pool is the measured one, so that preemptions are the engine's and not the
    model's.

    Raises ConfigError if the record does not say how large its pool was.
    """
    planned = schedule_with(record.batch, measured_kv(record), record.limits)
    tokens = np.cumsum(trace["generation_tokens"])
    own = trace.get("core_s")
    times = np.asarray(own or trace["t_s"])
    cuts = _cuts(times, WINDOW_S if own else FRONT_END_WINDOW_S)
    edges_s, edges_tokens = np.append(0.0, times[cuts]), np.append(0, tokens[cuts])
    return Windows(
        record=record,
        engine=f"{record.fields['model']} {record.fields['precision']}",
        batch=step_batch(planned),
        weights=overlap(planned, edges_tokens),
        seconds=np.diff(edges_s),
    )


def measured_kv(record: Record) -> KvPlan:
    """The KV cache that a rollout ran with. Raises ConfigError if the record does not say how large its pool was."""
    fields, setup = record.fields, record.setup
    if fields.get("num_gpu_blocks") is not None:
        return setup.kv_plan(fields["num_gpu_blocks"])
    if fields.get("measured_kv_cache_tokens") is None:
        raise ConfigError(f"line {record.line}: measured_kv_cache_tokens is missing; steps need the pool they ran in")
    return setup.kv_plan(setup.blocks_in(fields["measured_kv_cache_tokens"]))


def _cuts(times: FloatArray, window_s: float) -> list[int]:
    """The indices of the steps that end a window; the last step ends the last one."""
    cuts, begun, last = [], 0.0, -1
    for i, time in enumerate(times):
        if time - begun >= window_s and i - last >= FEWEST_STEPS:
            cuts.append(i)
            begun, last = float(time), i
    end = len(times) - 1
    if cuts and cuts[-1] != end and times[end] - begun < window_s / 2:
        cuts[-1] = end
    elif not cuts or cuts[-1] != end:
        cuts.append(end)
    return cuts


def overlap(planned: Schedule, edges: Array) -> FloatArray:
    """The number of steps of each row between token counts `edges`, shape (len(edges) - 1, rows).

    A row gives its tokens evenly; one that gives none belongs to the window in which the next token comes.
    """
    given = planned.steps * planned.sampled_requests
    end = np.cumsum(given)
    begin, total = end - given, end[-1]
    edges = edges * (total / edges[-1])  # equal unless the trace lost its last line
    low, high = edges[:-1, None], edges[1:, None]
    share = (np.minimum(high, end) - np.maximum(low, begin)).clip(min=0) / np.maximum(given, 1)
    silent = (given == 0) & (low <= begin) & (begin < high)
    return np.asarray((share + silent) * planned.steps, dtype=np.float64)
