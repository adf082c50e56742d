"""The script that times and checks the correction, small and on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu import correction

pytest.importorskip("torch")


def run(path: Path, *words: str) -> tuple[int, list[dict]]:
    status = correction.main(["--device", "cpu", "--output", str(path), *words])
    return status, [json.loads(line) for line in path.read_text().splitlines()]


def test_every_form_is_checked_and_timed(tmp_path: Path) -> None:
    status, rows = run(tmp_path / "new" / "rows.jsonl")
    assert status == 0
    machine, *rows = rows
    assert machine["what"] == "machine"
    assert {machine["run"]} == {row["run"] for row in rows}
    timed = [row for row in rows if "tokens" in row]
    kinds = {(row["what"], row["form"]) for row in timed}
    assert kinds == {(what, form) for what in ("pack", "measure", "correct", "step") for form in correction.FORMS}
    assert all(row["seconds"] > 0 for row in timed)
    same = [row for row in rows if row["what"] == "equality"]
    assert len(same) == 4
    assert all(row["weights_ulps"] == 0 and row["masks_equal"] and row["sums_relative"] == 0 for row in same)


def test_a_part_that_fails_is_noted_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(correction, "equality", broken)
    status, rows = run(tmp_path / "rows.jsonl")
    assert status == 1
    assert [row["error"] for row in rows if row["what"] == "equality"] == ["RuntimeError: out of luck"] * 2
    assert {row["form"] for row in rows if row["what"] == "step"} == set(correction.FORMS)


def test_no_part_begins_when_time_is_up(tmp_path: Path) -> None:
    status, rows = run(tmp_path / "rows.jsonl", "--seconds", "0")
    assert status == 1
    assert {row.get("error") for row in rows[1:]} == {"no time was left after 0 s"}
