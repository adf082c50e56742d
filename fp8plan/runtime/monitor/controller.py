"""The controller of a Monitor, fitted to the settings of the correction, and what an engine can do of its decisions."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from fp8plan.errors import ConfigError
from fp8plan.runtime.controller.alarms import beginning
from fp8plan.runtime.controller.laws import AdaptiveThresholds, ConstantThresholds, Controller
from fp8plan.runtime.controller.state import Alarm, Decided, Escalation
from fp8plan.runtime.correction.settings import CorrectionSettings

if TYPE_CHECKING:
    from fp8plan.model.plan.plan import Plan
    from fp8plan.runtime.mismatch.sampling import Sampling

GUESSES: Final = (Alarm.UNITS, Alarm.PLACEHOLDERS)
ADVICE: Final = {
    Escalation.RECALIBRATE_KV: "recalibrate the scales of an FP8 KV cache",
    Escalation.STEP_DOWN: "step down to a safer precision",
    None: "there is no safer precision left to step down to; fp8plan.doctor(engine) looks for other causes, such as "
    "old weights and sampling settings",
}


def feasible(decided: Decided, strained: int, can: Callable[[Escalation], bool]) -> Decided:
    """The decision with an escalation that the engine can follow, and the reason for it in words.

    Where there is nothing to recalibrate, it steps down at once. Where there is nothing to step down to, it escalates
    to nothing.

    strained: steps in a row beyond what thresholds can do
    can:      whether the engine can follow an escalation
    """
    if decided.escalate is None:
        return decided
    escalate = next((x for x in (decided.escalate, Escalation.STEP_DOWN) if can(x)), None)
    reason = f"{decided.reason}; {strained} steps in a row beyond what thresholds can do: {ADVICE[escalate]}"
    return replace(decided, escalate=escalate, reason=reason)


def sounding(decided: Decided, alarms: Collection[Alarm]) -> Decided:
    """The decision with more alarms, each once and in the order of Alarm."""
    return replace(decided, alarms=tuple(alarm for alarm in Alarm if alarm in {*decided.alarms, *alarms}))


def explained(decided: Decided, sampling: Sampling | None) -> Decided:
    """Return the decision with its rollout's sampling in the reason, where that biases the ratios. Beside the alarm
    UNIT_MEAN also a sampling that may bias them is there. A known bias explains what the alarms in GUESSES would
    make of it: missing mass looks like base 10, and a kept set of one token has the log-prob 0.0.
    """
    if sampling is None or not (sampling.biased or Alarm.UNIT_MEAN in decided.alarms):
        return decided
    alarms = tuple(alarm for alarm in decided.alarms if not (sampling.biased and alarm in GUESSES))
    return replace(decided, alarms=alarms, reason="; ".join((decided.reason, *sampling.remarks())))


def suited(settings: CorrectionSettings, given: Controller | None, plan: Plan | None = None) -> Controller:
    """The controller given, or the default one, for the threshold that the mode uses, at the settings' level.

    The default one holds the thresholds of the plan, or else of the settings.

    Raises ConfigError for a controller that does not fit the settings.
    """
    if given is None:
        return constant(settings, plan)
    used, other = _used(settings)
    if not isinstance(given, Controller):
        raise ConfigError(f"controller is {given!r}; allowed: AdaptiveThresholds(), or another controller")
    name = type(given).__name__
    if settings.level is not None and getattr(given, used) is None:
        raise ConfigError(f"mode={settings.mode!r} with {name}({used}=None); allowed: a controller that gives {used}")
    alone: dict[str, Any] = {other: None}
    if isinstance(given, ConstantThresholds):
        return replace(given, **alone)
    if settings.level is None:
        raise ConfigError(f"{name} with level=None, which has no weights; allowed: a level, or ConstantThresholds()")
    if isinstance(given, AdaptiveThresholds):
        return replace(given, level=settings.level, **alone)
    if settings.level != "token":
        raise ConfigError(
            f"{name} with level={settings.level!r}; allowed: level='token', whose ratios their law is for, or "
            "AdaptiveThresholds()"
        )
    return replace(given, **alone)


def constant(settings: CorrectionSettings, plan: Plan | None, **kl: Any) -> ConstantThresholds:
    """The thresholds of the plan, or else of the settings, as constants. kl: limit_kl, if it is not the default"""
    start = replace(settings.thresholds, **{_used(settings)[1]: None})
    planned = None if settings.level is None else plan
    return ConstantThresholds(*beginning(planned, settings.level or "token", start.tis, start.band), **kl)


def _used(settings: CorrectionSettings) -> tuple[str, str]:
    """The name of the threshold that the mode uses, and that of the other."""
    return ("tis", "band") if settings.mode == "tis" else ("band", "tis")
