"""README's tables of accuracy, from rows whose figures can be worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.tables import accuracy
from fp8plan.model.validate.validate import Validation


def row(precision: str, seconds: float, predicted: float, group: str = "a", **more: Any) -> dict[str, Any]:
    known = {"model": "small", "workload": "short", "kv_cache_tokens": None, "gpu_uuid": "x"}
    kv = {"measured_kv_cache_tokens": 1000, "predicted_kv_cache_tokens": 1000}
    counts = {"preemptions": 0, "predicted_preemptions": 0}
    what = {"group": group, "precision": precision, "seconds": seconds, "predicted_s": predicted}
    return known | kv | counts | what | more


LONG: dict[str, Any] = {"model": "large", "workload": "long"}
ROWS = [
    row("bf16", 10.0, 11.0),  # +10%
    row("bf16", 10.2, 11.0),  # the same cell once more: its median is 10.1, +8.9%, and its spread 2.0%
    row("fp8_kv", 5.0, 5.0),  # 0%; measured 2.02x, predicted 2.2x: 18 points
    row("bf16", 4.0, 3.0, "b", **LONG, preemptions=7, predicted_preemptions=9),  # -25%
    row("fp8_block", 2.0, 2.0, "b", **LONG, predicted_kv_cache_tokens=1004),  # 0%; 2x, predicted 1.5x: 50 points
]


def validation(rows: list[dict[str, Any]]) -> Validation:
    figures = {"makespan_mape": 0.0, "makespan_worst": 0.0, "speedup_mae_points": None, "speedup_worst_points": None}
    judged = [{**x, "error": x["predicted_s"] / x["seconds"] - 1} for x in rows]
    return Validation(judged, [], **figures, coverage=0.8, interval_median_halfwidth=0.0642, warnings=())  # type: ignore[arg-type]


def tables(rows: list[dict[str, Any]]) -> str:
    return accuracy.tables(validation(rows))


def lines(text: str) -> list[str]:
    return text.splitlines()


def test_totals_by_hand() -> None:
    bf16 = 11 / 10.1 - 1
    mape, bias = (bf16 + 0.25) / 4, (bf16 - 0.25) / 4
    points = 100 * (2.2 - 2.02)
    expected = [
        "| 4 cells, 2 groups |  |",
        "|---|---|",
        f"| makespan | MAPE {mape:.1%}, worst 25.0%, bias {bias:+.1%} |",
        f"| speed-up over BF16 | mean error {(points + 50) / 2:.1f} points, worst 50.0 |",
        "| fastest precision | named in 2 of 2 groups, within 2.0% in 2 of 2; most FP8 wins in 2 of 2 and 2 of 2 |",
        "| KV cache tokens | within 0.40% |",
        "| preemptions, measured / predicted | 7 / 9; 0 / 0 in all other cells |",
        "| noise: spread of a repeated cell on one card | median 2.0%, largest 2.0% |",
    ]
    assert lines(tables(ROWS))[:8] == expected
    assert mape == pytest.approx(0.0848, abs=1e-4)
    assert "The 90% interval holds 80% of the 5 runs; its median half-width is 6.4%." in tables(ROWS)


def test_tables_by_model_precision_and_workload_by_hand() -> None:
    text = tables(ROWS)
    head = "| cells | makespan MAPE | bias | worst | speed-up error, points | worst |"
    small = "| 2 | 4.5% | +4.5% | 8.9% | 18.0 | 18.0 |"
    large = "| 2 | 12.5% | -12.5% | 25.0% | 50.0 | 50.0 |"
    for title, names in (("model", ("small", "large")), ("workload", ("short", "long"))):
        at = lines(text).index(f"| by {title} {head}")
        assert lines(text)[at + 2 : at + 4] == [f"| {names[0]} {small}", f"| {names[1]} {large}"]
    at = lines(text).index(f"| by precision {head}")
    assert lines(text)[at + 2 :][:3] == [
        "| bf16 | 2 | 17.0% | -8.0% | 25.0% | - | - |",
        "| fp8_block | 1 | 0.0% | +0.0% | 0.0% | 50.0 | 50.0 |",
        "| fp8_kv | 1 | 0.0% | +0.0% | 0.0% | 18.0 | 18.0 |",
    ]


def test_every_table_has_a_row_for_each_cell() -> None:
    rows = [line.split("|") for line in lines(tables(ROWS)) if line.startswith("| ")]
    sums, title = dict[str, int](), ""
    for cells in rows:
        if cells[1].startswith(" by "):
            title = cells[1].strip()
        elif title:
            sums[title] = sums.get(title, 0) + int(cells[2])
    assert sums == {"by model": 4, "by precision": 4, "by workload": 4}


def test_preemptions_that_did_not_come_are_not_hidden() -> None:
    false_alarm = [*ROWS, row("fp8_kv", 3.0, 3.0, "b", **LONG, predicted_preemptions=2)]
    assert "| 7 / 9; predicted but not measured in 1 cells |" in tables(false_alarm)


def test_a_wrong_favourite_is_named_right_only_within_the_noise_and_beside_it_stands_most_fp8() -> None:
    slower = [row("bf16", 10.0, 9.0, "c"), row("fp8_kv", 9.9, 9.5, "c")]
    assert "named in 0 of 1 groups, within 0.0% in 0 of 1; most FP8 wins in 1 of 1 and 1 of 1" in tables(slower)
    repeated = [*slower, row("bf16", 10.4, 9.0, "c"), row("bf16", 9.8, 9.0, "c")]  # median 10.0, spread 6%
    assert "named in 0 of 1 groups, within 6.0% in 1 of 1; most FP8 wins in 1 of 1 and 1 of 1" in tables(repeated)
    other = [row("bf16", 9.0, 9.0, "d"), row("fp8_block", 9.9, 9.5, "d")]
    assert "named in 1 of 1 groups, within 0.0% in 1 of 1; most FP8 wins in 0 of 1 and 0 of 1" in tables(other)


def test_the_short_table_has_first_sight_replaced_runs_and_the_host_that_was_told() -> None:
    every = validation([*ROWS, row("bf16", 20.0, 11.0)])
    first = [{**x, "predicted_s": 2 * x["seconds"]} for x in ROWS]
    newer = {"a newer one": validation(ROWS[:2])}
    text = accuracy.summary(validation(ROWS), validation(ROWS[:3]), every, validation(ROWS[3:]), first, newer)
    assert "| vLLM 0.26, H200; host timed in 0 of 5 runs | 4 cells |" in text
    assert "| the same, no host timed | 2 cells | 4.5% | 8.9% |" in text
    assert "| the same, with 1 runs that later ones replaced | 4 cells |" in text
    assert "| the same, before the model was changed for them | 4 cells | 100.0% | 100.0% |" in text
    assert "| a newer one | 2 runs |" in text
    assert "single runs are up to 45% off" in text


def test_the_line_beside_the_first_table_has_the_same_figures() -> None:
    text = accuracy.in_a_line(validation(ROWS), validation(ROWS[:3]))
    assert "off by 8.5%, or by 4.5% where nobody timed the host. Speed-ups were off by 34.0 points." in text
    assert "named in 2 of 2 groups, and one within 2.0% of it in 2 of 2." in text
