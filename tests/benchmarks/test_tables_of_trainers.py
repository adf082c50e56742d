"""The tables of trainers' runs, and the function that writes any of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tables import trainers
from benchmarks.tables.markdown import table


def a_run(steps: int, *words: str, **more: list[float]) -> list[dict[str, Any]]:
    """The rows of a run of verl's, whose first two steps are slow and whose reward rises to 1."""
    begun = {"what": "command", "gpus": 1, "mode": "sync", "precision": "bf16", "words": words}
    begun["gpu_product"] = "NVIDIA H100 80GB HBM3"
    rows = [
        {"what": "step", "timing_s/gen": 9.0 if number < 2 else 3.0, "critic/score/mean": (number + 1) / steps}
        | {f"timing_s/{name}": 1.0 for name in ("update_weights", "step")}
        | {"rollout_corr/k3_kl": 0.001}
        | {name: values[number] for name, values in more.items()}
        for number in range(steps)
    ]
    return [begun, *rows, {"what": "done"}]


def test_a_run_that_did_not_come_to_its_end_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {"fp8plan/threshold_tis": [2.0, 1.857, *[1.98] * 18]}
    failed = [*a_run(20), {"what": "failed"}, {"what": "command", "words": []}, {"what": "failed"}]
    rows = [{"what": "note"}, *failed, *a_run(20), *a_run(20, "x.target_kl=0.003", "y.custom_sampler.name=z", **ours)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    monkeypatch.setattr(trainers, "VERL", tmp_path / "rows.jsonl")
    monkeypatch.setattr(trainers, "VERL_H100", tmp_path / "rows.jsonl")
    lines = trainers.verl().splitlines()
    figures = "3.00 | 1.00 | 1.00 | 0.050 to 1.000 | 1.0e-03"
    stock = f"| stock, `bf16` | 1 H100 | sync | {figures} |  |"
    ours_too = f"| fp8plan, `bf16`, target 0.003 | 1 H100 | sync, looks every 0.1 s | {figures} | 1.86 to 2 |"
    assert lines[2:] == [stock, ours_too] * 2  # of both files


def a_part(part: str, steps: int) -> list[dict[str, Any]]:
    """The rows of a part of TRL's server mode."""
    begun = {"what": "server", "part": part, "precision": "fp8_kv", "gpu_product": "NVIDIA H200", "start_s": 80.0}
    syncs = [{"what": "sync", "seconds": 1.0, "report": None}] * steps
    step = {"what": "step", "step_time": 3.0, "sampling.importance_sampling_ratio.mean": 1.0}
    return [begun, *syncs, *[step] * steps, {"what": "step", "train_runtime": 9.0}, {"what": "done"}]


def test_a_part_that_is_too_short_for_medians_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [*a_part("fp8plan", 3), {"what": "failed", "part": "stock"}, *a_part("stock", 2)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    monkeypatch.setattr(trainers, "TRL", tmp_path / "rows.jsonl")
    monkeypatch.setattr(trainers, "TRL_H100", tmp_path / "none.jsonl")
    (line,) = trainers.trl().splitlines()[2:]
    assert line == "| fp8plan, `fp8_kv` | 2 H200 | 80 | 1.00 | 1.00 | 1.00 | not renewed | 3.00 | 1.00 |"


def test_a_row_of_another_length_is_refused() -> None:
    assert table(("a", "b"), [("1", "2")]) == "| a | b |\n|---|---|\n| 1 | 2 |"
    with pytest.raises(ValueError, match="a row of 1 cells under 2 heads"):
        table(("a", "b"), [("1",)])
