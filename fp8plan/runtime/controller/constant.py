"""The trivial controller: it makes the interface testable, and is what everybody else has."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from fp8plan.runtime.controller.alarms import AlarmLimits, alarms
from fp8plan.runtime.controller.state import Alarm, ControllerState, Decided, Decision, escalation, resumed, strain
from fp8plan.runtime.controller.watch import observed, predicted_kl, usable
from fp8plan.runtime.correction.correct import Thresholds

if TYPE_CHECKING:
    from fp8plan.model.plan.plan import Plan
    from fp8plan.runtime.mismatch.metrics import Mismatch

Update = tuple[Thresholds, ControllerState, Decided]
NO_DATA: Final = Decided(Decision.NO_DATA, "no valid token, or a figure that is not a number")
PATIENCE: Final = 3  # batches that an escalation has to help, before the next one


@dataclass(frozen=True, slots=True)
class ConstantThresholds:
    """The same thresholds in every step. The alarms sound all the same.

    tis, band: as in Thresholds
    limit_kl:  k3 per token above which the KL alarm sounds, unless a plan predicts a range for the model
    """

    tis: float | None = 2.0
    band: tuple[float, float] | None = None
    limit_kl: float = 0.03
    limits: AlarmLimits = field(default_factory=AlarmLimits)

    def __post_init__(self) -> None:
        Thresholds(self.tis, self.band)  # raises ConfigError for what cannot be a threshold

    def initial(self, plan: Plan | None = None, choice: int | str | None = None) -> ControllerState:
        """The state before the first batch. Of a plan it takes the predicted range of KL, of its choice or another."""
        limit = max(self.limit_kl, predicted_kl(plan, choice))
        return ControllerState(tis=self.tis, band=self.band, limit_kl=limit)

    def resume(self, saved: ControllerState, fresh: ControllerState) -> ControllerState:
        """A saved state under these settings and this plan's limit (of `fresh`, the state that `initial` gave)."""
        return resumed(replace(saved, tis=fresh.tis, band=fresh.band), fresh)

    def update(self, state: ControllerState, mismatch: Mismatch) -> Update:
        """(thresholds for this very batch, state, what was decided and why)."""
        thresholds = Thresholds(state.tis, state.band)
        if not usable(mismatch):
            return thresholds, state, NO_DATA
        seen = observed(state, mismatch)
        found = alarms(mismatch, seen.kl or 0.0, seen.limit_kl, self.limits)
        seen = replace(seen, strained=strain(seen.strained, False, Alarm.BROKEN in found, PATIENCE))
        decided = Decided(Decision.HOLD, "constant thresholds", found, escalation(seen.strained, PATIENCE))
        return thresholds, seen, decided
