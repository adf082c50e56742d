"""Profiles: round trip, what is refused, and which file is chosen."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.errors import ConfigError, ProfileError
from fp8plan.model.calibrate.profile_of import BETWEEN_MODELS
from fp8plan.model.distributions import Fixed
from fp8plan.model.hardware import Gpu, find_gpu, gpus
from fp8plan.model.plan.planner import plan
from fp8plan.model.profile.library import (
    RARE_PARTS,
    ProfileEntry,
    datasheet_profile,
    list_profiles,
    load_profile,
    profile_path,
    profiles_path,
)
from fp8plan.model.profile.profile import (
    HOST_LOOP,
    HOST_PACE,
    KNOWN_HOST_SD,
    OTHER_HOST_SD,
    SEEN_LOOP_S,
    VERSION_SD,
    Profile,
)
from fp8plan.model.workload import Workload
from fp8plan.version import DEFAULT_VERSION

NAMES = ("gemm.bf16.launch_seconds", "gemm.bf16.bandwidth_efficiency", "overhead.step_seconds")


def calibrated(**changes: object) -> Profile:
    """A small measured profile, with what `changes` says."""
    facts = {
        "gpu": "h200_sxm",
        "engine": "vllm",
        "engine_version": "0.26.0",
        "kind": "calibrated",
        "source": "test",
        "kernel_backends": {"gemm.bf16": "cublas"},
        "coefficients": dict(zip(NAMES, (3e-6, 0.8, 2e-4), strict=True)),
        "log_covariance": {NAMES[0]: {NAMES[0]: 0.04, NAMES[1]: 0.01}, NAMES[1]: {NAMES[0]: 0.01, NAMES[1]: 0.01}},
        "residuals": {"gemm.bf16": 0.04},
        "model_error": 0.03,
        "hull": {"gemm": {"m": (1, 16384)}},
        "date": "2026-11-21",
    }
    profile = Profile(**{**facts, **changes})  # type: ignore[arg-type]
    return profile.with_errors(0.02, profile.model_error)


def write(folder: Path, profile: Profile) -> Path:
    path = folder / profile.gpu / f"{profile.engine}-{profile.engine_version}" / "profile.json"
    path.parent.mkdir(parents=True)
    path.write_text(profile.to_json())
    return path


@given(
    st.lists(st.floats(1e-9, 1.0), min_size=3, max_size=3),
    st.floats(0, 2),
    st.one_of(st.none(), st.tuples(st.floats(0, 10), st.floats(10, 1e6))),
)
def test_json_round_trip(values: list[float], model_error: float, span: tuple[float, float] | None) -> None:
    profile = calibrated(
        coefficients=dict(zip(NAMES, values, strict=True)),
        model_error=model_error,
        hull=None if span is None else {"attention": {"decode_kv_tokens": span}},
    )
    assert Profile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize("card", gpus(), ids=lambda card: card.name)
def test_datasheet_profile_is_complete_and_wide(card: object) -> None:
    profile = datasheet_profile(card)  # type: ignore[arg-type]
    assert (profile.kind, profile.gpu, profile.hull) == ("datasheet", card.name, None)  # type: ignore[attr-defined]
    assert "uncalibrated" in profile.label
    covariance = profile.covariance(list(profile.coefficients))
    assert np.diag(covariance).min() > 0  # every coefficient of a datasheet is uncertain
    assert np.linalg.eigvalsh(covariance).min() > -1e-12
    assert set(profile.notes) == set(profile.coefficients)  # each says where it is from
    assert Profile.from_json(profile.to_json()) == profile


def test_covariance_follows_the_order_of_names_and_is_zero_elsewhere() -> None:
    matrix = calibrated().covariance([NAMES[2], NAMES[1], NAMES[0]])
    assert matrix.tolist() == [[0, 0, 0], [0, 0.01, 0.01], [0, 0.01, 0.04]]


def test_exact_profile_is_used_without_a_word(tmp_path: Path) -> None:
    write(tmp_path, calibrated())
    exact = calibrated(engine_version=DEFAULT_VERSION)
    write(tmp_path, exact)
    assert load_profile(find_gpu("h200"), profiles_dir=tmp_path, strict=True) == (exact, [])
    assert load_profile("h200", profiles_dir=tmp_path, strict=True) == (exact, [])
    assert load_profile("h200", "0.26.0", profiles_dir=tmp_path, strict=True) == (calibrated(), [])


def test_nearest_version_is_used_with_a_warning_and_a_wider_interval(tmp_path: Path) -> None:
    write(tmp_path, calibrated(engine_version="0.25.1", model_error=0.1))
    write(tmp_path, calibrated(engine_version="0.9.0"))
    profile, warnings = load_profile(find_gpu("h200"), "0.26.0", profiles_dir=tmp_path)
    assert profile.engine_version == "0.25.1"
    assert profile.model_error == pytest.approx(np.hypot(0.1, VERSION_SD))
    assert profile.shared_error == pytest.approx(np.hypot(0.02, VERSION_SD))
    np.testing.assert_allclose(profile.covariance(NAMES), calibrated().covariance(NAMES))
    assert "0.26.0" in warnings[0]
    assert "0.25.1" in warnings[0]
    with pytest.raises(ProfileError, match=r"0\.26\.0.*0\.25\.1.*--strict"):
        load_profile(find_gpu("h200"), "0.26.0", strict=True, profiles_dir=tmp_path)


def test_strict_refuses_the_datasheet(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"only the datasheet.*fp8plan profiles"):
        load_profile(find_gpu("h200"), strict=True, profiles_dir=tmp_path)


def test_missing_kernel_names_the_measurement_and_the_command() -> None:
    with pytest.raises(ProfileError, match=r"gemm\.fp8_block.*not measured.*fp8plan calibrate --gpu auto"):
        calibrated().coefficient("gemm.fp8_block.launch_seconds")
    with pytest.raises(ProfileError, match=r"gemm\.fp8_block.*not measured.*fp8plan calibrate --gpu auto"):
        calibrated().backend("gemm.fp8_block")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "guessed"),
        ("model_error", -0.1),
        ("model_error", "small"),
        ("coefficients", {NAMES[0]: "3e-6"}),
        ("coefficients", {NAMES[0]: -1.0}),
        ("coefficients", {NAMES[0]: 3e-6, NAMES[1]: 1.2, NAMES[2]: 2e-4}),
        ("coefficients", [1.0]),
        ("log_covariance", {NAMES[0]: {NAMES[0]: 0.01, NAMES[1]: 0.2}, NAMES[1]: {NAMES[0]: 0.2, NAMES[1]: 0.01}}),
        ("log_covariance", {NAMES[0]: {NAMES[1]: 0.2}}),
        ("log_covariance", {NAMES[0]: 0.2}),
        ("log_covariance", {"gemm.none": {"gemm.none": 0.1}}),
        ("hull", {"gemm": {"m": [5, 1]}}),
        ("hull", {"gemm": 3}),
        ("hull", {"gemm": {"m": [1, 2, 3]}}),
        ("schema_version", 1),
    ],
)
def test_corrupt_file_names_file_and_field(tmp_path: Path, field: str, value: object) -> None:
    path = write(tmp_path, calibrated())
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(ProfileError) as error:
        load_profile(find_gpu("h200"), profiles_dir=tmp_path)
    assert str(path) in str(error.value)
    assert field in str(error.value)


def test_file_without_a_field_or_not_json(tmp_path: Path) -> None:
    path = write(tmp_path, calibrated())
    raw = json.loads(path.read_text())
    del raw["model_error"]
    path.write_text(json.dumps(raw))
    with pytest.raises(ProfileError, match=r"profile\.json: field 'model_error' is missing"):
        load_profile(find_gpu("h200"), profiles_dir=tmp_path)
    path.write_text("{")
    with pytest.raises(ProfileError, match=r"profile\.json is not JSON"):
        load_profile(find_gpu("h200"), profiles_dir=tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("coefficients", {NAMES[0]: 3e-6, NAMES[1]: "0.8"}, rf"coefficients\['{NAMES[1]}'\] is '0.8'; allowed: a num"),
        ("coefficients", {NAMES[0]: 3e-6, NAMES[1]: 10**400}, rf"\['{NAMES[1]}'\] is 1000.*; allowed: a finite number"),
        ("hull", {"gemm": {"m": [1, 2], "n": [1, 2, 3]}}, r"hull\['gemm'\]\['n'\] is \[1, 2, 3\]; allowed: a list"),
        ("hull", {"gemm": {"m": [5, 1]}}, r"hull\['gemm'\]\['m'\] is \[5.0, 1.0\]; allowed: \[lowest, highest\]"),
        ("tensor_parallel", [1, 2.5], r"tensor_parallel\[1\] is 2.5; allowed: a whole number"),
        ("date", None, "date is None; allowed: text"),
        ("model_error", float("nan"), "is not JSON: it holds NaN; allowed: finite numbers, or null"),
        ("schema_version", "2.0", r"has schema 2.0; this is fp8plan .*, which reads schema 1.x: type: pip inst"),
        ("schema_version", "newest", "schema_version is 'newest'; allowed: text such as '1.1'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_to_the_entry(field: str, value: object, message: str) -> None:
    text = json.dumps(json.loads(calibrated().to_json()) | {field: value})
    with pytest.raises(ProfileError, match=rf"^own/profile\.json.*{message}"):
        Profile.from_json(text, "own/profile.json")


def test_an_entry_of_the_datasheet_that_lacks_a_field_is_named(tmp_path: Path) -> None:
    raw = json.loads((profiles_path() / "datasheet.json").read_text())
    *_, last = raw["common"]["coefficients"]
    del raw["common"]["coefficients"][last]["log_sd"]
    (tmp_path / "datasheet.json").write_text(json.dumps(raw))
    with pytest.raises(ProfileError, match=re.escape(f"field \"common.coefficients['{last}'].log_sd\" is missing")):
        datasheet_profile(find_gpu("h200"), profiles_dir=tmp_path)


def test_a_later_version_of_the_same_schema_may_say_more_and_the_first_had_no_version() -> None:
    raw = json.loads(calibrated().to_json())
    assert raw.pop("schema_version") == "1.1"
    for text in (json.dumps(raw), json.dumps(raw | {"schema_version": "1.7", "colour": {"r": [1]}})):
        assert Profile.from_json(text) == calibrated()


def test_an_own_folder_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8PLAN_PROFILES", str(tmp_path / "typo"))
    for use in (lambda: load_profile(find_gpu("h200")), list_profiles):
        with pytest.raises(ConfigError, match=r"FP8PLAN_PROFILES is .*typo, and there is no such folder; .*unset"):
            use()


@pytest.mark.parametrize("version", ["0.26.0", "0.99.0"])
def test_an_own_folder_without_a_profile_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setenv("FP8PLAN_PROFILES", str(tmp_path))
    warning = load_profile(find_gpu("h200"), version)[1][0]
    assert warning.startswith(f"FP8PLAN_PROFILES is {tmp_path}, which holds no profile")
    write(tmp_path, calibrated(gpu="b200"))  # of another GPU, so nothing was mistyped
    assert not any("FP8PLAN_PROFILES" in warning for warning in load_profile(find_gpu("h200"), version)[1])


def test_the_usual_folder_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FP8PLAN_PROFILES", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert load_profile(find_gpu("h200"))[1] == []
    own = write(tmp_path / "data" / "fp8plan" / "profiles", calibrated(gpu="h200_sxm", source="my own"))
    assert load_profile(find_gpu("h200"), "0.26.0")[0].source == "my own"
    assert list_profiles()[0].path == own


def test_the_note_of_an_imported_profile_is_one_short_line() -> None:
    found, warnings = load_profile(find_gpu("h100"), "0.24.0")
    assert found.kind == "imported"
    (note,) = warnings
    assert len(note) < 120
    assert "imported, not measured here" in note
    assert "fp8plan profiles" in note


def test_list_profiles(tmp_path: Path) -> None:
    assert [entry.kind for entry in list_profiles()][-1] == "datasheet"
    write(tmp_path, calibrated())
    write(tmp_path, replace(calibrated(), gpu="b200_sxm", engine_version="0.25.1"))
    found = {(entry.gpu, entry.engine_version, entry.kind) for entry in list_profiles(tmp_path)}
    assert found == {("h200_sxm", "0.26.0", "calibrated"), ("b200_sxm", "0.25.1", "calibrated")}


LAYERS = {"gemm.bf16": {"4096x1024": [[1, 64], [0.1, -0.2]]}}


def test_a_layer_that_was_timed_is_interpolated_and_another_is_left_alone() -> None:
    profile = calibrated(layers=LAYERS)
    assert Profile.from_json(profile.to_json()) == profile
    rows = np.array([1, 8, 64, 4096])
    factor = profile.layer_factor("gemm.bf16", (4096, 1024), rows)
    np.testing.assert_allclose(np.log(factor), [0.1, -0.05, -0.2, -0.2])  # 8 is half way between 1 and 64
    for kernel, shape in (("gemm.bf16", (1024, 4096)), ("gemm.fp8_block", (4096, 1024))):
        assert profile.layer_factor(kernel, shape, rows).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "bad", [[[1], [0.1], [2]], [[1, 2], [0.1]], [[2, 1], [0.1, 0.1]], [[0], [0.1]], [[1], ["x"]], 3]
)
def test_layers_that_are_no_table_are_refused(bad: object) -> None:
    raw = json.loads(calibrated().to_json()) | {"layers": {"gemm.bf16": {"4096x1024": bad}}}
    with pytest.raises(ProfileError, match=r"own/profile\.json: layers.*4096x1024.*(rising numbers of rows|allowed)"):
        Profile.from_json(json.dumps(raw), "own/profile.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_error": "INFINITE"}, "model_error is inf; allowed: a finite number"),
        ({"model_error": -0.1}, "model_error is -0.1; allowed: a number >= 0"),
        ({"coefficients": {"host.step_seconds": "INFINITE"}}, "is inf; allowed: a finite number above 0"),
        ({"coefficients": {"host.step_seconds": 0}}, "is 0.0; allowed: a finite number above 0"),
        ({"layers": {"gemm.bf16": {"4096x1024": [[1], ["INFINITE"]]}}}, "is not [rising numbers of rows"),
        ({"kind": "guessed"}, "kind is 'guessed'; allowed: datasheet, calibrated, imported"),
    ],
)
def test_a_number_that_no_profile_has_is_refused(changes: dict[str, Any], message: str) -> None:
    text = json.dumps(json.loads(calibrated().to_json()) | {"log_covariance": {}} | changes)
    with pytest.raises(ProfileError, match=re.escape(message)):
        Profile.from_json(text.replace('"INFINITE"', "1e999"))  # which JSON takes for infinity


def test_a_layout_nobody_measured_adds_what_an_engine_nobody_measured_does() -> None:
    own, imported = (load_profile(name, version)[0] for name, version in (("h200", "0.26.0"), ("h100", "0.24.0")))
    assert own.kind == "calibrated"
    assert imported.kind == "imported"
    excess = np.sqrt(imported.shared_error**2 + imported.model_error**2 - 0.046**2)  # both with their hosts' errors
    assert own.layout_error(2) == pytest.approx(excess, rel=0.02)
    assert own.layout_error(1) == 0
    assert own.layout_error(8) == pytest.approx(np.sqrt(3) * own.layout_error(2))
    seen = replace(own, tensor_parallel=[1, 4])
    assert seen.layout_error(4) == 0
    assert seen.layout_error(2) == seen.layout_error(8) == own.layout_error(2)


@pytest.mark.parametrize("entry", [entry for entry in list_profiles(profiles_path()) if entry.kind != "datasheet"])
def test_no_coefficient_is_wider_than_in_the_datasheet_profile(entry: ProfileEntry) -> None:
    profile = Profile.from_json(entry.path.read_text())
    sheet = datasheet_profile(find_gpu(profile.gpu))
    for name, row in profile.log_covariance.items():
        between_models = BETWEEN_MODELS if name.startswith(RARE_PARTS) else 0.0
        assert row[name] <= (sheet.log_covariance[name][name] + between_models**2) * (1 + 1e-9), name


@pytest.mark.parametrize(
    ("gpu", "sibling", "version"),
    [("h20", "h200_sxm", "0.26.0"), ("b300", "b200", "0.26.0"), ("a100_pcie", "a100_sxm", "0.26.0")],
)
def test_a_gpu_that_nobody_measured_has_the_profile_of_its_sibling(gpu: str, sibling: str, version: str) -> None:
    profile, (note, *_) = load_profile(gpu, version, profiles_dir=profiles_path())
    assert f"no profile of {gpu} for vllm {version}: using {sibling}'s vllm" in note
    assert "(same architecture) with a wider interval" in note
    with pytest.raises(ProfileError, match=f"no profile of {gpu} .*the nearest is {sibling}'s vllm-"):
        load_profile(gpu, version, strict=True, profiles_dir=profiles_path())
    own = load_profile(sibling, version, profiles_dir=profiles_path())[0]
    assert (profile.gpu, profile.kind) == (gpu, "imported")
    kept = {name for name in own.coefficients if name.startswith(("gemm.", "attention.", "host."))}
    assert {name: profile.coefficients[name] for name in kept} == {name: own.coefficients[name] for name in kept}
    assert profile.shared_error > own.shared_error


@pytest.mark.parametrize("gpu", ["rtx_4090", "a10", "rtx_5090"])
def test_cards_without_hbm_have_no_siblings(gpu: str) -> None:
    assert load_profile(gpu, profiles_dir=profiles_path())[0].kind == "datasheet"


def test_a_corrupt_profile_of_another_gpu_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "datasheet.json").write_text((profiles_path() / "datasheet.json").read_text())
    for name in ("l40s", "no-such-gpu"):
        file = profile_path(tmp_path, name, "0.26.0")
        file.parent.mkdir(parents=True)
        file.write_text("{")
    assert load_profile("h20", profiles_dir=tmp_path)[0].kind == "datasheet"


def test_a_hosts_loop_scales_all_its_seconds_and_no_others() -> None:
    profile = load_profile("h200", "0.26.0", profiles_dir=profiles_path())[0]
    slow = profile.on_host(2 * profile.coefficient(HOST_LOOP))
    assert slow.coefficient(HOST_PACE) == pytest.approx(2 * profile.coefficient(HOST_PACE))
    assert slow.coefficient(HOST_LOOP) == pytest.approx(2 * profile.coefficient(HOST_LOOP))
    assert HOST_LOOP not in slow.log_covariance  # observed rollouts cannot move it
    same = profile.coefficients.keys() - {HOST_PACE, HOST_LOOP}
    assert all(slow.coefficients[name] == profile.coefficients[name] for name in same)
    again = slow.on_host(profile.coefficient(HOST_LOOP))
    assert again.coefficient(HOST_PACE) == pytest.approx(profile.coefficient(HOST_PACE))
    assert slow.on_host(None) is slow


@pytest.mark.parametrize(("gpu", "version"), [("h200", "0.26.0"), ("h200", "0.27.0"), ("h100", "0.26.0")])
def test_a_loaded_profile_is_for_the_hosts_that_were_seen(gpu: str, version: str) -> None:
    """Whatever a profile is used for, its own host is no better guess than any other."""
    raw = Profile.from_json((profiles_path() / "h200_sxm" / "vllm-0.26.0" / "profile.json").read_text())
    there = load_profile(gpu, version, profiles_dir=profiles_path())[0]
    assert there.coefficient(HOST_LOOP) == SEEN_LOOP_S
    assert there.coefficient(HOST_PACE) == pytest.approx(SEEN_LOOP_S / raw.coefficient(HOST_LOOP))
    timed = there.on_host(raw.coefficient(HOST_LOOP))
    assert timed.coefficient(HOST_PACE) == pytest.approx(1.0)
    before, after = (profile.log_covariance[HOST_PACE][HOST_PACE] for profile in (there, timed))
    assert before == pytest.approx(there.shared_error**2 + OTHER_HOST_SD**2)
    assert after == pytest.approx(there.shared_error**2 + KNOWN_HOST_SD**2)


def test_the_users_hosts_are_expected_to_be_like_the_one_that_was_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (profiles_path() / "h200_sxm" / "vllm-0.26.0" / "profile.json").read_text()
    file = tmp_path / "h200_sxm" / "vllm-0.26.0" / "profile.json"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    monkeypatch.setenv("FP8PLAN_PROFILES", str(tmp_path))
    there = load_profile("h200", "0.26.0")[0]
    assert there.coefficient(HOST_LOOP) == Profile.from_json(text).coefficient(HOST_LOOP)
    assert there.coefficient(HOST_PACE) == 1.0
    assert there.log_covariance[HOST_PACE][HOST_PACE] == pytest.approx(there.shared_error**2 + OTHER_HOST_SD**2)


@pytest.mark.parametrize("use", [Profile.of_another_version, lambda profile: profile.of_sibling("h100_sxm")])
def test_another_use_of_a_profile_keeps_its_host_and_the_doubt_about_it(use: Callable[[Profile], Profile]) -> None:
    here = load_profile("h200", "0.26.0", profiles_dir=profiles_path())[0]
    there = use(here)
    assert there.coefficient(HOST_PACE) == here.coefficient(HOST_PACE)
    assert there.log_covariance[HOST_PACE][HOST_PACE] == pytest.approx(there.shared_error**2 + OTHER_HOST_SD**2)


@pytest.mark.parametrize("loop", [0.0, -1e-4, 480, float("nan"), "fast"])
def test_a_loop_that_no_host_needs_is_refused(loop: Any) -> None:
    with pytest.raises(ConfigError, match="allowed: seconds, such as"):
        calibrated().on_host(loop)


BETTER = [("a100_sxm", "a100_pcie"), ("b300", "b200"), ("h200", "h100"), ("h200", "h20"), ("gh200", "h100")]


@pytest.mark.parametrize("preset", ["bf16", "fp8_kv"])
@pytest.mark.parametrize(("better", "worse"), BETTER)
def test_a_gpu_that_is_better_in_each_row_of_its_datasheet_is_never_slower(
    better: str, worse: str, preset: str
) -> None:
    """With one profile, so that only the datasheets differ."""
    cards = find_gpu(better), find_gpu(worse)
    profile = load_profile(cards[1], profiles_dir=profiles_path())[0]
    assert cards[0].memory_bandwidth >= cards[1].memory_bandwidth
    assert cards[0].bf16_flops >= cards[1].bf16_flops
    for requests in (1, 16, 128, 256):
        work = Workload(requests, 1, Fixed(64), Fixed(64))
        fast, slow = (
            plan("Qwen/Qwen3-8B", card, work, precisions=[preset], profile=profile).choices[0].makespan_s
            for card in cards
        )
        assert fast <= 1.005 * slow, requests


def test_the_kinds_of_profiles_keep_their_order() -> None:
    own, imported = (load_profile(*name)[0] for name in (("h200", "0.26.0"), ("h100", "0.24.0")))
    kinds = [own, imported, datasheet_profile(find_gpu("h100"))]
    for errors in ([x.shared_error for x in kinds], [np.hypot(x.shared_error, x.model_error) for x in kinds]):
        assert errors == sorted(errors)


def test_the_sizes_that_were_measured_are_kept_and_may_be_missing() -> None:
    profile = calibrated(tensor_parallel=[1, 2])
    assert Profile.from_json(profile.to_json()).tensor_parallel == [1, 2]
    raw = json.loads(profile.to_json())
    del raw["tensor_parallel"]
    assert Profile.from_json(json.dumps(raw)).tensor_parallel == [1]
    with pytest.raises(ProfileError, match=r"tensor_parallel\[0\] is 0; allowed: a whole number >= 1"):
        Profile.from_json(json.dumps(raw | {"tensor_parallel": [0]}))


@pytest.mark.parametrize("card", gpus(), ids=lambda card: card.name)
def test_every_gpu_has_the_kernels_of_its_generation(card: Gpu) -> None:
    """FlashAttention 3 is for 9.0 and DeepGEMM for 9.0 and 10.x alone; an architecture without a row of its own has
    that of the nearest before it."""
    kernels = datasheet_profile(card).kernel_backends
    major = card.compute_capability[0]
    assert (kernels["attention.bf16"] == "flash_attn_3") == (major == 9)
    assert (kernels["attention.bf16"] == "flash_attn_2") == (major in (8, 12))
    if card.has_fp8:
        assert ("deep_gemm" in kernels["gemm.fp8_block"]) == (major in (9, 10))
    spark = find_gpu("datasheet:memory_gib=110,bandwidth_gb_s=273,bf16_tflops=60,sms=48,compute_capability=12.1")
    assert datasheet_profile(spark).kernel_backends == datasheet_profile(find_gpu("rtx_5090")).kernel_backends
    assert datasheet_profile(find_gpu("a10")).kernel_backends == datasheet_profile(find_gpu("a100")).kernel_backends
