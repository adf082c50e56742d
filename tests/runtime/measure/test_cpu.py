"""`fp8plan calibrate --gpu cpu`: engine steps of dense models only, in what a CPU has."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from fp8plan.model.hardware import find_gpu
from fp8plan.runtime.measure import calibrate
from fp8plan.runtime.measure.rollouts import run as run_rollouts


def test_a_cpu_is_calibrated_with_engine_steps_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(calibrate.subprocess, "run", run)
    calibrate.measure(tmp_path, find_gpu("cpu"), "quick")
    (command,) = started
    assert command[2].endswith(".rollouts.run")
    settings = json.loads((tmp_path / "steps" / "cells.json").read_text())
    assert [setting["gpu"] for setting in settings] == ["cpu"] * len(settings)
    assert all(setting["precisions"] == ["bf16", "fp8_kv"] for setting in settings)  # as listed: all of it fits


def test_blockwise_fp8_is_left_out_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    setting = {"model": "fp8plan/dense-50m", "gpu": "h200", "precisions": ["fp8_block", "fp8_kv"], "max_model_len": 64}
    (kept,) = calibrate.cells_for(find_gpu("cpu"), [setting])
    assert (kept["gpu"], kept["precisions"]) == ("cpu", ["fp8_kv"])
    assert "fp8_block left out on cpu" in capsys.readouterr().err


def test_a_machine_without_a_gpu_may_measure_its_cpu_and_is_asked_no_questions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_rollouts, "gpu_facts", lambda: {"gpu_product": None})
    run_rollouts._check_gpu([{"fields": {"gpu": "cpu"}}])
    assert capsys.readouterr().err == ""
    run_rollouts._check_gpu([{"fields": {"gpu": "h200_sxm"}}])
    assert "vouches for nothing" in capsys.readouterr().err
