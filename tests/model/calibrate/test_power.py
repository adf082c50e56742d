"""Power coefficients from power readings: planted ones come back, and too few readings give none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fp8plan.model.architecture.parts import Experts
from fp8plan.model.calibrate.fit import Windows
from fp8plan.model.calibrate.power import LEAST_READINGS, LEAST_WATTS, NAMES, kernel_uses, power_coefficients
from fp8plan.model.calibrate.profile_of import power_rows, step_windows
from fp8plan.model.cost.power import EXPERTS, IDLE, MATH, MEMORY_WATTS, RUNNING, uses
from fp8plan.model.hardware import find_gpu
from fp8plan.model.profile.library import load_profile

FOLDER = Path(__file__).parents[3] / "profiles" / "h200_sxm" / "vllm-0.26.0"
H200 = find_gpu("h200")
PROFILE = load_profile(H200, "0.26.0")[0]
WATTS = (120.0, 100.0, 200.0, 250.0, 450.0, 550.0, 500.0, 550.0, 400.0, 450.0, 480.0, 350.0)
PLANTED = dict(zip(NAMES, WATTS, strict=True))


@pytest.fixture(scope="module")
def measured() -> list[Windows]:
    return step_windows(FOLDER / "families")


@pytest.fixture(scope="module")
def kernels() -> pd.DataFrame:
    return power_rows(FOLDER / "kernels")


def reading(run: Windows, watts: float | None) -> Windows:
    return replace(run, record=replace(run.record, fields=run.record.fields | {"power_w": watts}))


def planted(run: Windows, watts: dict[str, float]) -> Windows:
    """The rollout with the power reading that these coefficients give."""
    engine, times = run.record.setup.step_model(PROFILE, run.record.fields.get("experts_hit")), run.weights.sum(axis=0)
    used = uses(engine, run.batch, engine.load(run.batch))
    joules = sum(watts[name] * float(times @ x) for name, x in used.items())
    return reading(run, watts[IDLE] + joules / float(run.seconds.sum()))


def planted_kernels(rows: pd.DataFrame, watts: dict[str, float]) -> pd.DataFrame:
    """The rows with the same."""
    parts = []
    for kernel, part in rows.groupby("kernel"):
        used = kernel_uses(str(kernel), part, H200, PROFILE)
        joules = sum(watts[name] * x for name, x in used.items())
        parts.append(part.assign(power_w=watts[IDLE] + joules / part.seconds.to_numpy()))
    return pd.concat(parts)


def test_planted_coefficients_come_back(measured: list[Windows], kernels: pd.DataFrame) -> None:
    runs, rows = [planted(x, PLANTED) for x in measured], planted_kernels(kernels, PLANTED)
    found = power_coefficients(runs, PROFILE, rows)
    few = EXPERTS["fp8_experts"]  # four rows have it, so that it is drawn towards the watts of FP8 in GEMMs
    assert PLANTED[MATH["fp8"]] < found.pop(few) < PLANTED[few]
    assert found == {name: pytest.approx(value, rel=0.1, abs=15) for name, value in PLANTED.items() if name != few}


def test_of_dense_models_alone_nothing_is_known_about_experts(measured: list[Windows], kernels: pd.DataFrame) -> None:
    dense = [planted(x, PLANTED) for x in measured if not x.record.setup.shape.parts_of(Experts)]
    others = planted_kernels(kernels[~kernels.kernel.str.startswith("moe")], PLANTED)
    found = power_coefficients(dense, PROFILE, others)
    of_experts = {*EXPERTS.values(), RUNNING["experts_bf16"], RUNNING["experts_fp8"]}
    known = PLANTED.keys() - of_experts
    assert found == {name: pytest.approx(PLANTED[name], rel=0.1, abs=15) for name in known}


def test_what_draws_nothing_is_not_another_coefficient(measured: list[Windows], kernels: pd.DataFrame) -> None:
    watts = PLANTED | {MEMORY_WATTS: -60.0}  # as noise might have it
    found = power_coefficients([planted(x, watts) for x in measured], PROFILE, planted_kernels(kernels, watts))
    assert found.keys() == PLANTED.keys()
    assert found[MEMORY_WATTS] == LEAST_WATTS


def test_an_h200_draws_near_its_limit_whatever_runs(measured: list[Windows], kernels: pd.DataFrame) -> None:
    """Kernels that hardly compute draw some 500 W beside an idle GPU, dense math 200 more, FP8 attention less."""
    found = power_coefficients(measured, PROFILE, kernels)
    assert set(found) == set(NAMES)
    assert 450 < found[RUNNING["kernels"]] < 650
    assert found[RUNNING["attention_fp8"]] < 0.9 * found[RUNNING["attention_bf16"]]
    assert H200.power_limit_watts == 700
    assert found[IDLE] + found[RUNNING["kernels"]] + found[MATH["bf16"]] > H200.power_limit_watts


def test_single_kernels_are_explained(kernels: pd.DataFrame) -> None:
    """But for kernels of a few microseconds, which pause between launches, and FP8 decode with long contexts."""
    errors = []
    for kernel, part in kernels[kernels.seconds > 3e-5].groupby("kernel"):
        used = kernel_uses(str(kernel), part, H200, PROFILE)
        joules = sum(PROFILE.coefficients[name] * x for name, x in used.items())
        errors += list(PROFILE.coefficients[IDLE] + joules / part.seconds - part.power_w)
    assert len(errors) > 30
    assert np.median(np.abs(errors)) < 30


def test_a_gpu_whose_limit_is_not_known_has_none(measured: list[Windows], kernels: pd.DataFrame) -> None:
    elsewhere = [replace(x, record=replace(x.record, fields=x.record.fields | {"gpu": "gh200"})) for x in measured]
    assert find_gpu("gh200").power_limit_watts is None
    assert power_coefficients(elsewhere, PROFILE, kernels) == {}


def test_too_few_readings_give_nothing(measured: list[Windows], kernels: pd.DataFrame) -> None:
    few = [*measured[: LEAST_READINGS - 1], *(reading(x, None) for x in measured[LEAST_READINGS - 1 :])]
    assert power_coefficients(few, PROFILE, kernels[:0]) == {}
    assert power_coefficients([], PROFILE, kernels) == {}
