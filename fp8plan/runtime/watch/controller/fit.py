"""The controller that fits the settings of a correction, and the default law."""

from __future__ import annotations

from dataclasses import replace
from math import inf, log
from typing import TYPE_CHECKING, Any

from fp8plan.errors import ConfigError
from fp8plan.model.risk.expected import TIS_FLOOR, TIS_START
from fp8plan.runtime.watch.controller.laws import ConstantThresholds, Controller, LevelThresholds
from fp8plan.runtime.watch.controller.state import beginning
from fp8plan.runtime.watch.correction.settings import CorrectionSettings, Thresholds

if TYPE_CHECKING:
    from fp8plan.model.plan.plan import Plan


def suited(settings: CorrectionSettings, controller: Controller | None, plan: Plan | None = None) -> Controller:
    """The controller (None: `default_law`) for the threshold that the mode uses, at the settings' level.

    Raises ConfigError for a controller that does not fit the settings.
    """
    if controller is None:
        return default_law(settings, plan)
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


def default_law(settings: CorrectionSettings, plan: Plan | None = None, **kl: Any) -> Controller:
    """The law of a correction for which no other is chosen.

    C of token TIS starts where the plan, or else the settings, or else TIS_START has it. As the KL rises it tightens to
    TIS_FLOOR. A C of TIS_FLOOR or less, and all other thresholds, are constant: no law was proven for them.
    kl: target_kl and limit_kl, unless they are the defaults

    Raises ConfigError for a target_kl of constant thresholds.
    """
    token_tis = settings.level == "token" and settings.mode == "tis"
    start = _start(settings, plan, TIS_START if token_tis else TIS_FLOOR)
    if token_tis and start.tis is not None and TIS_FLOOR < start.tis < inf:
        return LevelThresholds(start.tis, narrowest=log(TIS_FLOOR) / log(start.tis), **kl)
    return _constant(start, kl)


def constant(settings: CorrectionSettings, plan: Plan | None, **kl: Any) -> ConstantThresholds:
    """Constant thresholds: the plan's C, or else those of the settings, or else C = TIS_FLOOR.

    A C that the plan means for the default law becomes TIS_FLOOR. kl: as in `default_law`

    Raises ConfigError for a target_kl.
    """
    start = _start(settings, plan, TIS_FLOOR)
    if start.tis is not None and start != _start(settings, None, TIS_FLOOR):
        start = Thresholds(min(start.tis, TIS_FLOOR))
    return _constant(start, kl)


def _start(settings: CorrectionSettings, plan: Plan | None, usual: float) -> Thresholds:
    """The thresholds to begin with, without those that the mode does not use. usual: C, if nothing gives one"""
    start = replace(settings.thresholds or Thresholds(usual), **{_used(settings)[1]: None})
    return beginning(None if settings.level is None else plan, settings.level or "token", start)


def _constant(start: Thresholds, kl: dict[str, Any]) -> ConstantThresholds:
    if "target_kl" in kl:
        raise ConfigError('target_kl with constant thresholds, which have none; allowed: thresholds "level"')
    return ConstantThresholds(start.tis, start.band, **kl)


def _used(settings: CorrectionSettings) -> tuple[str, str]:
    """The name of the threshold that the mode uses, and that of the other."""
    return ("tis", "band") if settings.mode == "tis" else ("band", "tis")
