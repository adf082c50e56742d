"""The rollouts of two engines correct the nearest profile: which one, by how much, and what the result rests on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from synthetic import batch_fields

from fp8plan.errors import ConfigError
from fp8plan.model.calibrate.two_engines import (
    by_two_engines,
    calibrate_by_two_engines,
    check_replaceable,
    seconds_spent,
)
from fp8plan.model.hardware import find_gpu
from fp8plan.model.profile.library import datasheet_profile, load_profile, nearest_profile, profile_path, profiles_path
from fp8plan.model.profile.profile import ANCHORED, ASSUMED, FITTED, SEEN, Profile
from fp8plan.model.profile.sibling import rates_of_sibling, watts_of_sibling
from fp8plan.model.rollout import Rollout
from fp8plan.model.validate.records import Record, read_records
from fp8plan.model.validate.validate import simulated

H200, H100 = find_gpu("h200"), find_gpu("h100")
FOLDER = profiles_path() / "h200_sxm" / "vllm-0.26.0"
SHEET = datasheet_profile(H200)
MEASURED, _ = load_profile(H200, "0.26.0", profiles_dir=profiles_path())
IMPORTED = load_profile(H100, "0.24.0", profiles_dir=profiles_path())[0]
SIBLING = IMPORTED.of_another_version().of_sibling(H200.name)


def of(records: Sequence[Record], model: str, *precisions: str) -> list[Record]:
    return [x for x in records if x.fields["model"] == model and x.fields["precision"] in precisions]


STEPS = read_records(FOLDER / "steps" / "rollouts.jsonl")
ENGINES = of(STEPS, "fp8plan/moe-7b", "bf16", "fp8_block+fp8_kv")
JUDGES = [x for x in read_records(FOLDER / "validation" / "rollouts.jsonl") if "host_loop_s" in x.fields][::3]


@pytest.fixture(scope="module", params=[SHEET, SIBLING], ids=["datasheet", "sibling"])
def pair(request: pytest.FixtureRequest) -> tuple[Profile, Profile]:
    """A prior, and the profile that the engines make of it."""
    return request.param, by_two_engines(request.param, ENGINES, "0.26.0")


def rollouts(profile: Profile) -> list[Rollout]:
    return [simulated(record, profile).rollout for record in JUDGES]


def widths(made: Sequence[Rollout]) -> np.ndarray:
    return np.log([x.makespan_high_s / x.makespan_low_s for x in made])


def test_intervals_lie_between_those_of_the_prior_and_of_a_full_calibration(pair: tuple[Profile, Profile]) -> None:
    before, after, full = (widths(rollouts(profile)) for profile in (*pair, MEASURED))
    assert (after < 1.12 * before).all()  # wider where the host, whose error is larger, gets more of the time
    assert (after > full).all()
    assert np.median(after) < 0.9 * np.median(before)


def test_no_coefficient_is_wider_than_in_the_prior(pair: tuple[Profile, Profile]) -> None:
    prior, made = pair
    narrower = 0
    for name, row in prior.log_covariance.items():
        assert made.log_covariance[name][name] <= row[name] * (1 + 1e-9), name
        narrower += made.log_covariance[name][name] < 0.9 * row[name]
    assert narrower >= 5
    assert made.model_error == prior.model_error
    assert not [name for name in made.coefficients if name.startswith("precision.")]


def test_the_datasheets_error_on_rollouts_that_nobody_fitted_falls_by_more_than_a_third() -> None:
    made = by_two_engines(SHEET, ENGINES, "0.26.0")
    seconds = np.array([record.seconds for record in JUDGES])
    before, after = (
        float(np.mean(np.abs([x.makespan_s for x in rollouts(profile)] / seconds - 1))) for profile in (SHEET, made)
    )
    assert after < 2 / 3 * before


def test_it_says_what_it_rests_on(pair: tuple[Profile, Profile]) -> None:
    prior, made = pair
    assert (made.kind, made.gpu, made.engine_version) == (ANCHORED, "h200_sxm", "0.26.0")
    assert made.source.startswith(f"{prior.label}, corrected by 8 rollouts of 2 engines on GPU-")
    assert Profile.from_json(made.to_json()) == made
    assert "rests on the rollouts of two engines" in made.remarks[0]
    told = {name for name, note in made.notes.items() if note.startswith(SEEN)}
    assert "host.step_seconds" in told
    assert not any(name.startswith(("mla.", "mamba2.", "collective.", "wide_attention.")) for name in told)
    seen, other = (made.notes[name] for name in ("host.step_seconds", "collective.nvlink.latency_seconds"))
    assert seen.startswith(SEEN)
    assert not other.startswith((SEEN, FITTED)) or other == prior.notes["collective.nvlink.latency_seconds"]


def test_kernels_that_were_not_measured_keep_their_ground(pair: tuple[Profile, Profile]) -> None:
    prior, made = pair
    unseen = "imported" if prior.hull else "theory"
    dense = next(x for x in JUDGES if x.fields["model"] == "Qwen/Qwen3-14B")
    grounds = simulated(dense, made).rollout.rests_on
    assert sum(grounds["shares"].values()) == pytest.approx(1.0)
    assert set(grounds["kernels"]["gemm"]) <= {unseen, "extrapolated", "theory"}  # no engine had such layers
    assert grounds["kernels"]["gemm"][unseen] > 0.05
    assert "measured" in grounds["kernels"]["host"]


def test_an_engine_of_experts_measures_experts() -> None:
    made = by_two_engines(SHEET, ENGINES, "0.26.0")
    shares = simulated(ENGINES[0], made).rollout.rests_on["kernels"]
    assert shares["moe"].keys() == {"measured"}
    assert simulated(ENGINES[0], SHEET).rollout.rests_on["shares"].keys() == {"theory"}


def test_the_range_of_what_was_measured_is_that_of_the_steps_where_the_prior_has_none(
    pair: tuple[Profile, Profile],
) -> None:
    prior, made = pair
    if prior.hull is None:
        assert made.hull["engine steps"]["decode_requests"] == (1, 512)
        assert made.hull["gemm.bf16"]["k"] == (2048, 2048)
    else:
        assert made.hull.items() >= prior.hull.items()
        assert "gemm.bf16" in prior.hull
        assert "n" not in made.hull["engine steps"]


# Which prior


def own(folder: Path, profile: Profile) -> None:
    path = profile_path(folder, profile.gpu, profile.engine_version)
    path.parent.mkdir(parents=True)
    path.write_text(profile.to_json())


def test_the_nearest_profile_was_measured_here_then_on_a_sibling_then_imported(tmp_path: Path) -> None:
    (tmp_path / "datasheet.json").write_text((profiles_path() / "datasheet.json").read_text())
    assert nearest_profile(H100, "0.40.0", tmp_path).kind == "datasheet"
    own(tmp_path, replace(MEASURED, gpu="h200_sxm"))
    sibling = nearest_profile(H100, "0.26.0", tmp_path)
    assert (sibling.gpu, sibling.kind) == ("h100_sxm", "imported")
    assert sibling.source.startswith("measurements of h200_sxm with vllm 0.26.0: ")
    watts = watts_of_sibling(MEASURED.coefficients, H200, H100)
    assert sibling.coefficients == rates_of_sibling(watts, H200, H100)
    assert sibling.shared_error > MEASURED.shared_error
    assert sibling.model_error > MEASURED.model_error
    later = nearest_profile(H100, "0.40.0", tmp_path)
    assert later.shared_error > sibling.shared_error
    own(tmp_path, replace(SHEET, gpu="h100_sxm", kind=ANCHORED, engine_version="0.40.0", hull={}))
    assert nearest_profile(H100, "0.40.0", tmp_path) == later  # one that was made so is no prior
    own(tmp_path, replace(SHEET, gpu="h100_sxm", kind="imported", engine_version="0.24.0", hull={}))
    assert nearest_profile(H100, "0.40.0", tmp_path) == later
    own(tmp_path, replace(MEASURED, gpu="h100_sxm", engine_version="0.30.0"))
    mine = nearest_profile(H100, "0.40.0", tmp_path)
    assert (mine.gpu, mine.engine_version, mine.kind) == ("h100_sxm", "0.30.0", "calibrated")
    assert nearest_profile(find_gpu("cpu"), "0.30.0").kind == "datasheet"  # other CPUs tell little
    assert nearest_profile(find_gpu("a100"), "0.26.0").kind == "imported"  # of Ampere nothing is measured


def test_another_versions_kernels_are_not_called_measured() -> None:
    prior = replace(MEASURED, engine_version="0.25.0").of_another_version()
    made = by_two_engines(prior, ENGINES, "0.26.0")
    assert made.notes["attention.bf16.prefill_pair_seconds"] == "fitted to measurements with vllm 0.25.0"
    same = by_two_engines(MEASURED, ENGINES, "0.26.0")
    assert "attention.bf16.prefill_pair_seconds" not in same.notes


def test_a_part_that_the_datasheet_lent_is_named_as_before(pair: tuple[Profile, Profile]) -> None:
    prior, made = pair
    lent = {name for name, note in prior.notes.items() if note.startswith(ASSUMED)}
    assert {name for name in lent if not made.notes[name].startswith((ASSUMED, SEEN))} == set()


# From a folder


def anchor_folder(folder: Path, seconds: float = 1.0, version: str = "0.26.0") -> Path:
    (folder / "anchor").mkdir(parents=True)
    spent = {"warmup_s": 2.0, "engine_start_s": 30.0, "compile_s": 4.0, "seconds": seconds, "engine_version": version}
    rows = [batch_fields(seed, precision=name) | spent for seed, name in enumerate(("bf16", "bf16", "fp8_kv"))]
    (folder / "anchor" / "rollouts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_starts_and_compilation_are_told_apart_from_measuring(tmp_path: Path) -> None:
    folder = anchor_folder(tmp_path)
    (folder / "anchor" / "rollouts.set_aside.jsonl").write_text(json.dumps(batch_fields(1) | {"seconds": 5.0}))
    made = calibrate_by_two_engines(folder, H200, "0.26.0")
    words = (
        "8 s of timed rollouts and 6 s of warm-ups, beside 60 s of the engines' starts and 8 s of their first prompts"
    )
    assert words in made.profile.source
    assert seconds_spent([], []).startswith("0 s of timed rollouts")
    assert [(x.kernel, x.rows) for x in made.errors] == [("fp8plan/dense-50m bf16", 2), ("fp8plan/dense-50m fp8_kv", 1)]
    assert made.prior == MEASURED.label
    assert all(x.fitted < x.before for x in made.errors)


def test_a_full_calibration_is_not_overwritten_and_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no measured rollouts"):
        calibrate_by_two_engines(tmp_path, H200, "0.26.0")
    folder = anchor_folder(tmp_path / "own", version="0.27.0")
    with pytest.raises(ConfigError, match=r"is of h200_sxm with vLLM 0\.27\.0"):
        calibrate_by_two_engines(folder, H200, "0.26.0")
    check_replaceable(folder)
    (folder / "profile.json").write_text(MEASURED.to_json())
    with pytest.raises(ConfigError, match="fuller calibration"):
        check_replaceable(folder)
    (folder / "profile.json").write_text(calibrate_by_two_engines(folder, H200, "0.27.0").profile.to_json())
    check_replaceable(folder)


def test_a_busy_host_is_warned_of(tmp_path: Path) -> None:
    folder = Path(__file__).parents[3] / "benchmarks" / "results" / "grid_h100"
    with pytest.warns(RuntimeWarning, match="Python took 1.5 times as long as on a quiet core"):
        made = calibrate_by_two_engines(folder, find_gpu("h100"), "0.26.0")
    assert made.profile.kind == "anchored"
