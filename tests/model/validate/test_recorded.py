"""The workload of a recorded rollout: `fp8plan plan --workload`."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8plan.errors import ConfigError
from fp8plan.model.distributions import Trace
from fp8plan.model.validate.records import recorded_workload, workload_of
from fp8plan.model.workload import Batch
from fp8plan.model.workload_turns import LoggedTurns

ROLLOUT: dict[str, Any] = {
    "prompt_ids": ["b", "a", "b", "a"],
    "prompt_lengths": [7, 5, 7, 5],
    "response_lengths": [10, 20, 30, 40],
}


def written(folder: Path, *rows: Any) -> Path:
    file = folder / "run.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_the_last_rollout_is_the_workload_prompt_by_prompt(tmp_path: Path) -> None:
    without_rollout = {"step": 9, "metrics": {}}
    file = written(tmp_path, {"prompt_lengths": [1], "response_lengths": [1]}, ROLLOUT, without_rollout)
    workload, notes = recorded_workload(file)
    assert (workload.prompts, workload.samples_per_prompt) == (2, 2)
    batch = workload.batch()
    assert batch.prompts.tolist() == [7, 7, 5, 5]
    assert batch.responses.tolist() == [10, 30, 20, 40]
    assert batch.prompt_ids.tolist() == [0, 0, 1, 1]
    assert isinstance(workload.prompt_lengths, Trace)
    assert workload.prompt_lengths.source == f"line 2 of {file}"
    assert notes == []


def test_prompts_with_unequally_many_responses_are_taken_apart_and_it_is_said(tmp_path: Path) -> None:
    ids = [0, 0, 0, 0, 1, 1]
    row = {"prompt_ids": ids, "prompt_lengths": [8] * 4 + [9] * 2, "response_lengths": [1, 2, 3, 4, 5, 6]}
    workload, (note,) = recorded_workload(written(tmp_path, row))
    assert (workload.prompts, workload.samples_per_prompt) == (3, 2)
    assert workload.batch().prompts.tolist() == [8, 8, 8, 8, 9, 9]
    assert workload.batch().responses.tolist() == [1, 2, 3, 4, 5, 6]
    assert "2 prompts have 2 to 4 responses" in note
    assert "3 prompts x 2" in note


TURNS = [[[4, 9, 1.5], [6, 0, 0]], [[20, 5, 3.0]], [[10, 60, 0.5], [15, 7, None], [5, 0, None]], [[40, 0, 0]]]


def test_as_many_trajectories_run_at_once_as_in_the_record_unless_a_number_is_given(tmp_path: Path) -> None:
    file = written(tmp_path, ROLLOUT | {"turns": TURNS, "concurrent": 2})
    for concurrent, expected in ((None, 2), (3, 3)):
        turns = recorded_workload(file, tool_s=2.5, concurrent=concurrent)[0].batch().turns
        assert turns is not None
        assert turns.concurrent == expected


def test_turns_are_the_trajectories_of_the_workload(tmp_path: Path) -> None:
    """Prompt by prompt. After a last turn nothing counts, and the missing wait is drawn."""
    file = written(tmp_path, ROLLOUT | {"turns": TURNS})
    workload, notes = recorded_workload(file, tool_s=2.5, concurrent=3, reasoning_share=0.5)
    assert notes == []
    assert isinstance(workload.turns, LoggedTurns)
    assert (workload.response_lengths, workload.turns.concurrent) == (None, 3)
    batch = workload.batch()
    assert batch.turns is not None
    assert batch.responses.tolist() == [10, 30, 20, 40]
    assert batch.turns.first.tolist() == [0, 2, 5, 6, 7]
    assert batch.turns.generated.tolist() == [4, 6, 10, 15, 5, 20, 40]
    assert batch.turns.tool.tolist() == [9, 0, 60, 7, 0, 0, 0]
    assert batch.turns.wait_s.tolist() == [1.5, 0, 0.5, 2.5, 0, 0, 0]
    assert batch.turns.dropped.tolist() == [2, 0, 5, 8, 0, 0, 0]
    assert workload.turns.describe() == {
        "kind": "trace",
        "source": f"line 1 of {file}",
        "rows": 4,
        "tool_s": {"kind": "fixed", "seconds": 2.5},
        "concurrent": 3,
        "reasoning_share": 0.5,
    }


def test_other_trajectories_are_drawn_whole(tmp_path: Path) -> None:
    turns = [[[4, 9, 1.5], [6, 0, 0]], [[20, 0, 0]], [[10, 60, 0.5], [15, 7, 8.0], [5, 0, 0]], [[40, 0, 0]]]
    workload, _ = recorded_workload(written(tmp_path, ROLLOUT | {"turns": turns}))
    drawn = replace(workload, prompts=50).batch().turns
    assert drawn is not None
    rows = list(zip(drawn.generated.tolist(), drawn.tool.tolist(), drawn.wait_s.tolist(), strict=True))
    trajectories = [rows[first:end] for first, end in itertools.pairwise(drawn.first.tolist())]
    logged = [[tuple(map(float, turn)) for turn in trajectory] for trajectory in turns]
    assert len(trajectories) == 100
    assert {logged.index(trajectory) for trajectory in trajectories} == {0, 1, 2, 3}  # type: ignore[arg-type]


def test_what_the_log_lacks_is_asked_for_once(tmp_path: Path) -> None:
    file = written(tmp_path, ROLLOUT | {"turns": TURNS})
    with pytest.raises(ConfigError, match=r"line 1 of .*: the log does not say how long the tools took; give --tool-s"):
        recorded_workload(file)
    with pytest.raises(ConfigError, match=r"tool_s is -1; allowed: a finite number of seconds, 0 to 86,400"):
        recorded_workload(file, tool_s=-1)
    known = written(tmp_path, ROLLOUT | {"turns": [[[tokens, 3, 1.0]] for tokens in ROLLOUT["response_lengths"]]})
    with pytest.raises(ConfigError, match=r"and the log says how long each tool took; leave it out"):
        recorded_workload(known, tool_s=2)
    with pytest.raises(ConfigError, match=r"--concurrent: the responses have one turn each; leave it out"):
        recorded_workload(written(tmp_path, ROLLOUT), concurrent=2)


def test_responses_whose_turns_are_not_known_have_a_note(tmp_path: Path) -> None:
    workload, (note,) = recorded_workload(written(tmp_path, ROLLOUT | {"unclear_responses": 1}))
    assert workload.batch().responses.tolist() == [10, 30, 20, 40]
    assert "in 25.0% of the responses the log cannot tell tool output from generated tokens" in note
    assert recorded_workload(written(tmp_path, ROLLOUT | {"unclear_responses": None, "turns": None}))[1] == []


def test_without_prompt_ids_each_response_has_a_prompt_of_its_own(tmp_path: Path) -> None:
    row = {name: value for name, value in ROLLOUT.items() if name != "prompt_ids"}
    workload, _ = recorded_workload(written(tmp_path, row))
    assert (workload.prompts, workload.samples_per_prompt) == (4, 1)


def test_a_batch_comes_back_as_it_was() -> None:
    columns = ([3, 3, 4, 4], [5, 6, 7, 8], [0, 0, 1, 1])
    batch = Batch(*(np.array(column, dtype=np.int64) for column in columns))
    workload, _ = workload_of(batch, "here")
    again = workload.batch()
    assert again.turns is None
    assert all((a == b).all() for a, b in zip(again[:3], batch[:3], strict=True))


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([], "no line of"),
        ([{"hello": "world"}], "give the output of `fp8plan import`, or the run file of a Monitor"),
        ([{"step": 1, "metrics": {}}], "lengths: a Monitor knows rollouts from its engine"),
        ([None], "line 1 of .* is null; allowed: a JSON object"),
        ([3, 4], "line 2 of .* is a whole number; allowed: a JSON object"),
        ([ROLLOUT | {"response_lengths": [1, 2, 0, 4]}], "line 1 of .*response_lengths has 0; allowed: a list"),
        ([ROLLOUT | {"prompt_lengths": None}], "line 1 of .*prompt_lengths is empty; allowed: a list"),
        ([ROLLOUT | {"turns": TURNS[:1]}], "line 1 of .*: 1 turns, 4 response_lengths; allowed: a list of turns for"),
        ([ROLLOUT | {"turns": [[[10, 0, 0]], *TURNS[1:3], []]}], "response 4 has 0 tokens in its turns, 40 in"),
        ([ROLLOUT | {"turns": [[[10, -1, 0]], *TURNS[1:]]}], r"a turn of response 1 is \[10, -1, 0\]; allowed: "),
        ([ROLLOUT | {"turns": [[[10, 1, -0.5]], *TURNS[1:]]}], r"a turn of response 1 is \[10, 1, -0.5\]; allowed: "),
        ([ROLLOUT | {"turns": [*TURNS[:3], [[40, 0]]]}], r"turns\[3\]\[0\] is \[40, 0\]; allowed: a list of length 3"),
        ([ROLLOUT | {"turns": [*TURNS[:3], [[40.5, 0, 0]]]}], r"turns\[3\]\[0\]\[0\] is 40.5; allowed: a whole number"),
        ([ROLLOUT | {"turns": "many"}], "turns is 'many'; allowed: a list"),
        ([ROLLOUT | {"unclear_responses": 5}], "unclear_responses is 5; allowed: 0 to 4"),
        ([ROLLOUT | {"response_lengths": "many"}], "response_lengths is 'many'; allowed: a list"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, rows: list[Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        recorded_workload(written(tmp_path, *rows))
