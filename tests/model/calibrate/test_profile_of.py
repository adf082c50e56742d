"""A folder of measurements becomes a profile: what is fitted, what is kept apart, what the profile says of itself."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from synthetic import H200, HEADS, LAYERS, PRIOR, batch_fields, decodes, gemms, nature, record, trace_of
from synthetic import write_folder as write

from fp8plan.errors import ConfigError
from fp8plan.model.calibrate.fit import windows
from fp8plan.model.calibrate.profile_of import (
    BETWEEN_CARDS,
    STEPS,
    Calibration,
    calibrate,
    is_held_out,
    kernel_rows,
    likeliest_sd,
    measured_version,
    step_windows,
    timed_rare_parts,
    with_lent,
    with_rare_parts,
)
from fp8plan.model.cost.base import QUANTITIES
from fp8plan.model.hardware import find_gpu
from fp8plan.model.profile.library import (
    RARE_PARTS,
    WIDE_HEADS,
    datasheet_profile,
    load_profile,
    of_another_version,
    profile_path,
    profiles_path,
    without_rare_parts,
)
from fp8plan.model.profile.profile import FITTED, HOST_PACE, KNOWN_HOST_SD, PACES, VERSION_SD, Profile

GPU = nature(17)  # one that is far enough from the datasheet for what is tested to show
UNSEEN_LAYER, UNSEEN_HEADS = (7168, 5120), (40, 8, 128)  # of Qwen3-14B
KERNELS = [gemms(layers=[*LAYERS[:4], UNSEEN_LAYER]), decodes(heads=[*HEADS[:2], UNSEEN_HEADS])]
RUNS = [
    batch_fields(1, longest=900),
    batch_fields(2, requests=96, longest=200),
    batch_fields(3, longest=900, precision="fp8_kv"),
    batch_fields(4, requests=48, longest=500, model="Qwen/Qwen3-0.6B"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("measured"), GPU, RUNS, KERNELS, noise=0.02)


@pytest.fixture(scope="module")
def found(folder: Path) -> Calibration:
    return calibrate(folder, H200, "0.26.0")


@pytest.mark.parametrize(
    "changes", [{}, {"requests": 200}, {"precision": "fp8_kv", "longest": 600}, {"model": "Qwen/Qwen3-0.6B"}]
)
def test_rollouts_that_nobody_fitted_are_predicted_and_were_not_before(
    found: Calibration, tmp_path: Path, changes: dict[str, object]
) -> None:
    run = record(tmp_path, batch_fields(99, **changes))  # type: ignore[arg-type]
    measured = windows(run, trace_of(run, GPU))

    def error(profile: Profile) -> float:
        return abs(float(measured.cost(profile).seconds.sum() / measured.seconds.sum()) - 1)

    assert error(found.profile) < 0.02
    assert error(PRIOR) > 0.05


def test_the_profile_says_what_it_is(found: Calibration) -> None:
    profile = found.profile
    assert (profile.gpu, profile.engine_version, profile.kind) == ("h200_sxm", "0.26.0", "calibrated")
    assert profile.date == "2026-11-21"
    assert profile.source == ("66 timings of 2 kernels and 4 rollouts of 3 engines, measured on GPU-synthetic")
    assert Profile.from_json(profile.to_json()) == profile
    untimed = "attention.fp8.decode_bandwidth_efficiency"  # all runs are in BF16
    assert profile.notes[untimed] == PRIOR.notes[untimed]
    assert not profile.notes.keys() & {"gemm.bf16.launch_seconds", "host.step_seconds", *PACES}


def test_layers_that_were_fitted_are_kept_as_they_were_timed_and_held_out_ones_are_not(
    tmp_path: Path, found: Calibration
) -> None:
    assert found.profile.layers == {"gemm.bf16": {}}  # six numbers of rows are too few
    rows = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    shapes = [(4096, 4096), UNSEEN_LAYER]
    dense = pd.DataFrame([{"kernel": "gemm.bf16", "m": m, "n": n, "k": k} for n, k in shapes for m in rows])
    profile = calibrate(write(tmp_path, GPU, RUNS[:1], [dense], noise=0.02), H200, "0.26.0").profile
    assert profile.layers.keys() == {"gemm.bf16"}
    assert profile.layers["gemm.bf16"].keys() == {"4096x4096"}
    timed, missed = profile.layers["gemm.bf16"]["4096x4096"]
    assert timed == rows
    assert max(map(abs, missed)) < 0.1


def test_the_hull_is_what_was_measured(found: Calibration) -> None:
    hull = found.profile.hull
    assert hull is not None
    assert hull["gemm.bf16"] == {"m": (1, 4096), "n": (512, 7168), "k": (512, 5120)}
    assert hull["attention_decode.bf16"] == {"decode_requests": (1, 512), "decode_kv_tokens": (128, 512 * 4096)}
    assert hull[STEPS]["sampled_requests"] == (1, 96)
    assert hull[STEPS]["prefill_tokens"][1] == sum(RUNS[1]["prompt_lengths"])  # all in one step
    assert hull.keys() == {"gemm.bf16", "attention_decode.bf16", STEPS}
    covered = {quantity for kernel, ranges in hull.items() if kernel != STEPS for quantity in ranges}
    assert not covered & hull[STEPS].keys()  # what a kernel was timed for is the kernel's to say


def test_without_kernels_the_hull_is_all_that_steps_held(tmp_path: Path) -> None:
    hull = calibrate(write(tmp_path, GPU, RUNS[:1]), H200, "0.26.0").profile.hull
    assert hull is not None
    assert hull.keys() == {STEPS}
    assert hull[STEPS].keys() == set(QUANTITIES)
    assert hull[STEPS]["decode_requests"] == (1, 24)


def test_the_errors_say_how_good_it_is(found: Calibration) -> None:
    errors = {x.kernel: x for x in found.errors}
    assert errors.keys() == {"gemm.bf16", "attention_decode.bf16", STEPS} == found.profile.residuals.keys()
    assert {x: (e.rows, e.unseen) for x, e in errors.items() if x != STEPS} == {
        "gemm.bf16": (24, 6),
        "attention_decode.bf16": (24, 12),
    }
    assert errors[STEPS].unseen == 0
    for error in found.errors:
        assert error.fitted < error.before
        assert error.fitted < 0.025
        assert error.fitted <= 2 * error.held_out < 0.08
        assert error.held_out <= error.worst
    assert 0 < total_error(found.profile) < 0.05


def test_what_is_named_before_is_never_fitted(found: Calibration, folder: Path, tmp_path: Path) -> None:
    """Timings of held-out shapes that are wildly wrong change what is said of them, and not one coefficient."""
    rows = kernel_rows(folder / "kernels")
    apart = is_held_out(rows)
    assert apart.sum() == 18
    (tmp_path / "kernels").mkdir()
    wild = rows.assign(seconds=np.where(apart, 100 * rows.seconds, rows.seconds))
    wild.to_json(tmp_path / "kernels" / "all.jsonl", orient="records", lines=True, double_precision=15)
    (tmp_path / "steps").symlink_to(folder / "steps")
    again = calibrate(tmp_path, H200, "0.26.0")
    assert again.profile.coefficients == pytest.approx(found.profile.coefficients, rel=1e-6)
    assert again.profile.model_error == pytest.approx(found.profile.model_error, rel=1e-4)
    for before, after in zip(found.errors, again.errors, strict=True):
        assert after.fitted == pytest.approx(before.fitted, rel=1e-4)
        if after.unseen:
            assert after.held_out == pytest.approx(0.99, abs=0.01)
        else:
            assert after.held_out == pytest.approx(before.held_out, rel=1e-3)


def total_error(profile: Profile) -> float:
    """The error that all precisions share, and that of each."""
    return float(np.hypot(profile.shared_error, profile.model_error))


def test_an_engine_that_is_off_shows_in_the_model_error(tmp_path: Path) -> None:
    """One engine takes twice the time that the other's runs lead to expect, so neither predicts the other."""
    runs = [batch_fields(1), batch_fields(2, model="Qwen/Qwen3-0.6B")]
    folder = write(tmp_path, GPU, runs)
    slow_down(folder, "run 2", 2.0)
    assert total_error(calibrate(folder, H200, "0.26.0").profile) > 0.3


def slow_down(folder: Path, key: str, factor: float) -> None:
    path = folder / "steps" / "rollouts.trace.jsonl.gz"
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    for row in rows:
        if row["key"] == key:
            row["core_s"] = [x * factor for x in row["core_s"]]
    with gzip.open(path, "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))


def test_one_engine_without_kernels_is_enough(tmp_path: Path) -> None:
    """The model error is the prior's, as only the prior is left when this engine is held out.

    The variance that the fit states itself is subtracted from the error's square.
    """
    folder = write(tmp_path, GPU, [batch_fields(1, longest=900)])
    found = calibrate(folder, H200, "0.26.0")
    (steps,) = found.errors
    assert steps.fitted < 0.02 < steps.before
    assert steps.held_out == pytest.approx(steps.before, rel=0.02)  # to first order
    (window,) = step_windows(folder / "steps")
    prior = window.cost(PRIOR)
    error = np.log(prior.seconds.sum() / window.seconds.sum())
    names = [name for name in prior.partials if name not in PACES]
    slopes = np.array([prior.partials[name].sum() for name in names]) / prior.seconds.sum()
    host = prior.partials[HOST_PACE].sum() / prior.seconds.sum() * KNOWN_HOST_SD
    said = slopes @ found.profile.covariance(names) @ slopes + host**2
    assert BETWEEN_CARDS < total_error(found.profile) < abs(error)
    assert total_error(found.profile) ** 2 == pytest.approx(error**2 - said, rel=0.02)


def test_errors_that_the_host_explains_do_not_widen_the_model_error() -> None:
    rng = np.random.default_rng(0)
    own, host = 0.04, 0.2
    errors = np.concatenate([rng.normal(0, own, 400), rng.normal(0, np.hypot(own, host), 100)])
    explained = np.repeat([0.0, host**2], [400, 100])
    seconds = np.repeat([1.0, 10.0], [400, 100])  # most of the time is the host's
    assert likeliest_sd(errors, explained, seconds) == pytest.approx(own, rel=0.1)
    assert likeliest_sd(errors, 0 * explained, np.ones(500)) == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-3)
    assert likeliest_sd(0 * errors, explained, seconds) == pytest.approx(BETWEEN_CARDS, rel=1e-3)


def test_kernels_alone_are_not_enough_and_the_command_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, GPU, RUNS[:1], KERNELS)
    (folder / "steps" / "rollouts.jsonl").unlink()
    for attempt in (lambda: calibrate(folder, H200, "0.26.0"), lambda: measured_version(folder)):
        with pytest.raises(ConfigError, match=f"no measured rollouts; type: fp8plan calibrate --output {folder}"):
            attempt()


def test_rollouts_without_a_trace_are_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path, GPU, RUNS[:2])
    with (folder / "steps" / "rollouts.jsonl").open("a") as file:
        file.write("\n" + json.dumps(batch_fields(5)) + "\n" + json.dumps(batch_fields(6, key=None)))
    assert [x.record.fields["key"] for x in step_windows(folder / "steps")] == ["run 1", "run 2"]


# Which version


def test_the_version_is_that_of_the_rollouts(folder: Path) -> None:
    assert measured_version(folder) == "0.26.0"


def test_two_versions_are_one_too_many(tmp_path: Path) -> None:
    folder = write(tmp_path, GPU, [batch_fields(1), batch_fields(2, engine_version="0.27.0")])
    with pytest.raises(ConfigError, match=r"rollouts\.jsonl holds rollouts of vLLM 0\.26\.0 and 0\.27\.0; .* move"):
        measured_version(folder)


# Which rows


@pytest.fixture
def kernels(tmp_path: Path) -> Callable[..., Path]:
    def put(**files: list[dict[str, object]]) -> Path:
        for name, rows in files.items():
            text = "\n".join(map(json.dumps, rows))
            (tmp_path / f"{name.replace('_failed', '.failed')}.jsonl").write_text(text)
        return tmp_path

    return put


def test_only_timings_that_a_cost_function_predicts_are_rows(kernels: Callable[..., Path]) -> None:
    good = {"kernel": "gemm.bf16", "m": 1, "n": 64, "k": 64, "seconds": 1e-5}
    small = {"kernel": "attention_mixed.bf16", "batch": 5, "seconds": 1e-6}
    found = kernel_rows(
        kernels(
            gemm=[good, good | {"seconds": None}],
            elementwise=[small],
            gemm_failed=[good],
            machines=[{"run": "a", "driver": "580"}],
        )
    )
    assert found[["kernel", "m", "n", "k", "seconds"]].to_dict("records") == [good]


def test_no_kernels_are_no_rows(tmp_path: Path) -> None:
    rows = kernel_rows(tmp_path / "absent")
    assert len(rows) == 0
    assert is_held_out(rows).shape == (0,)


def test_a_file_that_is_not_timings_is_named(kernels: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"other\.jsonl: no field 'seconds'; allowed: rows of kernel, seconds"):
        kernel_rows(kernels(other=[{"kernel": "gemm.bf16", "m": 1}]))


def test_unequal_contexts_are_held_out_and_unequal_experts_are_not() -> None:
    heads = {"heads": 32, "kv_heads": 8, "head_dim": 128}
    rows = [
        {"kernel": "attention_decode.fp8", "skew": "lognormal", **heads},
        {"kernel": "attention_decode.fp8", "skew": "even", **heads},
        {"kernel": "moe.bf16", "skew": "lognormal", "experts": 64, "top_k": 8, "hidden": 2048, "inner": 1024},
    ]
    assert is_held_out(pd.DataFrame(rows)).tolist() == [True, False, False]


def test_shapes_are_held_out_wherever_they_come_from() -> None:
    """By their sizes: a layer of another model that has the size of a held-out one is held out as well."""
    rows = pd.DataFrame(
        [
            {"kernel": "gemm.bf16", "m": 1, "n": UNSEEN_LAYER[0], "k": UNSEEN_LAYER[1]},
            {"kernel": "linear.fp8_block", "m": 9, "n": UNSEEN_LAYER[0], "k": UNSEEN_LAYER[1]},
            {"kernel": "gemm.bf16", "m": 1, "n": UNSEEN_LAYER[1], "k": UNSEEN_LAYER[0]},
            {"kernel": "attention_decode.fp8", "heads": 40, "kv_heads": 8, "head_dim": 128},
            {"kernel": "attention_decode.fp8", "heads": 32, "kv_heads": 8, "head_dim": 128},
            {"kernel": "moe.bf16", "experts": 128, "top_k": 8, "hidden": 4096, "inner": 1536},
            {"kernel": "moe.bf16", "experts": 128, "top_k": 8, "hidden": 2048, "inner": 768},
        ]
    )
    assert is_held_out(rows).tolist() == [True, True, False, True, False, True, False]


@pytest.mark.slow
def test_rare_parts_are_fitted_to_steps_unless_their_kernels_were_timed() -> None:
    sheet, shipped = datasheet_profile(H200), load_profile(H200)[0]
    wide = {name for name in sheet.coefficients if name.startswith(WIDE_HEADS)}
    rows = pd.DataFrame({"kernel": ["attention_decode.bf16", "attention_decode.fp8", "kv_write.fp8"]})
    assert timed_rare_parts(rows.assign(head_dim=128)) == timed_rare_parts(rows) == set()
    timed = timed_rare_parts(rows.assign(head_dim=[256, 128, 256]))
    assert timed == {f"{WIDE_HEADS}bf16.decode_"}
    assert not {name for name in without_rare_parts(sheet).coefficients if name.startswith(RARE_PARTS)}
    left = {name for name in without_rare_parts(sheet, timed).coefficients if name.startswith(RARE_PARTS)}
    [of_bf16] = {name for name in wide if "bf16" in name}
    assert left == {of_bf16}

    steps = step_windows(profile_path(profiles_path(), H200.name, "0.26.0").parent / "families")
    steps = [x for x in steps if x.record.fields["model"] == "Qwen/Qwen3.5-9B"]
    without = with_rare_parts(without_rare_parts(shipped), steps, sheet).coefficients
    assert all(without[name] != sheet.coefficients[name] for name in wide)
    known = without_rare_parts(replace(shipped, coefficients=shipped.coefficients | {of_bf16: 1e-9}), timed)
    found = with_rare_parts(known, steps, sheet).coefficients
    assert found[of_bf16] == 1e-9
    assert all(found[name] != sheet.coefficients[name] for name in wide - {of_bf16})


def test_another_versions_profile_lends_what_was_not_measured_and_no_more() -> None:
    shipped = load_profile(H200, "0.26.0")[0]
    assert of_another_version(H200, "0.30.0") is not None
    assert of_another_version(find_gpu("cpu"), "0.33.0") is None
    own = without_rare_parts(replace(shipped, engine_version="0.99.0", notes={}))
    lent = with_lent(own, shipped)
    rare = {name for name in shipped.coefficients if name.startswith(RARE_PARTS)}
    assert rare
    assert lent.coefficients == shipped.coefficients
    assert lent.notes == dict.fromkeys(rare, f"{FITTED}measurements with vllm 0.26.0")
    for name in rare:
        assert lent.log_covariance[name][name] == shipped.log_covariance[name][name] + VERSION_SD**2
    assert Profile.from_json(lent.to_json()) == lent
    again = with_lent(replace(own, engine_version="1.0.0"), lent)
    assert again.coefficients == own.coefficients  # a loan is not passed on
    assert with_lent(own, None) == own


def test_timings_of_wide_heads_reach_the_fit(tmp_path: Path) -> None:
    rows = [decodes(heads=[*HEADS[:2], (16, 4, 256)])]
    found = calibrate(write(tmp_path, GPU, RUNS[:2], rows, noise=0.02), H200, "0.26.0").profile
    measured = {name for name in found.coefficients if name.startswith(WIDE_HEADS)}
    assert measured == {f"{WIDE_HEADS}bf16.decode_token_seconds"}
