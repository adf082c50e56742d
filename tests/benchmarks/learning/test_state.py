"""A run's folder: how a run that was broken off goes on, and what is read from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.learning.state import RunFolder
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
