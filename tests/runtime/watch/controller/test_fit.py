"""The controller that fits the settings of a correction, and a plan's thresholds at the settings' level."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fp8plan.errors import ConfigError
from fp8plan.runtime.watch.controller.fit import constant, suited
from fp8plan.runtime.watch.controller.laws import ConstantThresholds, LevelThresholds
from fp8plan.runtime.watch.correction.settings import CorrectionSettings, Thresholds

PLAN: Any = SimpleNamespace(thresholds={"token_tis": 1.5, "sequence_tis": 3.0})


@pytest.mark.parametrize(
    ("settings", "tis", "band"),
    [
        (CorrectionSettings(), 1.5, None),
        (CorrectionSettings(level="sequence"), 3.0, None),
        (CorrectionSettings(level="geometric"), 2.0, None),  # the plan has none
        (CorrectionSettings("geometric", "mis", Thresholds(None, (0.5, 2.0))), None, (0.5, 2.0)),  # a plan has no band
        (CorrectionSettings(level=None), 2.0, None),  # without weights a plan's thresholds do nothing
    ],
)
def test_constants_are_those_of_the_plan_at_the_level_of_the_settings(
    settings: CorrectionSettings, tis: float | None, band: tuple[float, float] | None
) -> None:
    assert constant(settings, PLAN) == suited(settings, None, PLAN) == ConstantThresholds(tis, band)
    start = settings.thresholds
    assert constant(settings, None) == ConstantThresholds(start.tis, start.band)


def test_a_law_gets_the_level_and_the_one_threshold_that_the_mode_uses() -> None:
    law = LevelThresholds(tis=2.0, band=(0.5, 2.0))
    assert suited(CorrectionSettings(level="sequence"), law) == LevelThresholds(tis=2.0, level="sequence")
    both = ConstantThresholds(2.0, (0.5, 2.0))
    masked = CorrectionSettings(mode="mis", thresholds=Thresholds(None, (0.5, 2.0)))
    assert suited(masked, both) == ConstantThresholds(None, (0.5, 2.0))


@pytest.mark.parametrize(
    ("settings", "controller", "said"),
    [
        (CorrectionSettings(), "adaptive", "controller is 'adaptive'; allowed: ConstantThresholds()"),
        (CorrectionSettings(), ConstantThresholds(None, (0.5, 2.0)), "ConstantThresholds(tis=None); allowed"),
        (CorrectionSettings(level=None), LevelThresholds(), "LevelThresholds with level=None"),
    ],
)
def test_a_controller_that_does_not_fit_is_refused(settings: CorrectionSettings, controller: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        suited(settings, controller)
    assert said in str(refused.value)
