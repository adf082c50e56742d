"""The workload of a recorded rollout: `fp8plan plan --workload`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8plan.errors import ConfigError
from fp8plan.model.validate.records import recorded_workload, workload_of
from fp8plan.model.workload import Batch, Trace, Turns

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


def test_tool_output_is_known_and_is_in_no_length(tmp_path: Path) -> None:
    fields = ROLLOUT | {"tool_tokens": [0, 0, 60, 40], "unclear_responses": 1}
    workload, _ = recorded_workload(written(tmp_path, fields))
    assert workload.batch().responses.tolist() == [10, 30, 20, 40]
    assert workload.turns == Turns(0.5, 0.5, 0.25, 90)
    assert workload.longest_response == 90  # max_model_len holds it
    (sentence,) = workload.turns.sentence()
    assert sentence.startswith(
        "The responses are of several turns (50.0% of them): 50.0% of their tokens are tool output"
    )
    assert "In 25.0% of the responses the log cannot tell" in sentence
    assert sentence.endswith("are not modelled.")


@pytest.mark.parametrize("fields", [{}, {"tool_tokens": [0] * 4}, {"tool_tokens": None, "unclear_responses": None}])
def test_single_turns_need_no_sentence(tmp_path: Path, fields: dict[str, Any]) -> None:
    workload, _ = recorded_workload(written(tmp_path, ROLLOUT | fields))
    assert workload.turns.sentence() == ()
    assert workload.turns.describe() == {}
    assert workload.longest_response == 40


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
        ([ROLLOUT | {"response_lengths": [1, 2, 0, 4]}], "line 1 of .*it has 0"),
        ([ROLLOUT | {"prompt_lengths": None}], "line 1 of .*prompt_lengths must be a list"),
        ([ROLLOUT | {"tool_tokens": [1]}], "line 1 of .*: 1 tool_tokens, 4 response_lengths; allowed: as many"),
        ([ROLLOUT | {"tool_tokens": [1, 0, -1, 0]}], "line 1 of .*: tool_tokens must be whole numbers.*it has -1"),
        ([ROLLOUT | {"tool_tokens": "many"}], "tool_tokens is 'many'; allowed: a list"),
        ([ROLLOUT | {"unclear_responses": 5}], "unclear_responses is 5; allowed: 0 to 4"),
        ([ROLLOUT | {"response_lengths": "many"}], "response_lengths is 'many'; allowed: a list"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, rows: list[Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        recorded_workload(written(tmp_path, *rows))
