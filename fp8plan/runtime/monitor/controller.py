"""The controller of a Monitor: the one given, or the default one, fitted to the settings of the correction."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from fp8plan.errors import ConfigError
from fp8plan.runtime.controller.laws import AdaptiveThresholds, ConstantThresholds, Controller
from fp8plan.runtime.correction.settings import CorrectionSettings


def suited(settings: CorrectionSettings, given: Controller | None) -> Controller:
    """The controller given, or the default one, for the threshold that the mode uses, at the settings' level.

    Raises ConfigError for a controller that does not fit the settings.
    """
    used, other = ("tis", "band") if settings.mode == "tis" else ("band", "tis")
    if given is None:
        start: dict[str, Any] = {used: getattr(settings.thresholds, used), other: None}
        if settings.level is not None and start[used] is not None:
            with suppress(ConfigError):  # a start that cannot tighten
                return AdaptiveThresholds(**start, level=settings.level)
        return ConstantThresholds(**start)
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
