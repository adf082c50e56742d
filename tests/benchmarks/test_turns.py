"""The verdict on measured rollouts of turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.turns import (
    CELLS,
    FP8,
    HOST_LOOPS_S,
    PREDICTIONS,
    ROLLOUTS,
    cell_of,
    compared,
    main,
    misses,
    predictions,
    split_table,
    table,
)
from fp8plan import jsonl


def test_every_cell_was_predicted_on_every_host() -> None:
    settings = json.loads(CELLS.read_text(encoding="utf-8"))
    cells = sum(len(setting["workloads"]) * len(setting["precisions"]) for setting in settings)
    rows = jsonl.rows(PREDICTIONS)
    assert cells == 2 * 2 * 3 + 1
    assert len({cell_of(row) for row in rows}) == cells
    assert len(rows) == cells * len(HOST_LOOPS_S)


def test_a_workload_is_the_same_for_both_models_and_for_a_small_pool() -> None:
    eight, four, small = json.loads(CELLS.read_text(encoding="utf-8"))
    assert eight["workloads"] == four["workloads"]
    assert small["workloads"] == [eight["workloads"][1]]


def test_the_factors_make_the_speed_up(tmp_path: Path) -> None:
    turns = {"turns": "2", "turn_tokens": "fixed:20", "tool_tokens": "fixed:30", "tool_s": "fixed:1"}
    work = {"name": "few", "prompts": 4, "samples": 1, "prompt_lengths": "fixed:100", "turns": turns}
    setting = {"model": "Qwen/Qwen3-0.6B", "gpu": "h200_sxm", "precisions": ["bf16", FP8], "workloads": [work]}
    file = tmp_path / "cells.json"
    file.write_text(json.dumps([setting]))
    rows = list(predictions(file))
    bf16, fp8 = (next(row for row in rows if row["precision"] == precision) for precision in ("bf16", FP8))
    assert "speed_up" not in bf16
    assert fp8["speed_up"] == pytest.approx(bf16["predicted_s"] / fp8["predicted_s"], rel=1e-3)
    assert fp8["by_weights"] * fp8["by_reads"] * fp8["by_kept_prefixes"] == pytest.approx(fp8["speed_up"], rel=1e-3)


def predicted(
    precision: str, seconds: float, hits: float, tokens: int | None = None, **more: float
) -> list[dict[str, Any]]:
    """A cell that takes as long on every host as its loop of Python does."""
    cell = {"model": "a/b", "workload": "w", "precision": precision, "kv_cache_tokens": tokens}
    figures = {"predicted_s": seconds, "hit_share": hits, "preemptions": 0, "pool_tokens": 1000}
    slow = figures | {"predicted_s": 2 * seconds}
    return [cell | {"host_loop_s": 2e-4} | figures | more, cell | {"host_loop_s": 4e-4} | slow | more]


def record(precision: str, seconds: float, hits: int, tokens: int | None = None) -> dict[str, Any]:
    return {
        "model": "a/b", "workload": "w", "precision": precision, "kv_cache_tokens": tokens, "host_loop_s": 3e-4,
        "seconds": seconds, "prefix_cache_hits": hits, "prefix_cache_queries": 100, "preemptions": 3,
        "measured_kv_cache_tokens": 990, "turn_lag_s": 0.002,
    }  # fmt: skip


GAINS = {"speed_up": 2.0, "by_weights": 1.2, "by_reads": 1.05, "by_kept_prefixes": 1.59}
PREDICTED = [*predicted("bf16", 20, 0.1), *predicted(FP8, 10, 0.7, **GAINS), *predicted(FP8, 16, 0.1, 500)]


def test_a_record_is_judged_by_the_prediction_at_its_hosts_loop() -> None:
    records = [record("bf16", 30, 11), record(FP8, 15.3, 70), record(FP8, 24, 10, 500)]
    rows = list(compared(records, PREDICTED))
    assert [round(row["makespan_error"], 1) for row in rows] == [0, -2, 0]
    assert [round(row["hit_error"], 1) for row in rows] == [-1, 0, 0]
    assert [row["measured_speed_up"] and round(row["speed_up_error"], 1) for row in rows] == [None, 3.9, None]
    assert misses(rows, PREDICTED) == []
    assert "1.590 (measured 1.569)" in split_table(rows)
    assert "15.30 (15.00, -2.0%)" in table(rows)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (record(FP8, 15.9, 70), "b, w, fp8_block+fp8_kv: makespan error -5.7%, allowed 5%"),
        (record(FP8, 15.9, 70), "b, w, fp8_block+fp8_kv: speed up error +11.3 points, allowed 4 points"),
        (record(FP8, 15, 73), "b, w, fp8_block+fp8_kv: hit error -3.0 points, allowed 2 points"),
    ],
)
def test_a_missed_bar_is_said(wrong: dict[str, Any], words: str) -> None:
    rows = list(compared([record("bf16", 30, 10), wrong], PREDICTED))
    said = misses(rows, PREDICTED)
    assert words in said
    assert "b, w, fp8_block+fp8_kv, 500 KV tokens: not measured" in said


def test_a_gain_by_faster_reads_alone_is_not_the_case_that_was_asked_for() -> None:
    reads = [row | {"by_reads": 1.8} if "by_reads" in row else row for row in PREDICTED]
    rows = list(compared([record("bf16", 30, 10), record(FP8, 15, 70), record(FP8, 24, 10, 500)], reads))
    assert misses(rows, reads)[-1].startswith("in no cell is FP8 KV's measured gain")


def test_a_host_outside_of_the_predicted_ones_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the host's loop took 0\.001 s; predicted: 0\.0002 to 0\.0004"):
        list(compared([record("bf16", 30, 10) | {"host_loop_s": 1e-3}], PREDICTED))


def test_records_that_miss_a_bar_fail_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = next(row for row in jsonl.rows(ROLLOUTS) if row["workload"] == "short waits")
    file = tmp_path / "rollouts.jsonl"
    file.write_text(json.dumps(measured | {"seconds": 99.0}) + "\n")
    monkeypatch.setattr("sys.argv", ["turns", str(file)])
    assert main() == 1
    assert "makespan error" in capsys.readouterr().out
