"""The committed recommendations: their seconds are fp8plan's, and the table has each once."""

from __future__ import annotations

import pytest

from benchmarks import aic_search
from fp8plan import jsonl

ROWS = jsonl.rows(aic_search.RESULTS)
CASES = {case.name: case for case in aic_search.CASES}


@pytest.mark.parametrize("row", [row for row in ROWS if "1 x h100" in row["case"]], ids=lambda row: row["by"])
def test_the_seconds_of_a_row_are_those_of_its_limits(row: dict[str, object]) -> None:
    names = (*aic_search.LIMITS, "max_cudagraph_capture_size")
    limits = {name: row[name] for name in names if row.get(name) is not None}
    seconds = aic_search.simulated(CASES[str(row["case"])], str(row["precision"]), **limits)
    assert seconds == pytest.approx(row["seconds"])


def test_every_case_has_both_searches_and_no_recommendation_stands_twice() -> None:
    assert {row["case"] for row in ROWS} == set(CASES)
    for name in CASES:
        makers = {row["by"].partition(",")[0] for row in ROWS if row["case"] == name}
        assert {"vLLM's own limits", "AIConfigurator", "fp8plan tune"} <= makers
    lines = aic_search.table().splitlines()[2:]
    assert len(lines) < len(ROWS)
    assert sum(line.startswith("| Qwen/") for line in lines) == len(CASES)
