"""Thresholds of the correction, decided anew for every batch from its own mismatch.

    controller = AdaptiveThresholds()                             frozen settings
    state = controller.initial(plan)                              explicit state, saved with the checkpoint
    thresholds, state, decided = controller.update(state, mismatch)           pure; thresholds for this very batch
    state = controller.resume(ControllerState.from_dict(saved), controller.initial(plan))        from state.to_dict()

Three laws share this protocol:

AdaptiveThresholds    the default: tighter as the KL rises above its target, at every level (controlling.adaptive)
LeastErrorThresholds  opt-in: the least squared error of one step's gradient, which loosens as the mismatch grows
                      (controlling.least_error; the laws that were considered, and what was measured, are there)
ConstantThresholds    what everybody else has (controlling.constant)

C does not change this step's mismatch, which comes from outside with drifts, steps and spikes: there is no loop to
close, so none of them integrates. Figures that are not numbers move nothing. Alarms (robust KL, raw ESS, chi2, tails, a
mean ratio that is not 1) go into the log beside every decision. What thresholds cannot do escalates: first to a
recalibration of the KV scales, then to the guard's step down (`engine.follow(step.verdict, step.decided.escalate)`).
"""

from __future__ import annotations

from fp8plan.runtime.controller.adaptive import AdaptiveThresholds
from fp8plan.runtime.controller.alarms import AlarmLimits
from fp8plan.runtime.controller.constant import ConstantThresholds
from fp8plan.runtime.controller.least_error import LeastErrorThresholds
from fp8plan.runtime.controller.noise import noise_scale
from fp8plan.runtime.controller.state import Alarm, ControllerState, Decided, Decision, Escalation

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
