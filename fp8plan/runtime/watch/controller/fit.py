"""The controller that fits the settings of a correction."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fp8plan.errors import ConfigError
from fp8plan.runtime.watch.controller.laws import ConstantThresholds, Controller
from fp8plan.runtime.watch.controller.state import beginning
from fp8plan.runtime.watch.correction.settings import CorrectionSettings

if TYPE_CHECKING:
    from fp8plan.model.plan.plan import Plan


def suited(settings: CorrectionSettings, controller: Controller | None, plan: Plan | None = None) -> Controller:
    """The controller (None: `constant`) for the threshold that the mode uses, at the settings' level.

    Raises ConfigError for a controller that does not fit the settings.
    """
    if controller is None:
        return constant(settings, plan)
    used, other = _used(settings)
    if not isinstance(controller, Controller):
        raise ConfigError(f"controller is {controller!r}; allowed: ConstantThresholds(), or another controller")
    name = type(controller).__name__
    if settings.level is not None and getattr(controller, used) is None:
        raise ConfigError(f"mode={settings.mode!r} with {name}({used}=None); allowed: a controller that gives {used}")
    alone: dict[str, Any] = {other: None}
    if isinstance(controller, ConstantThresholds):
        return replace(controller, **alone)
    if settings.level is None:
        raise ConfigError(f"{name} with level=None, which has no weights; allowed: a level, or ConstantThresholds()")
    return replace(controller, level=settings.level, **alone)


def constant(settings: CorrectionSettings, plan: Plan | None, **kl: Any) -> ConstantThresholds:
    """The thresholds of the plan, or else of the settings, as constants. kl: limit_kl, unless it is the default"""
    start = replace(settings.thresholds, **{_used(settings)[1]: None})
    planned = None if settings.level is None else plan
    begun = beginning(planned, settings.level or "token", start)
    return ConstantThresholds(begun.tis, begun.band, **kl)


def _used(settings: CorrectionSettings) -> tuple[str, str]:
    """The name of the threshold that the mode uses, and that of the other."""
    return ("tis", "band") if settings.mode == "tis" else ("band", "tis")
