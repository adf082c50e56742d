"""A plan's thresholds as the correction of a trainer's batches, and a Monitor's step as figures for a trainer's log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from fp8plan import schemas
from fp8plan.errors import ConfigError
from fp8plan.runtime.controller.state import Escalation
from fp8plan.runtime.correction.settings import CorrectionSettings, Level, Mode, Rejection, Thresholds
from fp8plan.runtime.guard.fallback import DEPTH, Action, stepped_down

if TYPE_CHECKING:
    from fp8plan.model.precision import Precision
    from fp8plan.runtime.monitor.record import Step
    from fp8plan.runtime.weight_sync.state import SyncReport

# A plan's thresholds that are weights, the first of which that it has is taken; and those that drop sequences beside.
WEIGHTS: Final[dict[str, tuple[Level, Mode]]] = {
    "token_tis": ("token", "tis"),
    "sequence_tis": ("sequence", "tis"),
    "token_mis": ("token", "icepop"),
}
DROPPED: Final[dict[str, Any]] = {"sequence_mis": "seq_sum", "geometric_mis": "seq_mean"}

# Figures of a Monitor's step that go into a trainer's log, by their names in a run file; there they lose verl's prefix.
LOGGED: Final = (
    "rollout_corr/kl", "rollout_corr/k3_kl", "fp8plan/k3_robust", "fp8plan/ess_raw", schemas.ESS,
    schemas.CLIP_FRACTION, schemas.CLIPPED_MASS, schemas.LOST_TOKENS, schemas.LOST_SEQUENCES, schemas.TIS,
    schemas.BAND_LOW, schemas.BAND_HIGH, "fp8plan/alarms", "fp8plan/invalid", schemas.TOKENS_PER_S, schemas.PREDICTED,
    schemas.PREDICTED_LOW, schemas.PREDICTED_HIGH,
)  # fmt: skip


def settings_of(thresholds: Mapping[str, Any]) -> CorrectionSettings:
    """The correction that a plan's thresholds ask for; without any, token TIS at C = 2.

    Raises ConfigError for two weights.
    """
    weights = [name for name in WEIGHTS if name in thresholds]
    if len(weights) > 1:
        raise ConfigError(f"the plan asks for {' and '.join(weights)}; allowed: one importance weight")
    if not weights:
        return CorrectionSettings(reject=dropped(thresholds))
    level, mode = WEIGHTS[weights[0]]
    bound = thresholds[weights[0]]
    bounds = Thresholds(tis=bound) if mode == "tis" else Thresholds(tis=None, band=(*bound,))
    return CorrectionSettings(level, mode, bounds, dropped(thresholds))


def dropped(thresholds: Mapping[str, Any]) -> tuple[Rejection, ...]:
    """The rejections of sequences that a plan's thresholds ask for."""
    bands = {over: thresholds[name] for name, over in DROPPED.items() if name in thresholds}
    return tuple(Rejection(over, "k1", high, low) for over, (low, high) in bands.items())


def metrics_of(step: Step, preset: Precision, report: SyncReport | None) -> dict[str, float]:
    """The findings of a step and the last sync, and the precision that runs, under the names of a trainer's log.

    What is not known is left out.
    """
    found = {f"fp8plan/{name.partition('/')[2]}": step.metrics.get(name) for name in LOGGED}
    found |= {"fp8plan/fp8_weights": float(preset.weights != "bf16"), "fp8plan/fp8_kv": float(preset.kv == "fp8")}
    found |= dict(_judged(step)) | dict(_synced(report))
    return {name: value for name, value in found.items() if value is not None}


def _judged(step: Step) -> Iterator[tuple[str, float]]:
    """The guard's verdict: whether the gain arrives, and how far down the ladder its advice leads (0: nothing)."""
    if step.verdict is not None:
        yield "fp8plan/speed_ratio", step.verdict.ratio
        yield "fp8plan/as_fast_as_predicted", float(step.verdict.as_fast)
        yield "fp8plan/advice", float(DEPTH[step.verdict.action])


def _synced(report: SyncReport | None) -> Iterator[tuple[str, float | None]]:
    if report is not None:
        yield "fp8plan/sync_s", report.seconds["total"]
        yield "fp8plan/sync_compared", float(report.compared)
        yield "fp8plan/weight_error", report.weight_error


def safer_than(running: str, action: Action, escalate: Escalation | None) -> str | None:
    """The precision that the guard, or else the controller, advises to step down to; None if that is not advised.

    running: preset of the engine. KV scales are measured at each sync, so advice to do that needs nothing
    """
    if action not in (Action.NONE, Action.RECALIBRATE_KV):
        return stepped_down(running, action)
    return "bf16" if escalate == Escalation.STEP_DOWN and running != "bf16" else None
