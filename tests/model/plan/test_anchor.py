"""Anchored plans: what one measured rollout moves, narrows, and leaves alone."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.distributions import Fixed
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.anchor import REST_SD, WORKLOAD_SD, anchored, prior
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.planner import plan, predict
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.precision import PRESETS
from fp8plan.model.profile.library import datasheet_profile, load_profile
from fp8plan.model.profile.profile import GPU_PACE, HOST_PACE, VERSION_SD, Profile, layout_pace, precision_pace
from fp8plan.model.rl_step import WeightSync, changes_of, delta_bytes
from fp8plan.model.rollout import Rollout, rollout
from fp8plan.model.validate.records import Record, read_records
from fp8plan.model.validate.validate import simulated
from fp8plan.model.workload import Workload

MODEL, OTHER, GPU, VERSION = "Qwen/Qwen3-8B", "Qwen/Qwen3-14B", "h100_sxm", "0.26.0"
WORKLOAD = Workload(64, 1, Fixed(256), Fixed(400), 0)
SHEET = datasheet_profile(find_gpu(GPU), VERSION)
SHAPE = ModelShape.from_hf(MODEL)


def fields(precision: str = "bf16", seconds: float = 1.0, **others: Any) -> dict[str, Any]:
    lengths = {"prompt_lengths": [256] * 64, "response_lengths": [400] * 64}
    engine = {"model": MODEL, "gpu": GPU, "engine_version": VERSION, "precision": precision}
    return engine | lengths | {"seconds": seconds} | others


def records_of(tmp_path: Any, *rows: dict[str, Any]) -> list[Record]:
    path = tmp_path / "observed.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_records(path)


@pytest.fixture
def measured(tmp_path: Any) -> Any:
    """Records of rollouts that a GPU with this profile would measure."""

    def records(truth: Profile, *rows: dict[str, Any]) -> list[Record]:
        read = records_of(tmp_path, *rows)
        return [replace(r, seconds=r.seconds * simulated(r, truth).rollout.makespan_s) for r in read]

    return records


def paced(pace: float, name: str = GPU_PACE) -> Profile:
    return replace(SHEET, coefficients=SHEET.coefficients | {name: pace})


def predicted(profile: Profile, record: Record) -> Rollout:
    return simulated(record, profile).rollout


def half_width(timed: Rollout) -> float:
    return float(np.log(timed.makespan_high_s / timed.makespan_low_s)) / 2


def test_one_bf16_rollout_moves_every_precision_and_narrows_its_interval(measured: Any) -> None:
    slow = paced(1.25)
    records = measured(slow, fields(), fields("fp8_block"), fields("fp8_kv"))
    corrected = anchored(SHEET, SHAPE, VERSION, records[:1]).applied(SHEET)
    for record in records:
        before, after, truth = (predicted(profile, record) for profile in (SHEET, corrected, slow))
        assert abs(np.log(after.makespan_s / truth.makespan_s)) < 0.35 * abs(
            np.log(before.makespan_s / truth.makespan_s)
        )
        assert half_width(after) < 0.8 * half_width(before)


def test_the_correction_is_the_one_of_bayes_for_one_unknown(measured: Any) -> None:
    """With the GPU's pace as the only unknown, the posterior has a formula of one line."""
    sd = 0.1
    sure = replace(SHEET, log_covariance={name: {name: 0.0} for name in SHEET.coefficients}, model_error=REST_SD)
    sure = replace(sure, log_covariance=sure.log_covariance | {GPU_PACE: {GPU_PACE: sd**2}})
    (record,) = measured(replace(sure, coefficients=sure.coefficients | {GPU_PACE: 1.1}), fields())
    slope = predicted(sure, record).log_gradient[GPU_PACE]
    assert slope == pytest.approx(1, abs=0.02)
    anchor = anchored(sure, SHAPE, VERSION, [record])
    own, noise = sd**2 - WORKLOAD_SD**2, WORKLOAD_SD**2 + REST_SD**2
    pull = own / (own + noise / anchor.rollouts[0]["weight"])
    assert anchor.shifts[GPU_PACE] == pytest.approx(pull * np.log(1.1), rel=0.05)
    left = anchor.applied(sure).covariance([GPU_PACE])[0, 0]
    assert left == pytest.approx(own * (1 - pull) + WORKLOAD_SD**2, rel=0.05)


def test_intervals_hold_what_they_promise(tmp_path: Any) -> None:
    """GPUs are drawn from the profile's errors. Anchored to BF16, the 90% interval of FP8 holds about 90% of them."""
    draw = np.random.default_rng(0)
    base = prior(SHEET)
    names = list(base.log_covariance)
    records = records_of(tmp_path, fields(), fields("fp8_block", response_lengths=[600] * 64))
    alone = [simulated(record, base) for record in records]
    inside, trials = 0, 40
    for _ in range(trials):
        shift = draw.multivariate_normal(np.zeros(len(names)), base.covariance(names), method="eigh")
        truth = replace(
            base,
            coefficients=base.coefficients
            | {
                name: min(value, 1.0) if name.endswith("_efficiency") else value
                for name, value in zip(names, np.exp(shift) * [base.coefficients[n] for n in names], strict=True)
            },
        )
        seconds = [
            rollout(x.schedules, replace(x.model, profile=truth)).makespan_s * np.exp(REST_SD * draw.standard_normal())
            for x in alone
        ]
        seen = replace(records[0], seconds=float(seconds[0]))
        corrected = anchored(SHEET, SHAPE, VERSION, [seen]).applied(SHEET)
        after = rollout(alone[1].schedules, replace(alone[1].model, profile=corrected))
        inside += after.makespan_low_s <= seconds[1] <= after.makespan_high_s
    assert 0.8 * trials <= inside < trials + 1


def test_no_coefficient_is_wider_than_before(measured: Any) -> None:
    records = measured(paced(1.3), fields(), fields("fp8_block+fp8_kv"), fields(tensor_parallel=2))
    for profile in (SHEET, load_profile("h200", VERSION)[0]):
        moved = [replace(r, fields=r.fields | {"gpu": profile.gpu}) for r in records]
        wide, corrected = (
            prior(profile, [layout_pace(2)]),
            anchored(profile, SHAPE, VERSION, moved).applied(profile),
        )
        for name in wide.log_covariance:
            assert corrected.covariance([name])[0, 0] <= wide.covariance([name])[0, 0] * (1 + 1e-9) + 1e-12


def test_a_host_bound_rollout_teaches_the_host(measured: Any) -> None:
    slow = paced(1.8, HOST_PACE)
    small = {"model": "Qwen/Qwen3-0.6B", "enforce_eager": True}
    records = measured(slow, fields(**small))
    shape = ModelShape.from_hf("Qwen/Qwen3-0.6B")
    anchor = anchored(SHEET, shape, VERSION, records)
    assert anchor.shifts[HOST_PACE] > 4 * abs(anchor.shifts[GPU_PACE])
    after = predicted(anchor.applied(SHEET), records[0]).makespan_s
    assert after == pytest.approx(records[0].seconds, rel=0.06)


def test_an_outlier_counts_little(measured: Any) -> None:
    rows = [fields(response_lengths=[length] * 64) for length in (300, 350, 400, 450)]
    clean = anchored(SHEET, SHAPE, VERSION, measured(paced(1.1), *rows))
    stalled = anchored(SHEET, SHAPE, VERSION, measured(paced(1.1), *rows, fields(seconds=1.9)))
    assert stalled.rollouts[-1]["weight"] < 0.1
    assert min(row["weight"] for row in stalled.rollouts[:-1]) > 0.5
    assert stalled.shifts[GPU_PACE] == pytest.approx(clean.shifts[GPU_PACE], abs=0.02)
    assert "Line 5 disagrees" in stalled._fit()


def test_other_models_and_versions_teach_less(measured: Any) -> None:
    truth = paced(1.25)
    same, model, version = (
        anchored(SHEET, SHAPE, VERSION, measured(truth, fields(**other))).shifts
        for other in ({}, {"model": OTHER}, {"engine_version": "0.33.0"})
    )
    assert same[GPU_PACE] > version[GPU_PACE] > 0
    assert same[GPU_PACE] > model[GPU_PACE] > 0
    assert precision_pace("bf16") in same
    assert precision_pace("bf16") not in model


def test_a_measured_layout_is_learnt_for_itself(measured: Any) -> None:
    truth = replace(
        SHEET,
        coefficients=SHEET.coefficients | {layout_pace(4): 1.2},
        log_covariance=SHEET.log_covariance | {layout_pace(4): {layout_pace(4): 0.0}},
    )
    records = measured(truth, fields(tensor_parallel=4), fields())
    anchor = anchored(SHEET, SHAPE, VERSION, records)
    corrected = anchor.applied(SHEET)
    assert anchor.shifts[layout_pace(4)] > 2 * abs(anchor.shifts[GPU_PACE])
    assert corrected.layout_error(4) == 0 < SHEET.layout_error(4)
    assert predicted(corrected, records[0]).makespan_s == pytest.approx(records[0].seconds, rel=0.06)


def test_rollouts_of_another_gpu_teach_nothing(tmp_path: Any, measured: Any) -> None:
    own = measured(paced(1.2), fields())
    (other,) = records_of(tmp_path, fields(gpu="h200_sxm"))
    both = anchored(SHEET, SHAPE, VERSION, [*own, other])
    assert both.shifts == anchored(SHEET, SHAPE, VERSION, own).shifts
    assert "1 of another GPU are left out" in both._fit()
    with pytest.raises(ConfigError, match="the observed rollouts are of h200_sxm; allowed: at least one of h100_sxm"):
        plan(MODEL, GPU, WORKLOAD, observed=[other])


@pytest.mark.parametrize(
    ("broken", "problem"),
    [({"seconds": 0.0}, "seconds is 0.0"), ({"prompt_lengths": [5]}, "1 prompt_lengths, 64 response_lengths")],
)
def test_a_record_that_contradicts_itself_is_refused_by_line(tmp_path: Any, broken: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"line 2 of .*{problem}"):
        records_of(tmp_path, fields(), fields(**broken))


def test_a_plan_carries_its_anchor(measured: Any) -> None:
    records = measured(paced(1.2), fields())
    first, again, alone = (
        predict(PlanRequest(MODEL, GPU, WORKLOAD, profile=SHEET, observed=observed))
        for observed in (records, records, ())
    )
    text = first.plan.to_json()
    assert text == again.plan.to_json()
    saved = Plan.from_json(text)
    assert saved == first.plan
    assert saved.anchor is not None
    for choice, made in zip(saved.choices, first.rollouts, strict=True):
        assert made is not None
        setup = saved.setup(choice.precision)
        record = replace(records[0], fields=records[0].fields | {"precision": choice.precision}, limits=setup.limits)
        assert predicted(saved.anchor.applied(SHEET), record).makespan_s == pytest.approx(made.makespan_s)
    assert any("1 measured rollout corrects the profile" in reason for reason in saved.reasons)
    assert not any("measured rollout" in reason for reason in alone.plan.reasons)
    assert alone.plan.anchor is None


def test_the_rollout_that_would_tell_most_is_of_the_other_precision(measured: Any) -> None:
    made = plan(MODEL, GPU, WORKLOAD, profile=SHEET, observed=measured(paced(1.2), fields()))
    (sentence,) = [reason for reason in made.reasons if "would tell most" in reason]
    assert f"A measured rollout in {made.choices[made.chosen].precision} would tell most" in sentence
    assert VERSION_SD > 0


def test_a_rollout_with_a_compile_teaches_little(measured: Any) -> None:
    warm, cold = measured(paced(1.3), fields(compiled_files=0), fields(compiled_files=3))
    moved, little = (anchored(SHEET, SHAPE, VERSION, [record]).shifts[GPU_PACE] for record in (warm, cold))
    assert 0 < little < 0.4 * moved


def test_a_busy_host_makes_a_rollout_teach_less_as_far_as_it_waits_for_the_host(measured: Any) -> None:
    """A GPU-bound rollout does not wait, so nothing changes."""
    small = "Qwen/Qwen3-0.6B"
    for model, name, least, most in ((small, HOST_PACE, 0.0, 0.6), (MODEL, GPU_PACE, 0.95, 1.0)):
        quiet, busy = measured(paced(1.5, name), *(fields(model=model, host_slowdown=x) for x in (1.2, 2.5)))
        shape = ModelShape.from_hf(model)
        moved, less = (anchored(SHEET, shape, VERSION, [record]).shifts[name] for record in (quiet, busy))
        assert least * moved < less < most * moved


def synced(tmp_path: Any, factor: float, *precisions: str, **others: Any) -> list[Record]:
    """Records of a run in which a step changes so many times what theory says."""
    truth = WeightSync(learning_rate=1e-6, measured=factor)
    sizes = [delta_bytes(SHAPE, PRESETS[name], EngineLimits(), truth) for name in precisions]
    rows = [fields(name, delta_bytes=round(size)) | others for name, size in zip(precisions, sizes, strict=True)]
    return records_of(tmp_path, *rows)


@pytest.mark.parametrize("precision", ["bf16", "fp8_block"])
@pytest.mark.parametrize("factor", [0.1, 1.0, 3.0])
def test_a_measured_delta_corrects_the_share(tmp_path: Any, factor: float, precision: str) -> None:
    records = synced(tmp_path, factor, precision)
    assert changes_of(records, SHAPE, WeightSync(learning_rate=1e-6)) == pytest.approx(factor, rel=1e-3)


def test_deltas_of_one_precision_correct_all_and_a_plan_says_so(tmp_path: Any) -> None:
    records = synced(tmp_path, 0.25, "fp8_block", "fp8_block")

    def planned(observed: list[Record]) -> tuple[dict[str, float], str]:
        made = predict(
            PlanRequest(SHAPE, GPU, WORKLOAD, precisions=["bf16", "fp8_block"], observed=observed, learning_rate=1e-6)
        )
        (reason,) = [reason for reason in made.plan.reasons if "weight sync over" in reason]
        sizes = {c.setup.precision.name: {x.mode: x.bytes for x in c.syncs}["delta"] for c in made.tried}
        return sizes, reason

    (without, theory), (now, told) = planned([]), planned(records)
    assert now["fp8_block"] == pytest.approx(records[0].fields["delta_bytes"], rel=1e-3)
    assert now["bf16"] < without["bf16"] / 2
    assert "0.25 times as many as in theory, as measured" in told
    assert "as measured" not in theory


def test_other_models_and_dense_syncs_correct_no_share(tmp_path: Any) -> None:
    sync = WeightSync(learning_rate=1e-6)
    for records in ([], records_of(tmp_path, fields()), synced(tmp_path, 3.0, "bf16", model=OTHER)):
        assert changes_of(records, SHAPE, sync) == 1.0


@pytest.mark.parametrize(("size", "factor"), [(1, 1e-3), (10**12, 1e3)])
def test_bytes_that_no_share_explains_correct_it_as_far_as_allowed(tmp_path: Any, size: int, factor: float) -> None:
    records = records_of(tmp_path, fields(delta_bytes=size))
    assert changes_of(records, SHAPE, WeightSync(learning_rate=1e-6)) == pytest.approx(factor)
