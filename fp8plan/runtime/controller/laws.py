"""Thresholds of the correction, decided anew for every batch from its own mismatch.

    controller = ConstantThresholds()                             frozen settings
    state = controller.initial(plan)                              explicit state, saved with the checkpoint
    thresholds, state, decided = controller.update(state, mismatch)           pure; thresholds for this very batch
    state = controller.resume(ControllerState.from_dict(saved), controller.initial(plan))        from state.to_dict()

Three laws share this protocol:

ConstantThresholds    the default, as under a mismatch that lasts no law trained better (docs/evidence/thresholds.md)
AdaptiveThresholds    tighter as the KL rises above its target, at every level (controller/adaptive.py)
LeastErrorThresholds  the least squared error of one step's gradient, which loosens as the mismatch grows
                      (controller/least_error.py has the laws that were considered, and what was measured)

C does not change this step's mismatch, which comes from outside with drifts, steps and spikes: there is no loop to
close, so none of them integrates. Figures that are not numbers move nothing. Alarms (robust KL, raw ESS, chi2, tails, a
mean ratio that is not 1) go into the log beside every decision. What thresholds cannot do escalates: first to a
recalibration of the KV scales, then to the guard's step down (`engine.apply(step.verdict, step.decided.escalate)`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from fp8plan.runtime.controller.adaptive import AdaptiveThresholds
from fp8plan.runtime.controller.alarms import (
    AlarmLimits,
    alarms,
    check_limits,
    no_data,
    observed,
    predicted_kl,
    usable,
)
from fp8plan.runtime.controller.least_error import LeastErrorThresholds
from fp8plan.runtime.controller.noise import noise_scale
from fp8plan.runtime.controller.state import (
    Alarm,
    ControllerState,
    Decided,
    Decision,
    Escalation,
    Update,
    escalation,
    resumed,
    strain,
)
from fp8plan.runtime.correction.settings import Thresholds

if TYPE_CHECKING:
    from fp8plan.model.plan.plan import Plan
    from fp8plan.runtime.mismatch.metrics import Mismatch

PATIENCE: Final = 3  # batches that an escalation has to help, before the next one


@dataclass(frozen=True, slots=True)
class ConstantThresholds:
    """The same thresholds in every step. The alarms sound all the same, and a KL beyond repair escalates.

    tis, band: bounds on pi_train / pi_rollout, as in Thresholds
    limit_kl:  k3 per token above which the KL alarm sounds, unless a plan predicts a range for the model
    """

    tis: float | None = 2.0
    band: tuple[float, float] | None = None
    limit_kl: float = 0.03
    limits: AlarmLimits = field(default_factory=AlarmLimits)

    def __post_init__(self) -> None:
        Thresholds(self.tis, self.band)  # raises ConfigError for what cannot be a threshold
        check_limits(self.limit_kl, self.limits)

    def initial(self, plan: Plan | None = None, choice: int | str | None = None) -> ControllerState:
        """The state before the first batch. A plan raises limit_kl to the KL that it predicts for `choice`."""
        limit = max(self.limit_kl, predicted_kl(plan, choice))
        return ControllerState(tis=self.tis, band=self.band, limit_kl=limit)

    def resume(self, saved: ControllerState, fresh: ControllerState) -> ControllerState:
        """A saved state with the thresholds and the limit of `fresh`, which `initial` gave just now."""
        return resumed(replace(saved, tis=fresh.tis, band=fresh.band), fresh)

    def update(self, state: ControllerState, mismatch: Mismatch) -> Update:
        """Thresholds for this very batch, the next state, and the decision with its reason."""
        thresholds = Thresholds(state.tis, state.band)
        if not usable(mismatch):
            return thresholds, state, no_data(mismatch, self.limits)
        seen = observed(state, mismatch)
        found = alarms(mismatch, seen.kl or 0.0, seen.limit_kl, self.limits)
        seen = replace(seen, strained=strain(seen.strained, False, Alarm.BROKEN in found, PATIENCE))
        decided = Decided(Decision.HOLD, "constant thresholds", found, escalation(seen.strained, PATIENCE))
        return thresholds, seen, decided


Controller = AdaptiveThresholds | LeastErrorThresholds | ConstantThresholds

__all__ = [
    "AdaptiveThresholds",
    "Alarm",
    "AlarmLimits",
    "ConstantThresholds",
    "Controller",
    "ControllerState",
    "Decided",
    "Decision",
    "Escalation",
    "LeastErrorThresholds",
    "noise_scale",
]
