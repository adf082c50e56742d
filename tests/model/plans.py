"""A small Plan for tests: every precision on one layout, numbers that only have to survive a round trip."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan import Choice, Plan
from fp8plan.model.precision import PRESETS

# What TRL's colocated engine always runs with, so that a plan can be kept there.
TRL_LIMITS = EngineLimits(max_num_batched_tokens=4096)

WORKLOAD = {"prompts": 4, "samples": 8, "max_prompt_tokens": 1024, "max_response_tokens": 7168}


def choice(precision: str, **known: Any) -> Choice:
    numbers = dict.fromkeys(f.name for f in fields(Choice))
    layout = {"precision": precision, "tensor_parallel": 1, "data_parallel": 1, "available": True, "refused_by": {}}
    return Choice(**(numbers | layout | known))


def plan(**changes: Any) -> Plan:
    base = Plan(
        model="Qwen/Qwen3-8B",
        gpu="h200_sxm",
        profile={"kind": "datasheet", "engine_version": "0.26.0", "source": "a test"},
        limits=EngineLimits(),
        workload=dict(WORKLOAD),
        seed=7,
        choices=tuple(choice(name) for name in PRESETS),
        chosen=0,
        thresholds={},
        reasons=("one sentence.", "another one."),
    )
    return replace(base, **changes)


def index(precision: str) -> int:
    """Where `plan()` keeps this precision."""
    return list(PRESETS).index(precision)
