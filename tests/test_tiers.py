"""`make test` leaves out the tests that are slow: it keeps each path, and its time.

`make test-all` writes tests/records/all.json, and `pytest -m gpu --record tests/records/gpu.json` that of a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
RECORDS = TESTS / "records"
INTEGRATIONS = {"vllm", "verl", "trl", "triton", "transfer_queue"}  # that fp8plan acts on
MOST_S = 1300  # of all tests that are not slow: eleven minutes of two workers; the rest takes four


def runs(item: pytest.Item) -> set[str]:
    """The integrations that a test runs."""
    return INTEGRATIONS & {mark.name for mark in item.iter_markers()}


def test_what_is_slow_has_a_quicker_test_of_the_same_libraries_in_its_folder_or_above(
    collected: list[pytest.Item],
) -> None:
    if not {item.path for item in collected} >= set(TESTS.rglob("test_*.py")):
        pytest.skip("judges a run of all files")
    slow = [item for item in collected if item.get_closest_marker("slow")]
    kept = {(item.path.parent, frozenset(runs(item))) for item in collected if not item.get_closest_marker("slow")}
    alone = [x.nodeid for x in slow if not any(runs(x) <= y for at, y in kept if x.path.is_relative_to(at))]
    assert not alone, "nothing like these is left in `make test`"
    assert slow


@pytest.mark.parametrize("file", sorted(RECORDS.glob("*.json")), ids=lambda file: file.stem)
def test_a_recorded_run_was_of_committed_code_without_failures_and_fits_its_time(file: Path) -> None:
    record = json.loads(file.read_text())
    assert (record["failed"], record["changed_files"]) == ([], 0)
    assert record["commit"]
    assert record["outcomes"]["passed"] > 20
    if file.stem == "gpu":
        assert "skipped" not in record["outcomes"]
    assert record["seconds_by_tier"]["others"] <= MOST_S
