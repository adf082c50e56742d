"""A rollout is timed again while something disturbed it that is not the engine's: a slow host, a kernel compiled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from fp8plan.runtime.engine.warm_up import compiled_files
from fp8plan.runtime.measure.rollouts.host import QUIET, Host
from fp8plan.runtime.measure.rollouts.timed_rollout import timed
from fp8plan.runtime.measure.rollouts.trace import Row, Trace
from fp8plan.runtime.measure.rollouts.watch import Watch

# So many attempts, and none once the first have taken so long.
TRIES, AGAIN_S = 4, 4.0


class Attempt(NamedTuple):
    """One timed run: what its record says of it, the rows of its trace, and when it ended."""

    facts: dict[str, Any]
    steps: list[Row]
    date: str


def attempts(
    llm: Any, prompts: Sequence[Any], responses: Sequence[int], trace: Trace, host: Host | None
) -> list[Attempt]:
    """Time the run, and again as long as the last was disturbed, TRIES times and AGAIN_S seconds at most."""
    tries: list[Attempt] = []
    begun = time.perf_counter()
    while not tries or (any(disturbance(tries[-1])) and len(tries) < TRIES and time.perf_counter() - begun < AGAIN_S):
        if host is not None:
            host.settle()
        before = compiled_files()
        with Watch(host) as watch:
            result = timed(llm, prompts, responses, trace.start) | trace.slowest()
        result |= watch.facts | {"compiled_files": compiled_files() - before}
        tries.append(Attempt(result, list(trace.rows), datetime.now(UTC).isoformat()))
    return tries


def disturbance(attempt: Attempt) -> tuple[int, float]:
    """Disturbances of a run that are not the engine's: (files compiled, excess of the host's slowdown).

    (0, 0) is clean. The pair decides what is repeated and which attempt is kept; it does not depend on how long the run
    took.
    """
    slowdown = attempt.facts["host_slowdown"] or 1.0
    return attempt.facts["compiled_files"], max(slowdown - QUIET, 0.0)


def listed(tries: Sequence[Attempt]) -> str:
    """The attempts, for a note; empty for a single one."""
    times = ", ".join(f"{x.facts['seconds']:.2f} s (host {x.facts['host_slowdown'] or 1:.2f})" for x in tries)
    return f"; of {len(tries)} attempts: {times}" if len(tries) > 1 else ""
