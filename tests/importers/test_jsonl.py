"""Trajectories that any program wrote, and the way of turns from a log to a record and to a workload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8plan import jsonl
from fp8plan.errors import ConfigError
from fp8plan.importers.records import import_rollouts
from fp8plan.model.turn_table import TurnTable
from fp8plan.model.validate.records import recorded_workload

ROWS: list[dict[str, Any]] = [
    {"prompt": 900, "prompt_id": 7, "turns": [[300, 1200, 2.5], [150, 30, 0.25], [8, 0, 0]]},
    {"prompt": 40, "prompt_id": "7", "turns": [[5, 0, 0]]},
    {"prompt": 900, "prompt_id": 7, "turns": [[30, 0, 1], [10, 99, 4.0]], "reward": 1.0},
    {"prompt": 40, "prompt_id": "7", "turns": [[6, 7, 8], [9, 0, None]]},
]


def written(folder: Path, *rows: Any) -> Path:
    (folder / "3.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def workload_of(folder: Path, records: list[dict[str, Any]]) -> tuple[Any, Any]:
    (folder / "run.records").write_bytes(b"".join(map(jsonl.line, records)))
    workload, notes = recorded_workload(folder / "run.records")
    assert notes == []
    return workload, workload.batch()


def test_trajectories_go_through_a_record_to_a_workload(tmp_path: Path) -> None:
    found = import_rollouts("jsonl", written(tmp_path, *ROWS))
    (record,) = found.records
    assert record["prompt_lengths"] == [900, 900, 40, 40]
    assert record["response_lengths"] == [458, 40, 5, 15]
    assert not any("how long the tools took" in note for note in found.notes)
    workload, batch = workload_of(tmp_path, found.records)
    assert (workload.prompts, workload.samples_per_prompt) == (2, 2)
    assert batch.prompts.tolist() == [900, 900, 40, 40]
    expected = TurnTable.of(ROWS[at]["turns"] for at in (0, 2, 1, 3))
    for own, column in zip(batch.turns[:-1], expected[:-1], strict=True):
        assert own.tolist() == column.tolist()


def test_trajectories_without_a_prompt_id_share_none(tmp_path: Path) -> None:
    rows = [{"prompt": 40, "turns": [[5, 1, None], [6, 0, None]]}] * 3
    found = import_rollouts("jsonl", written(tmp_path, *rows))
    (record,) = found.records
    assert record["prompt_ids"] == [0, 1, 2]
    assert record["turns"] == [[[5, 1, None], [6, 0, 0.0]]] * 3
    assert "the log does not say how long the tools took: type plan --workload FILE --tool-s" in found.notes[1]


def test_single_turns_are_plain_responses(tmp_path: Path) -> None:
    (record,) = import_rollouts("jsonl", written(tmp_path, {"prompt": 40, "turns": [[5, 9, None]]})).records
    assert record["response_lengths"] == [5]
    assert "turns" not in record
    workload, batch = workload_of(tmp_path, [record])
    assert (workload.turns, batch.turns) == (None, None)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ([1], "it is"),
        ({"turns": [[5, 0, 0]]}, "field 'prompt' is missing"),
        ({"prompt": "text", "turns": [[5, 0, 0]]}, "prompt is 'text'; allowed: a whole number"),
        ({"prompt": 5}, "field 'turns' is missing"),
        ({"prompt": 5, "turns": []}, r"turns is \[\]; allowed: a list of length >= 1"),
        ({"prompt": 5, "turns": [[5, 0]]}, r"turns\[0\] is \[5, 0\]; allowed: a list of length 3"),
        ({"prompt": 5, "turns": [[0, 3, 1]]}, r"turns\[0\]\[0\] is 0; allowed: a whole number >= 1"),
        ({"prompt": 5, "turns": [[4, -3, 1]]}, r"turns\[0\]\[1\] is -3; allowed: a whole number >= 0"),
        ({"prompt": 5, "turns": [[4, 3, -1.5]]}, r"turns\[0\]\[2\] is -1.5; allowed: a number >= 0"),
        ({"prompt": 5, "turns": [[4, 3, "2s"]]}, r"turns\[0\]\[2\] is '2s'; allowed: a number or null"),
    ],
)
def test_a_line_that_is_no_trajectory_is_named(tmp_path: Path, row: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"line 2 of .*3\.jsonl: .*{told}"):
        import_rollouts("jsonl", written(tmp_path, ROWS[0], row))


def test_a_folder_without_trajectories_says_what_a_line_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no file STEP.jsonl; let the trainer write them there: a line .*TOOL"):
        import_rollouts("jsonl", tmp_path)
