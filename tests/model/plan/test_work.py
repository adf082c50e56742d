"""The work behind a plan: simulated requests and rows, whose number no busy machine changes.

docs/evidence/speed.md has the seconds of these commands.
"""

from __future__ import annotations

from typing import Any

import pytest

from fp8plan.model import rollout
from fp8plan.model.distributions import Distribution, Fixed, LogNormal
from fp8plan.model.plan.planner import predict
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.schedule.scheduler import Schedule
from fp8plan.model.workload import Workload

LONG_TAILED = LogNormal(6000, 0.9, 20480)


@pytest.mark.parametrize(
    ("gpu", "gpus", "prompts", "lengths", "most_schedules", "most_requests", "most_rows"),
    [
        pytest.param("h100", 8, 1024, LogNormal(6000, 0.9, 16384), 67, 280_000, 2_150_000, id="every layout of 8 GPUs"),
        pytest.param(
            "h200", None, 62_500, LONG_TAILED, 5, 51_000, 630_000, id="a million responses", marks=pytest.mark.slow
        ),
        pytest.param(
            "h200",
            None,
            62_500,
            Fixed(4096),
            5,
            51_000,
            205_000,
            id="a million responses of one length",
            marks=pytest.mark.slow,
        ),
        pytest.param("h200", 8, 32, LONG_TAILED, 15, 2_100, 3_900, id="an ample pool is simulated once"),
    ],
)
def test_a_plan_simulates_no_more_than_this(
    monkeypatch: pytest.MonkeyPatch,
    gpu: str,
    gpus: int | None,
    prompts: int,
    lengths: Distribution,
    most_schedules: int,
    most_requests: int,
    most_rows: int,
) -> None:
    made: list[Schedule] = []
    simulate = rollout.schedule

    def counted(*arguments: Any) -> Schedule:
        made.append(simulate(*arguments))
        return made[-1]

    monkeypatch.setattr(rollout, "schedule", counted)
    predict(PlanRequest("Qwen/Qwen3-8B", gpu, Workload(prompts, 16, Fixed(1024), lengths), gpus=gpus))
    assert len(made) <= most_schedules
    assert sum(plan.requests for plan in made) <= most_requests
    assert sum(len(plan.steps) for plan in made) <= most_rows
