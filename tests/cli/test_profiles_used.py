"""Profiles that a plan can use or not, and `fp8plan calibrate`, which makes them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import RECORD, Done, first_choice, refused
from synthetic import PRIOR, batch_fields, nature, write_folder
from synthetic import SMALL as TINY
from typed import MODEL, PLAN

from fp8plan.model.profile import library
from fp8plan.model.profile.profile import Profile, between
from fp8plan.runtime.measure import calibrate, machine
from fp8plan.runtime.measure.rollouts import jobs as cells
from fp8plan.version import DEFAULT_VERSION

IMITATED = ("--engine-version", "0.26.0")  # by `synthetic`


def test_a_profile_of_another_version_is_used_with_a_note_and_refused_under_strict(
    fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from fp8plan.model.hardware import find_gpu

    measured = replace(library.load_profile(find_gpu("h200"))[0], kind="calibrated", engine_version=DEFAULT_VERSION)
    path = library.profile_path(tmp_path / "profiles", "h200_sxm", DEFAULT_VERSION)
    path.parent.mkdir(parents=True)
    path.write_text(measured.to_json())
    exact = fp8plan(*PLAN, "--json", "--strict")
    assert exact.code == 0
    assert exact.err.startswith("note: Stay with bf16")  # the choice alone, as the plan is on stdout
    assert exact.err.count("\n") == 1
    near = fp8plan(*PLAN, "--json", "--engine-version", "0.31.0")
    assert near.code == 0
    assert "0.31.0" in near.err
    assert DEFAULT_VERSION in near.err
    ratio = [first_choice(done)["makespan_high_s"] / first_choice(done)["makespan_s"] for done in (exact, near)]
    assert ratio[1] > ratio[0]
    strict = fp8plan(*PLAN, "--engine-version", "0.31.0", "--strict")
    refused(strict, "0.31.0", DEFAULT_VERSION, "leave --strict out")


def own_profile(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> Path:
    """The profile of an H200 and the newest vLLM that `fp8plan calibrate` left in the user's folder."""
    monkeypatch.setenv("FP8PLAN_PROFILES", str(folder))
    path = library.profile_path(folder, "h200_sxm", DEFAULT_VERSION)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


MEASURED = replace(
    PRIOR,
    kind="calibrated",
    source="a test",
    hull={"engine steps": {"sampled_requests": (1, 4)}},
    coefficients={name: 0.99 * value for name, value in PRIOR.coefficients.items()},  # none is the datasheet's
    notes={},
)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (MEASURED.to_json()[:-30], ("is not JSON",)),
        ("[]", ("list", "JSON object")),
        (MEASURED.to_json().replace('"calibrated"', '"guessed"'), ("'guessed'", "calibrated")),
        (MEASURED.to_json().replace('"hull"', '"hulk"'), ("'hull' is missing",)),
    ],
)
def test_a_corrupt_profile_is_refused_by_file_and_not_passed_over(
    fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, parts: tuple[str, ...]
) -> None:
    path = own_profile(monkeypatch, tmp_path / "own", text)
    for words in (PLAN, [*PLAN, "--strict"], [*PLAN, "--engine-version", "0.31.0"], ["profiles"]):
        refused(fp8plan(*words), str(path), *parts)


def test_outside_of_what_was_measured_is_said_and_marked(
    fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Measured with 4 requests at most: 2 x 2 lie inside, 4 x 2 outside. --strict is about versions alone."""
    own_profile(monkeypatch, tmp_path / "own", MEASURED.to_json())
    inside, outside = (fp8plan(*PLAN, "--strict", "--json", "--prompts", prompts) for prompts in (2, 4))
    outside_of = f"outside of what the profile h200_sxm/vllm-{DEFAULT_VERSION}"
    for done, extrapolated in ((inside, False), (outside, True)):
        answer = json.loads(done.out)
        assert {choice["extrapolated"] for choice in answer["choices"]} == {extrapolated}
        assert any(outside_of in x for x in answer["reasons"]) is extrapolated
        assert [line.partition(":")[2][:5] for line in done.err.splitlines()] == [" Stay"]  # the choice alone
    assert "outside of what the profile" in " ".join(fp8plan(*PLAN, "--prompts", 4).out.split())
    larger = RECORD | batch_fields(0, model=MODEL, engine_version=DEFAULT_VERSION)
    Path("records.jsonl").write_text(json.dumps(RECORD) + "\n" + json.dumps(larger))
    rows = json.loads(fp8plan("validate", "records.jsonl", "--strict", "--json").out)["records"]
    assert [row["extrapolated"] for row in rows] == [False, True]


def test_a_kernel_that_was_not_measured_is_named_with_the_command(
    fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = {x: v for x, v in PRIOR.coefficients.items() if not x.startswith("attention.fp8")}
    partly = replace(MEASURED, coefficients=kept, log_covariance=between(PRIOR.log_covariance, kept))
    own_profile(monkeypatch, tmp_path / "own", partly.to_json())
    assert fp8plan(*PLAN, "--precision", "bf16").code == 0
    refused(fp8plan(*PLAN, "--precision", "fp8_kv"), "attention.fp8", "not measured", "fp8plan calibrate --gpu auto")


CALIBRATE = ["calibrate", "--gpu", "h200"]


def calibrated_by_hand(folder: Path, **changes: Any) -> Path:
    """A folder of measurements of a GPU that is not the datasheet's."""
    runs = [batch_fields(1, longest=900), batch_fields(2, requests=60, **changes)]
    return write_folder(folder, nature(11), runs)


def test_a_calibration_prints_its_errors_and_plans_use_it(
    fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own, shipped = tmp_path / "own", tmp_path / "profiles"
    folder = calibrated_by_hand(library.profile_path(own, "h200_sxm", "0.26.0").parent)
    (shipped / "h200_sxm" / "vllm-0.26.0").mkdir(parents=True)
    (shipped / "h200_sxm" / "vllm-0.26.0" / "profile.json").write_text(replace(MEASURED, source="shipped").to_json())

    done = fp8plan(*CALIBRATE, "--fit-only", "--output", folder)
    assert done.code == 0
    header, row = (next(x for x in done.out.splitlines() if x.strip().startswith(y)) for y in ("kernel", "engine"))
    assert header.split() == ["kernel", "rows", "unseen", "before", "after", "held", "out", "worst"]
    before, after = (float(x.rstrip("%")) for x in row.split()[4:6])
    assert after < 2 < before
    assert "2 rollouts of 1 engines, measured on GPU-synthetic" in " ".join(done.out.split())
    assert done.err.splitlines()[-1] == f"written: {folder / 'profile.json'}"

    def source() -> str:
        answer = json.loads(fp8plan("plan", TINY, *PLAN[2:], *IMITATED, "--json", "--strict").out)
        return str(answer["profile"]["source"])

    assert source() == "shipped"
    monkeypatch.setenv("FP8PLAN_PROFILES", str(own))
    assert "GPU-synthetic" in source()
    listed = json.loads(fp8plan("profiles", "--json").out)
    assert [x["path"] for x in listed][:2] == [str(x / "h200_sxm/vllm-0.26.0/profile.json") for x in (own, shipped)]


def test_a_calibration_goes_where_plans_look_for_it(
    fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FP8PLAN_PROFILES", str(tmp_path / "own"))
    monkeypatch.setattr(cells, "engine_version", lambda: "0.26.0")
    asked = []

    def measure(folder: Path, card: Any, grid: str) -> None:
        asked.append((card.name, grid))
        calibrated_by_hand(folder)

    monkeypatch.setattr(calibrate, "measure", measure)
    assert fp8plan(*CALIBRATE, "--grid", "full").code == 0
    assert asked == [("h200_sxm", "full")]
    written = library.profile_path(tmp_path / "own", "h200_sxm", "0.26.0")
    assert Profile.from_json(written.read_text()).kind == "calibrated"
    assert fp8plan(*PLAN, *IMITATED, "--strict").code == 0


def test_a_calibration_without_a_gpu_says_so(
    fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    refused(fp8plan("calibrate"), "gpu 'auto' needs nvidia-ml-py", "h200_sxm")
    monkeypatch.setattr(cells, "engine_version", lambda: "0.26.0")
    monkeypatch.setattr(calibrate.subprocess, "run", lambda command: subprocess.CompletedProcess(command, 2))
    done = fp8plan(*CALIBRATE, "--output", tmp_path / "new")
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines()[-1].startswith("fp8plan: gemm could not be measured (exit status 2); the notes above")
    assert not (tmp_path / "new" / "profile.json").exists()


def test_a_calibration_without_vllm_says_what_to_install(
    fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(package: str) -> str:
        raise machine.PackageNotFoundError(package)

    monkeypatch.setattr(machine, "version", absent)
    refused(fp8plan(*CALIBRATE), "vLLM is not installed", "pip install 'fp8plan[vllm]'")


def test_a_fit_needs_measurements_of_one_version(fp8plan: Callable[..., Done], tmp_path: Path) -> None:
    refused(fp8plan(*CALIBRATE, "--fit-only"), "--fit-only needs --output")
    command = f"fp8plan calibrate --output {tmp_path}"
    refused(fp8plan(*CALIBRATE, "--fit-only", "--output", tmp_path), "no measured rollouts", command)
    folder = calibrated_by_hand(tmp_path / "two", engine_version="0.27.0")
    refused(fp8plan(*CALIBRATE, "--fit-only", "--output", folder), "vLLM 0.26.0 and 0.27.0", "move")
    refused(fp8plan(*CALIBRATE, "--grid", "huge"), "--grid", "quick", "fp8plan calibrate --help")
