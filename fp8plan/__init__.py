"""Predict, apply, watch and check the rollout precision of LLM RL training.

Names are loaded on first use, so that `import fp8plan` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "AdaptiveThresholds": "fp8plan.runtime.controller.laws",
    "AsyncRolloutEngine": "fp8plan.runtime.engine.async_engine",
    "Batch": "fp8plan.model.workload",
    "Callback": "fp8plan.runtime.monitor.sinks",
    "ConstantThresholds": "fp8plan.runtime.controller.laws",
    "CorrectionSettings": "fp8plan.runtime.correction.correct",
    "EngineLimits": "fp8plan.model.limits",
    "EngineSetup": "fp8plan.model.setup",
    "Fixed": "fp8plan.model.workload",
    "Fp8PlanError": "fp8plan.errors",
    "Gpu": "fp8plan.model.hardware",
    "JsonLines": "fp8plan.runtime.monitor.sinks",
    "LeastErrorThresholds": "fp8plan.runtime.controller.laws",
    "LogNormal": "fp8plan.model.workload",
    "ModelShape": "fp8plan.model.architecture",
    "Monitor": "fp8plan.runtime.monitor.monitor",
    "Plan": "fp8plan.model.plan.plan",
    "Precision": "fp8plan.model.precision",
    "Prometheus": "fp8plan.runtime.monitor.exporters",
    "Rejection": "fp8plan.runtime.correction.correct",
    "RiskBudget": "fp8plan.model.risk.expected",
    "RolloutEngine": "fp8plan.runtime.engine.engine",
    "StepTimes": "fp8plan.model.rl_step",
    "SyncSettings": "fp8plan.runtime.weight_sync.state",
    "TensorBoard": "fp8plan.runtime.monitor.exporters",
    "Thresholds": "fp8plan.runtime.correction.correct",
    "Trace": "fp8plan.model.workload",
    "Trainer": "fp8plan.model.rl_step",
    "Workload": "fp8plan.model.workload",
    "find_gpu": "fp8plan.model.hardware",
    "from_verl": "fp8plan.runtime.correction.verl",
    "gpu": "fp8plan.model.hardware",
    "load_profile": "fp8plan.model.profile.library",
    "plan": "fp8plan.model.plan.planner",
    "probe": "fp8plan.runtime.probe.probe",
}

__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fp8plan' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
