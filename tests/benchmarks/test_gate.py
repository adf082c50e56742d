"""The gate of accuracy: open for today's predictions, closed for worse ones and for fewer records."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gate import BARS, above_bars, baseline, faults, files, keyed, predictions

LIMIT_S = 100.0


def rows(*predicted: float, width: float = 0.1) -> Any:
    ends = [(seconds, seconds * (1 - width), seconds * (1 + width)) for seconds in predicted]
    return keyed(
        {"file": "a.jsonl", "line": line, "group": f"{line // 2}", "precision": ("bf16", "fp8_kv")[line % 2]}
        | {"seconds": LIMIT_S, "predicted_s": middle, "predicted_low_s": low, "predicted_high_s": high}
        for line, (middle, low, high) in enumerate(ends)
    )


@pytest.mark.slow
def test_today_is_below_the_bars_and_no_worse_than_the_baseline() -> None:
    today = keyed(predictions(files()))
    assert BARS.keys() == {file for file, _ in today}
    assert above_bars(today, BARS) + faults(baseline(), today) == []


@pytest.mark.parametrize(
    ("now", "problem"),
    [
        (rows(103, 103), "the mean error of makespans was 0.0 points and is 3.0"),
        (rows(98.1, 101.9), "the mean error of speed-ups was 0.0 points and is 3.7"),
        (rows(100, 100, width=0.0), None),
        (rows(101.9, 101.9, width=0.01), "the intervals held 100% of the measured times and hold 0%"),
        (rows(100), "line 1 of a.jsonl is in the baseline and not in the records"),
        (rows(100, 100, 150), None),  # a new record has nothing to be held against
    ],
)
def test_what_closes_the_gate(now: Any, problem: str | None) -> None:
    problems = faults(rows(100, 100), now)
    assert problems == [] if problem is None else any(problem in sentence for sentence in problems)


def test_a_bar_holds_whatever_the_baseline_says() -> None:
    now = rows(103, 104)
    assert above_bars(now, {"a.jsonl": 4.0}) == []
    assert above_bars(now, {"a.jsonl": 3.0}) == ["a.jsonl: makespans are off by 3.5%, and the bar is 3.0%"]
    assert above_bars(now, {}) == ["a.jsonl has no bar in benchmarks/gate.py; its makespans are off by 3.5%"]
