"""Predict, apply, watch and check the rollout precision of LLM RL training.

Names are loaded on first use, so `import fp8plan` costs next to nothing. A type checker sees them as imports.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fp8plan.version import __version__ as __version__

if TYPE_CHECKING:
    from fp8plan.errors import Fp8PlanError as Fp8PlanError
    from fp8plan.importers.records import import_rollouts as import_rollouts
    from fp8plan.model.architecture import ModelShape as ModelShape
    from fp8plan.model.distributions import Fixed as Fixed
    from fp8plan.model.distributions import LogNormal as LogNormal
    from fp8plan.model.distributions import Trace as Trace
    from fp8plan.model.hardware import Gpu as Gpu
    from fp8plan.model.hardware import find_gpu as find_gpu
    from fp8plan.model.limits import EngineLimits as EngineLimits
    from fp8plan.model.plan.plan import Plan as Plan
    from fp8plan.model.plan.planner import plan as plan
    from fp8plan.model.precision import Precision as Precision
    from fp8plan.model.profile.library import load_profile as load_profile
    from fp8plan.model.risk.expected import RiskBudget as RiskBudget
    from fp8plan.model.risk.remedies import Remedies as Remedies
    from fp8plan.model.rl_step import StepTimes as StepTimes
    from fp8plan.model.setup import EngineSetup as EngineSetup
    from fp8plan.model.tune.search import tune as tune
    from fp8plan.model.validate.records import read_records as read_records
    from fp8plan.model.validate.records import recorded_workload as recorded_workload
    from fp8plan.model.weight_changes import TopK as TopK
    from fp8plan.model.workload import Batch as Batch
    from fp8plan.model.workload import Workload as Workload
    from fp8plan.model.workload_turns import Turns as Turns
    from fp8plan.runtime.apply.doctor.doctor import Diagnosis as Diagnosis
    from fp8plan.runtime.apply.doctor.doctor import async_doctor as async_doctor
    from fp8plan.runtime.apply.doctor.doctor import doctor as doctor
    from fp8plan.runtime.apply.engine.async_engine import AsyncRolloutEngine as AsyncRolloutEngine
    from fp8plan.runtime.apply.engine.engine import RolloutEngine as RolloutEngine
    from fp8plan.runtime.apply.fleet.fleet import RolloutFleet as RolloutFleet
    from fp8plan.runtime.apply.weight_sync.scored import Scored as Scored
    from fp8plan.runtime.apply.weight_sync.settings import SyncSettings as SyncSettings
    from fp8plan.runtime.measure.probe.probe import probe as probe
    from fp8plan.runtime.replay import replayed as replayed
    from fp8plan.runtime.routes import packed_routes as packed_routes
    from fp8plan.runtime.routes import padded_routes as padded_routes
    from fp8plan.runtime.watch.controller.laws import ConstantThresholds as ConstantThresholds
    from fp8plan.runtime.watch.controller.laws import LevelThresholds as LevelThresholds
    from fp8plan.runtime.watch.controller.state import AlarmLimits as AlarmLimits
    from fp8plan.runtime.watch.correction.correct import Correction as Correction
    from fp8plan.runtime.watch.correction.correct import correct as correct
    from fp8plan.runtime.watch.correction.settings import CorrectionSettings as CorrectionSettings
    from fp8plan.runtime.watch.correction.settings import Rejection as Rejection
    from fp8plan.runtime.watch.correction.settings import Thresholds as Thresholds
    from fp8plan.runtime.watch.correction.verl import from_verl as from_verl
    from fp8plan.runtime.watch.guard.fallback import GuardSettings as GuardSettings
    from fp8plan.runtime.watch.guard.observation import Observation as Observation
    from fp8plan.runtime.watch.guard.observation import observation_of as observation_of
    from fp8plan.runtime.watch.mismatch.measure import measure as measure
    from fp8plan.runtime.watch.mismatch.measure import pack as pack
    from fp8plan.runtime.watch.mismatch.metrics import Mismatch as Mismatch
    from fp8plan.runtime.watch.mismatch.sampling import Sampling as Sampling
    from fp8plan.runtime.watch.mismatch.sampling import kept_logprobs as kept_logprobs
    from fp8plan.runtime.watch.mismatch.turn_versions import turn_versions as turn_versions
    from fp8plan.runtime.watch.monitor.monitor import Monitor as Monitor
    from fp8plan.runtime.watch.monitor.sinks import Callback as Callback
    from fp8plan.runtime.watch.monitor.sinks import JsonLines as JsonLines
    from fp8plan.runtime.watch.monitor.sinks import Prometheus as Prometheus
    from fp8plan.runtime.watch.monitor.sinks import TensorBoard as TensorBoard
    from fp8plan.runtime.watch.monitor.trackers import Trackio as Trackio
    from fp8plan.runtime.watch.monitor.trackers import Wandb as Wandb

# Public name -> its module, read from the imports above, which a type checker alone runs.
with open(__file__, encoding="utf-8") as _file:
    _imports = [line.split() for line in _file if line.startswith("    from fp8plan.")]
_HOME = {name: module for _, module, _, name, *_ in _imports}

__all__ = sorted(_HOME)  # noqa: PLE0605


if not TYPE_CHECKING:  # so that a type checker finds misspelt names

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'fp8plan' has no attribute {name!r}")
        return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
