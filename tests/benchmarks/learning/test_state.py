"""A run's folder: how a run that was broken off goes on, and what is read from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.learning import predicted
from benchmarks.learning.state import RunFolder
from fp8plan import schemas
from fp8plan.errors import ConfigError


def log_steps(folder: RunFolder, *steps: int) -> None:
    for name in ("run.jsonl", "steps.jsonl"):
        for step in steps:
            folder.log(name, {"step": step})


def test_a_run_goes_on_from_its_checkpoint_and_forgets_later_steps(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "0")
    assert folder.load("cpu") is None
    log_steps(folder, 1, 2)
    folder.save({"step": 2, "policy": {"w": torch.ones(3)}, "monitor": {"steps": 2, "controller": {"tis": 2.0}}})
    log_steps(folder, 3, 4)
    with (folder / "run.jsonl").open("a") as file:
        file.write('{"step": 5, "met')  # killed while it wrote
    again = RunFolder(tmp_path / "a" / "0")
    found = again.load("cpu")
    assert found is not None
    assert torch.equal(found["policy"]["w"], torch.ones(3))
    assert found["monitor"]["controller"] == {"tis": 2.0}
    log_steps(again, 3)
    assert [row["step"] for row in again.rows("run.jsonl")] == [1, 2, 3]
    assert [row["step"] for row in again.rows("steps.jsonl")] == [1, 2, 3]


def test_a_run_belongs_to_one_process(tmp_path: Path) -> None:
    with (
        RunFolder(tmp_path).locked(),
        pytest.raises(ConfigError, match="another process runs"),
        RunFolder(tmp_path).locked(),
    ):
        pass
    with RunFolder(tmp_path).locked():
        pass


def test_a_run_that_never_saved_begins_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    log_steps(folder, 1, 2)
    assert folder.load("cpu") is None
    assert folder.rows("run.jsonl") == []


def test_a_checkpoint_that_breaks_off_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    folder.save({"step": 1})

    def full(state: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("No space left")

    with monkeypatch.context() as changed:
        changed.setattr(torch, "save", full)
        with pytest.raises(OSError, match="No space left"):
            folder.save({"step": 2})
    assert folder.load("cpu") == {"step": 1}


def a_run(folder: Path, seconds: float, k3: float, reward: float) -> RunFolder:
    run = RunFolder(folder)
    said = dict.fromkeys(predicted.FORESEEN, 1.0) | {"kl_k3_low": 1e-3, "kl_k3_high": 1e-2, "pilot_reward": 0.4}
    run.write("predicted.json", said)
    for step in range(1, 21):
        slow = 100.0 if step == 1 else 1.0  # the first step warms up
        row = {"step": step, "reward": reward * step / 20, "response_tokens": 1000}
        run.log("steps.jsonl", row | {"rollout_s": slow * seconds, "step_s": slow * seconds + 1.0})
        metrics = {schemas.K3: k3, schemas.ESS_RAW: 0.9, schemas.CLIP_FRACTION: 0.01, schemas.TIS: 2.0 - 0.01 * step}
        run.log("run.jsonl", {"step": step, "metrics": metrics})
    run.write("done.json", {"reward_after": 0.7})
    return run


def test_what_was_observed_stands_beside_what_was_predicted(tmp_path: Path) -> None:
    bf16 = a_run(tmp_path / "bf16" / "0", 3.0, 5e-3, 0.8)
    fp8 = a_run(tmp_path / "fp8-adaptive" / "0", 2.0, 5e-2, 0.6)
    seen = predicted.observed(fp8)
    assert seen["reward"] == pytest.approx(0.6 * 39 / 40)  # of steps 19 and 20: the last tenth
    assert seen["lowest_c"] == pytest.approx(1.8)
    lines = predicted.table({("bf16", 0): bf16, ("fp8-adaptive", 0): fp8}).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    rows = {cell[0]: dict(zip(range(len(cell)), cell, strict=True)) for cell in cells[2:]}
    assert rows["fp8-adaptive"][4] == "0.7"
    assert rows["fp8-adaptive"][7] == "1.5"  # 3 s to 2 s
    assert rows["fp8-adaptive"][9] == "1.33"  # 4 s to 3 s
    assert rows["fp8-adaptive"][11] == "0.05 **outside**"
    assert rows["bf16"][11] == "0.005"
    assert rows["bf16"][16] == predicted.UNSEEN  # without a correction, C moves nothing

    said = predicted.read_json(fp8 / "predicted.json")
    fp8.write("predicted.json", said | {"at_once": 2})
    line = predicted.table({("bf16", 0): bf16, ("fp8-adaptive", 0): fp8}).splitlines()[-1].split("|")[1:-1]
    assert [line[at].strip() for at in (7, 9, 11)] == [predicted.UNSEEN, predicted.UNSEEN, "0.05 **outside**"]


def test_a_run_of_one_step_is_a_row_with_gaps(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "fp8" / "0")
    run.write("predicted.json", dict.fromkeys(predicted.FORESEEN) | {"pilot_reward": 0.4})
    run.log("steps.jsonl", {"step": 1, "reward": 0.5, "response_tokens": 10, "rollout_s": 1.0, "step_s": 2.0})
    assert "| fp8 | 0 | 1 | 0.4 | - | 0.5 | - | - | - | - | - |" in predicted.table({("fp8", 0): run})
    assert json.loads((run / "predicted.json").read_text())["speedup"] is None
