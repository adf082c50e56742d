"""Two public reports that differ from fp8plan, and the page that says why (docs/evidence/reports.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import reports
from benchmarks.tables.markdown import table

PAGE = (Path(reports.__file__).parents[1] / "docs/evidence/reports.md").read_text(encoding="utf-8")


def test_the_page_has_the_memory_of_the_first_report() -> None:
    assert reports.memory_table() in PAGE
    assert dict(reports.memory_rows())["left for KV"] == pytest.approx(reports.REPORTED_KV_GIB + 3.01, abs=0.005)
    assert reports.SERVED.memory().kv_bytes_per_token == 48_128


def test_the_page_has_the_second_reports_starved_rollout() -> None:
    row = reports.rollout_row(0.5, 4000)
    assert table(row, []).splitlines()[0] in PAGE
    assert (row[2], row[3], row[5]) == ("159,808", "461,728", "0")
