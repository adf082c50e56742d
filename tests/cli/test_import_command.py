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


def test_a_plan_of_multi_turn_rollouts_says_so_first(fp8plan: Callable[..., Done]) -> None:
    row = {"prompt_ids": [0, 0], "prompt_lengths": [9, 9], "response_lengths": [30, 70], "tool_tokens": [0, 300]}
    words = ("plan", MODEL, "--gpu", "h200", "--workload", "run.jsonl")
    Path("run.jsonl").write_text(json.dumps(row))
    plan = json.loads(fp8plan(*words, "--json").out)
    assert plan["reasons"][0].startswith("The responses are of several turns (50.0% of them): 75.0% of their tokens")
    assert plan["reasons"][1].startswith(("Choose ", "Stay with "))
    assert plan["workload"]["response_tokens"] == 100
    assert plan["workload"]["max_response_tokens"] == 370
    assert plan["limits"]["max_model_len"] == 379
    Path("run.jsonl").write_text(json.dumps(row | {"tool_tokens": None}))
    single = json.loads(fp8plan(*words, "--json").out)
    assert single["reasons"][0].startswith(("Choose ", "Stay with "))
    assert "turns" not in single["workload"]
