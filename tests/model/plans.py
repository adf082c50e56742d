"""A small Plan for tests: every precision on one layout, numbers that only have to survive a round trip."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.choice import Choice
from fp8plan.model.plan.plan import PREDICTED, Plan
from fp8plan.model.precision import PRESETS
from fp8plan.version import DEFAULT_VERSION

# What TRL's colocated engine always runs with, so that a plan can be kept there.
TRL_LIMITS = EngineLimits(max_num_batched_tokens=4096)

WORKLOAD = {"prompts": 4, "samples": 8, "max_prompt_tokens": 1024, "max_response_tokens": 7168}


def choice(precision: str, **known: Any) -> Choice:
    """Without any figure but those that are given."""
    numbers = dict.fromkeys(f.name for f in fields(Choice))
    layout = {"precision": precision, "tensor_parallel": 1, "data_parallel": 1, "available": True, "refused_by": {}}
    return Choice(**(numbers | layout | {"expert_parallel": False, "rests_on": {}} | known))


def plan(**changes: Any) -> Plan:
    base = Plan(
        model="Qwen/Qwen3-8B",
        gpu="h200_sxm",
        profile={"kind": "datasheet", "engine_version": DEFAULT_VERSION, "source": "a test"},
        limits=EngineLimits(),
        workload=dict(WORKLOAD),
        engine_version=DEFAULT_VERSION,
        seed=7,
        choices=tuple(choice(name) for name in PRESETS),
        chosen=0,
        thresholds={},
        reasons=("one sentence.", "another one."),
    )
    return replace(base, **changes)


def predicted(precision: str, **known: Any) -> Choice:
    """With every figure that a choice which can run must have."""
    figures: dict[str, Any] = dict.fromkeys(PREDICTED, 1.0)
    return choice(
        precision, **figures | {"kv_cache_tokens": 1, "preemptions": 0, "risk": "low", "extrapolated": False} | known
    )


def saved(**changes: Any) -> Plan:
    """`plan`, as it is after a prediction, so that it can be read back."""
    return plan(**{"choices": tuple(predicted(name) for name in PRESETS), **changes})


def index(precision: str) -> int:
    """The place of this precision among the choices of `plan()`."""
    return list(PRESETS).index(precision)
