"""The comparison of measured rollouts with and without returned experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.routed_experts import CELLS, compared, predictions
from fp8plan import jsonl


def test_cells_come_in_pairs_that_differ_in_returned_experts_alone() -> None:
    without, with_them = json.loads(CELLS.read_text(encoding="utf-8"))
    assert with_them == without | {"enable_return_routed_experts": True}
    assert len(jsonl.rows(CELLS.with_name("predictions.jsonl"))) == len(list(predictions()))


def test_the_error_is_that_of_the_ratio_in_points(tmp_path: Path) -> None:
    fields = {
        "model": "Qwen/Qwen3-30B-A3B", "gpu": "h200_sxm", "engine_version": "0.33.0", "precision": "fp8_block",
        "prompt_lengths": [64] * 8, "response_lengths": [32] * 8, "workload": "few", "host_loop_s": 2.74e-4,
    }  # fmt: skip
    seconds = [{"seconds": 10.0}, {"seconds": 10.0}, {"seconds": 12.0, "routed_experts": True}]
    file = tmp_path / "rollouts.jsonl"
    file.write_text("".join(json.dumps(fields | more) + "\n" for more in seconds))
    (row,) = compared(str(file))
    assert row["more"].startswith("20.0% (predicted ")
    predicted = float(row["more"].partition("predicted ")[2].rstrip("%)"))
    assert float(row["error, points"]) == pytest.approx(predicted - 20, abs=0.11)
