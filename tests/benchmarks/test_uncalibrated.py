"""The datasheet profile's errors are those of its record: recomputed, so that neither can drift from the other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import uncalibrated
from benchmarks.uncalibrated import HELD, OWN_STEP, SHARED_STEP, Sheet
from fp8plan.model.profile.library import profiles_path

SHEET = json.loads((profiles_path() / "datasheet.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def gpus() -> list[Sheet]:
    return list(uncalibrated.sheets())


def pace_sds(part: dict[str, Any]) -> list[float]:
    return [part["coefficients"][name]["log_sd"] for name in ("gpu.pace", "host.pace")]


def test_the_correlation_of_alike_coefficients_is_the_imports() -> None:
    assert SHEET["alike"]["value"] == round(uncalibrated.alike(), 2)


@pytest.mark.slow
def test_every_interval_of_the_datasheet_profile_holds_its_promise_and_is_no_wider(gpus: list[Sheet]) -> None:
    assert [len(sheet.cells) > 20 for sheet in gpus] == [True] * 5
    shares = [sheet.record().held for sheet in gpus]
    assert min(min(both) for both in shares) >= HELD
    shared, own = gpus[0].profile.shared_error, gpus[0].profile.model_error
    assert [*pace_sds(SHEET["common"]), SHEET["model_error"]["value"]] == pytest.approx([shared, shared, own])
    narrower = [sheet.with_errors(shared - SHARED_STEP, own).record().held[0] for sheet in gpus]
    surer = [sheet.with_errors(shared, own - OWN_STEP).record().held[1] for sheet in gpus]
    assert max(min(narrower), min(surer)) < HELD


def test_the_interval_of_times_on_a_cpu_holds_its_promise_and_is_no_wider() -> None:
    cpu = uncalibrated.of_cpu()
    shared, own = cpu.profile.shared_error, cpu.profile.model_error
    assert pace_sds(SHEET["by_architecture"]["cpu"]) == pytest.approx([shared, shared])
    assert cpu.record().held[0] >= HELD > cpu.with_errors(shared - SHARED_STEP, own).record().held[0]


def test_siblings_and_imports_hold_their_promise_up_to_one_rollout() -> None:
    for record in uncalibrated.others():
        for ratios, share in zip((record.makespans, record.speed_ups), record.held, strict=True):
            assert share * len(ratios) > HELD * len(ratios) - 1, record.profile


def test_an_expected_share_counts_the_error_of_what_stands_in() -> None:
    inside, outside = (uncalibrated.Ratio(error, -0.1, 0.1, 0.0) for error in (0.05, 0.2))
    assert uncalibrated.held([inside, outside]) == 0.5
    assert 0.7 < uncalibrated.held([inside], sd=0.06) < 0.9
    assert uncalibrated.held([outside], sd=0.06) == pytest.approx(0.048, abs=0.001)
