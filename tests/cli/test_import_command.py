"""`fp8plan import`, and what `plan` and `validate` make of its records."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Done, refused
from trainer_logs import verl_dump
from trl_runs import model as words_model
from typed import MODEL

from fp8plan.model.validate.records import recorded_workload

pytestmark = pytest.mark.verl

RAN = ("--model", MODEL, "--gpu", "h200", "--precision", "bf16", "--engine-version", "0.26.0")


@pytest.fixture(scope="module")
def tokenizer() -> str:
    """The folder of a tokenizer, made before a test's stderr is read: transformers shows its progress there."""
    return str(words_model())


def test_from_the_dump_to_a_plan_and_a_validation(tokenizer: str, fp8plan: Callable[..., Done], tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("".join(f'{{"_step": {s}, "timing_s/gen": 0.5}}\n' for s in (1, 2)))
    words = ("import", "verl", verl_dump(tmp_path / "d"), "--tokenizer", tokenizer, "--log", tmp_path / "log.jsonl")
    done = fp8plan(*words, *RAN, "--tensor-parallel-size", 2, "--data-parallel-size", 1, "-o", "run.jsonl")
    assert (done.code, done.out, done.err) == (0, "", "written: run.jsonl\n")
    workload, notes = recorded_workload("run.jsonl")
    assert (workload.prompts, workload.samples_per_prompt, notes) == (2, 2, [])
    plan = json.loads(fp8plan("plan", MODEL, "--gpu", "h200", "--workload", "run.jsonl", "--json").out)
    assert plan["workload"]["response_tokens"] == 8
    assert "step 1 is left out, the first rollout" in fp8plan("validate", "run.jsonl").err
    checked = json.loads(fp8plan("validate", "run.jsonl", "--json", "--include-first").out)
    assert [row["seconds"] for row in checked["records"]] == [0.5, 0.5]
    assert checked["records"][0]["tensor_parallel"] == 2
    assert checked["records"][0]["predicted_s"] > 0


def test_without_seconds_validate_names_them(tokenizer: str, fp8plan: Callable[..., Done], tmp_path: Path) -> None:
    done = fp8plan("import", "verl", verl_dump(tmp_path), "--tokenizer", tokenizer, *RAN)
    Path("run.jsonl").write_text(done.out)
    assert "not known: seconds;" in done.err
    refused(fp8plan("validate", "run.jsonl"), "line 1", "lacks seconds")


def test_a_recorded_rollout_of_turns_is_planned_and_tuned(fp8plan: Callable[..., Done], tmp_path: Path) -> None:
    row = {"prompt": 9, "prompt_id": "a", "turns": [[30, 300, None], [40, 0, 0]]}
    (tmp_path / "7.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(row)}\n")
    done = fp8plan("import", "jsonl", tmp_path, "-o", "run.jsonl")
    assert "the log does not say how long the tools took: type plan --workload FILE --tool-s" in done.err
    words = ("plan", MODEL, "--gpu", "h200", "--workload", "run.jsonl")
    refused(fp8plan(*words), "line 1 of run.jsonl: the log does not say how long", "give --tool-s lognormal:mean=2")
    refused(fp8plan(*words, "--turns", 3), "both --workload and --turns are given")
    refused(fp8plan(*words, "--tool-s", "1", "--max-model-len", 99), "give a --workload of shorter trajectories")
    planned = fp8plan(*words, "--tool-s", "1", "--concurrent", 1).out
    assert "140 response tokens: mean 70" in planned  # of two trajectories
    assert "The tools limit the rollout" in planned
    tuned = json.loads(fp8plan("tune", *words[1:], "--tool-s", "1", "--json").out)
    assert tuned["workload"]["turns"]["rows"] == 2
    dropped = json.loads(fp8plan(*words, "--tool-s", "1", "--reasoning-share", 0.5, "--json").out)
    assert dropped["workload"]["turns"]["reasoning_share"] == 0.5
    Path("run.jsonl").write_text(json.dumps(json.loads(Path("run.jsonl").read_text()) | {"turns": None}))
    plan = json.loads(fp8plan(*words, "--json").out)
    assert plan["workload"]["response_tokens"] == 140
    assert "turns" not in plan["workload"]
