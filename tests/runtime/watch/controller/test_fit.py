"""The controller that fits the settings of a correction, and a plan's thresholds at the settings' level."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.learning.arms import CORRECTIONS
from fp8plan.errors import ConfigError
from fp8plan.runtime.watch.controller.fit import constant, default_law, suited
from fp8plan.runtime.watch.controller.laws import ConstantThresholds, LevelThresholds
from fp8plan.runtime.watch.correction.settings import CorrectionSettings, Thresholds

SEQUENCE, GEOMETRIC = CorrectionSettings(level="sequence"), CorrectionSettings(level="geometric")
MASK = CorrectionSettings("geometric", "mis", Thresholds(None, (0.5, 2.0)))
OFF = CorrectionSettings(level=None)


def planned(c: float) -> Any:
    return SimpleNamespace(thresholds={"token_tis": c, "sequence_tis": 3.0})


def given(c: float) -> CorrectionSettings:
    return CorrectionSettings(thresholds=Thresholds(c))


@pytest.mark.parametrize(
    ("settings", "plan", "law"),
    [
        (CorrectionSettings(), None, LevelThresholds(4.0, narrowest=0.5)),
        (CorrectionSettings(), planned(4.0), LevelThresholds(4.0, narrowest=0.5)),
        (given(2.0), planned(4.0), LevelThresholds(4.0, narrowest=0.5)),  # a plan's goes first
        (given(16.0), None, LevelThresholds(16.0, narrowest=0.25)),
        (CorrectionSettings(), planned(1.5), ConstantThresholds(1.5)),  # of high risk
        (given(2.0), None, ConstantThresholds(2.0)),
        (given(1.2), None, ConstantThresholds(1.2)),
        (given(float("inf")), None, ConstantThresholds(float("inf"))),
        (CorrectionSettings(thresholds=Thresholds(None)), None, ConstantThresholds(None)),
        (SEQUENCE, None, ConstantThresholds(2.0)),
        (SEQUENCE, planned(4.0), ConstantThresholds(3.0)),
        (GEOMETRIC, planned(4.0), ConstantThresholds(2.0)),  # the plan has none
        (MASK, planned(4.0), ConstantThresholds(None, (0.5, 2.0))),  # a plan has no band
        (OFF, planned(4.0), ConstantThresholds(2.0)),  # without weights a plan's thresholds do nothing
    ],
)
def test_by_default_c_of_token_tis_tightens_to_2_and_all_else_is_constant(
    settings: CorrectionSettings, plan: Any, law: Any
) -> None:
    assert suited(settings, None, plan) == default_law(settings, plan) == law
    assert default_law(settings, plan, limit_kl=0.5) == replace(law, limit_kl=0.5)


def test_the_default_is_the_law_that_was_measured() -> None:
    assert default_law(CorrectionSettings()) == CORRECTIONS["level_4_2"].controller
    assert default_law(CorrectionSettings()) == LevelThresholds()


@pytest.mark.parametrize(
    ("settings", "plan", "tis", "band"),
    [
        (CorrectionSettings(), None, 2.0, None),
        (CorrectionSettings(), planned(4.0), 2.0, None),  # where the default law would begin
        (CorrectionSettings(), planned(1.5), 1.5, None),
        (given(5.0), None, 5.0, None),
        (SEQUENCE, planned(4.0), 2.0, None),
        (MASK, planned(4.0), None, (0.5, 2.0)),
        (OFF, planned(1.5), 2.0, None),
    ],
)
def test_constants_are_2_at_most_unless_the_settings_have_more(
    settings: CorrectionSettings, plan: Any, tis: float | None, band: tuple[float, float] | None
) -> None:
    assert constant(settings, plan) == ConstantThresholds(tis, band)


def test_constant_thresholds_have_no_target() -> None:
    assert default_law(CorrectionSettings(), target_kl=0.02) == LevelThresholds(target_kl=0.02)
    for law in (default_law, constant):
        with pytest.raises(ConfigError, match="target_kl with constant thresholds, which have none; allowed"):
            law(MASK, None, target_kl=0.02)


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
