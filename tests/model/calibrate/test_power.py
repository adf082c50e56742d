"""Power coefficients from power readings: planted ones come back, and too few readings give none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fp8plan.model.architecture.parts import Experts
from fp8plan.model.calibrate.engine_steps import Windows
from fp8plan.model.calibrate.power import LEAST_RUNS, power_coefficients
from fp8plan.model.calibrate.profile_of import step_windows
from fp8plan.model.cost.power import EXPERTS, IDLE, MATH, MEMORY, RECURRENT, uses
from fp8plan.model.hardware import find_gpu
from fp8plan.model.profile.library import datasheet_profile, load_profile
from fp8plan.model.validate.records import Record

FOLDER = Path(__file__).parents[3] / "profiles" / "h200_sxm" / "vllm-0.26.0"
SHEET = datasheet_profile(find_gpu("h200"), "0.26.0")
WATTS = (150.0, 500.0, 90.0, 900.0, 1125.0, 1300.0, 1950.0)
PLANTED = dict(zip((IDLE, MEMORY, RECURRENT, *MATH.values(), *EXPERTS.values()), WATTS, strict=True))


@pytest.fixture(scope="module")
def measured() -> list[Windows]:
    return step_windows(FOLDER / "families")


def with_watts(run: Windows, noise: float) -> Windows:
    """The rollout with the power reading that PLANTED gives."""
    engine, times, seconds = run.record.setup.step_model(SHEET), run.weights.sum(axis=0), float(run.seconds.sum())
    used = uses(engine, run.batch, engine.load(run.batch))
    joules = sum(PLANTED[name] * (times @ x) for name, x in used.items())
    clock = float(run.record.fields["sm_mhz"]) / 1980
    return reading(run, PLANTED[IDLE] * clock + float(joules) / seconds + noise)


def reading(run: Windows, watts: float | None) -> Windows:
    record: Record = replace(run.record, fields=run.record.fields | {"power_w": watts})
    return replace(run, record=record)


def test_planted_coefficients_come_back(measured: list[Windows]) -> None:
    noise = np.random.default_rng(0).normal(0, 3, len(measured))
    found = power_coefficients([with_watts(x, float(n)) for x, n in zip(measured, noise, strict=True)], SHEET)
    assert found == {name: pytest.approx(value, rel=0.1) for name, value in PLANTED.items()}


def test_of_dense_models_alone_nothing_is_known_about_experts(measured: list[Windows]) -> None:
    dense = [x for x in measured if not x.record.setup.shape.parts_of(Experts)]
    found = power_coefficients([with_watts(x, 0.0) for x in dense], SHEET)
    assert found == {name: pytest.approx(PLANTED[name], rel=0.05) for name in (IDLE, MEMORY, RECURRENT, *MATH.values())}


def test_what_draws_nothing_is_left_out(measured: list[Windows], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLANTED, RECURRENT, -20.0)  # as noise might have it
    found = power_coefficients([with_watts(x, 0.0) for x in measured], SHEET)
    assert found.keys() == PLANTED.keys() - {RECURRENT}
    monkeypatch.setitem(PLANTED, MEMORY, -200.0)
    assert power_coefficients([with_watts(x, 0.0) for x in measured], SHEET) == {}


def test_experts_take_more_for_a_flop_than_gemms(measured: list[Windows]) -> None:
    found = power_coefficients(measured, load_profile(find_gpu("h200"), "0.26.0")[0])
    for kind, name in MATH.items():
        assert 1.1 < found[EXPERTS[f"{kind}_experts"]] / found[name] < 1.8


def test_an_h200_needs_more_than_its_limit_for_dense_bf16(measured: list[Windows]) -> None:
    found = power_coefficients(measured, SHEET)
    limit = find_gpu("h200").power_limit_watts
    assert limit == 700
    assert found[IDLE] + found[MATH["bf16"]] > 1.4 * limit
    assert found[IDLE] + found[MEMORY] < 1.2 * limit


def test_too_few_readings_give_nothing(measured: list[Windows]) -> None:
    few = [reading(x, None) for x in measured[LEAST_RUNS - 1 :]]
    assert power_coefficients([*measured[: LEAST_RUNS - 1], *few], SHEET) == {}
    assert power_coefficients([], SHEET) == {}
