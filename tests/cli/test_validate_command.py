"""`fp8plan validate`: bad records are refused by line, good ones compared with the prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import RECORD, Done, refused

# Bad records of `validate`: changes to RECORD, and what the line must hold beside the line's number.
BAD_RECORDS: dict[str, tuple[str | dict[str, Any], tuple[str, ...]]] = {
    "cut off": ('{"model": ', ("not JSON",)),
    "a list": ("[1]", ("list", "JSON object")),
    "no seconds": ({"seconds": None}, ("lacks seconds", "response_lengths")),
    "negative seconds": ({"seconds": -1}, ("seconds is -1", "above 0")),
    "NaN seconds": ({"seconds": float("nan")}, ("seconds is nan", "finite")),
    "NaN memory": ({"gpu_memory_utilization": float("nan")}, ("gpu_memory_utilization is nan", "above 0")),
    "seconds in words": ({"seconds": "fast"}, ("seconds is 'fast'", "a number")),
    "negative length": ({"response_lengths": [1, -2, 3]}, ("response_lengths", "-2", "1 to ")),
    "NaN length": ({"prompt_lengths": [1, float("nan"), 3]}, ("prompt_lengths", "nan", "whole number")),
    "fractional length": ({"prompt_lengths": [1, 1.5, 3]}, ("prompt_lengths", "1.5", "whole")),
    "no lengths": ({"prompt_lengths": [], "response_lengths": []}, ("prompt_lengths is empty", "1 to")),
    "fewer responses": ({"response_lengths": [3]}, ("3 prompt_lengths", "1 response_lengths", "as many")),
    "fewer ids": ({"prompt_ids": [1, 1]}, ("3 prompt_lengths", "2 prompt_ids", "as many of each")),
    "lengths as text": ({"response_lengths": "abc"}, ("response_lengths", "'abc'", "a list")),
    "beyond max_model_len": ({"max_model_len": 40}, ("70 tokens", "max_model_len is 40", "raise")),
    "unknown GPU": ({"gpu": "h300"}, ("'h300'", "nearest: h800, h200_sxm")),
    "GPU as a number": ({"gpu": 200}, ("gpu is 200", "text")),
    "unknown precision": ({"precision": "int4"}, ("'int4'", "fp8_block")),
    "unknown model": ({"model": "Qwen3-9B"}, ("'Qwen3-9B'", "Qwen/Qwen3-8B")),
    "another engine": ({"engine": "sglang"}, ("'sglang'", "vllm")),
    "FP8 weights on an A100": ({"gpu": "a100", "precision": "fp8_block"}, ("fp8_block", "does not model FP8 weights")),
    "TP does not divide": ({"tensor_parallel": 3}, ("16 attention heads", "1, 2, 4, 8, 16")),
    "half a replica": ({"data_parallel": 1.5}, ("data_parallel is 1.5", "whole number")),
    "no replica": ({"data_parallel": 0}, ("data_parallel_size is 0", "at least 1")),
    "pool in words": ({"kv_cache_tokens": "all"}, ("kv_cache_tokens is 'all'", "whole number")),
    "pool of one block": ({"kv_cache_tokens": 16}, ("kv_cache_tokens is 16", "two blocks")),
    "pool below one request": ({"kv_cache_tokens": 64}, ("70 tokens", "raise num_gpu_blocks")),
}


@pytest.mark.parametrize(("changes", "parts"), BAD_RECORDS.values(), ids=BAD_RECORDS)
def test_a_bad_record_is_refused_by_line(
    fp8plan: Callable[..., Done], changes: str | dict[str, Any], parts: tuple[str, ...]
) -> None:
    bad = changes if isinstance(changes, str) else json.dumps(RECORD | changes)
    Path("records.jsonl").write_text(f"{json.dumps(RECORD)}\n\n{bad}\n")
    refused(fp8plan("validate", "records.jsonl", "--json"), "line 3", *parts)


@pytest.mark.parametrize(
    ("content", "part"), [(None, "there is no record file"), (b"", "no records"), (b"\xff\n", "utf-8")]
)
def test_a_record_file_that_cannot_be_used(fp8plan: Callable[..., Done], content: bytes | None, part: str) -> None:
    if content is not None:
        Path("records.jsonl").write_bytes(content)
    refused(fp8plan("validate", "records.jsonl"), "records.jsonl", part)


def test_a_field_that_nobody_reads_may_be_no_number(fp8plan: Callable[..., Done]) -> None:
    odd = RECORD | {"reward": float("nan"), "mine": {"deep": [float("inf"), 1.5]}}
    Path("records.jsonl").write_text(f"{json.dumps(odd)}\n{json.dumps(RECORD)}\n" + json.dumps(odd)[:-40])
    done = fp8plan("validate", "records.jsonl", "--json")
    first, second = json.loads(done.out)["records"]
    assert (first["reward"], first["mine"]) == (None, {"deep": [None, 1.5]})
    assert first["predicted_s"] == second["predicted_s"]
    assert "note: line 3 of records.jsonl, the last one, is left out: it breaks off" in done.err.splitlines()


def test_validate_leaves_out_a_monitors_steps_without_a_rollout(fp8plan: Callable[..., Done]) -> None:
    """Several steps may train on one rollout: only the first of them has its time and its lengths."""
    facts = {name: value for name, value in RECORD.items() if name != "seconds" and "lengths" not in name}
    step = {"step": 1, "metrics": {"rollout_corr/kl": 1e-3}}
    lines = [RECORD | step, facts | step, RECORD, step | {"seconds": None}]
    Path("records.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = fp8plan("validate", "records.jsonl", "--json", "--include-first")
    assert len(json.loads(done.out)["records"]) == 2
    assert "note: 2 of 4 lines are left out: a Monitor's steps without a rollout" in done.err.splitlines()
    Path("records.jsonl").write_text(json.dumps(RECORD))
    assert "left out" not in fp8plan("validate", "records.jsonl").err
    for other, part in (
        (step | {"seconds": 1.0}, "line 2 of records.jsonl lacks model"),
        (facts, "line 2 of records.jsonl lacks prompt_lengths, response_lengths, seconds"),
    ):
        Path("records.jsonl").write_text("\n".join(map(json.dumps, (step, other))))
        refused(fp8plan("validate", "records.jsonl"), part)
    Path("records.jsonl").write_text(json.dumps(step))
    refused(fp8plan("validate", "records.jsonl"), "no records, only 1 step", "rollout=")


COLD = {"guard": {"verdict": {"cold": True}}}


@pytest.mark.parametrize(
    ("rows", "kept", "told"),
    [
        ([{}, {}, {}], [2, 3], "step 1 is left out, the first rollout of an engine"),
        ([{}, {}, {"precision": "fp8_block"}, {}], [2], "step 1, step 3, step 4 are"),  # a step down, and up again
        ([{}, {}, COLD, {}], [2, 4], "step 1, step 3 are"),
        ([{}, {}, {"first_rollout": True}, {}], [2, 4], "step 1, step 3 are"),
        ([{"guard": 1, "step": "one"}, {"guard": {"verdict": 2}, "step": None}, {}], [2, 3], "step one is"),
    ],
)
def test_validate_leaves_out_the_first_rollout_of_each_engine(
    fp8plan: Callable[..., Done], rows: list[dict[str, Any]], kept: list[int], told: str
) -> None:
    """Predictions are of warm engines. A Monitor's run, an engine that another process started, and one after it."""
    run = [RECORD | {"step": number, "metrics": {}} | row for number, row in enumerate(rows, 1)]
    Path("run.jsonl").write_text("\n".join(map(json.dumps, run)))
    done = fp8plan("validate", "run.jsonl", "--json")
    assert [row["line"] for row in json.loads(done.out)["records"]] == kept
    assert told in done.err
    assert "--include-first counts it" in done.err
    every = fp8plan("validate", "run.jsonl", "--json", "--include-first")
    assert len(json.loads(every.out)["records"]) == len(rows)
    assert "left out" not in every.err


def test_validate_keeps_records_that_are_no_run_and_the_log_says_which_was_its_first(
    fp8plan: Callable[..., Done],
) -> None:
    step = {"step": 1, "imported_from": "verl dumps"}
    for rows, count in (([{}, {}], 2), ([step, step | {"step": 2}], 2), ([step | {"first_rollout": True}, {}], 1)):
        Path("records.jsonl").write_text("\n".join(json.dumps(RECORD | row) for row in rows))
        assert len(json.loads(fp8plan("validate", "records.jsonl", "--json").out)["records"]) == count


def test_rollouts_of_turns_are_validated_and_observed_if_their_waits_are_known(fp8plan: Callable[..., Done]) -> None:
    """Where the log cannot tell which tokens are a tool's, a note says so."""
    first, second, third = RECORD["response_lengths"]

    def turns(wait_s: float | None) -> dict[str, Any]:
        every = [[[first, 0, 0]], [[second - 2, 300, wait_s], [2, 0, 0]], [[third, 0, 0]]]
        return {"turns": every, "seconds": 99.0, "prefix_cache_queries": 1000, "prefix_cache_hits": 250}

    unclear = {"unclear_responses": 1}
    rows = [RECORD | {"step": number} | row for number, row in enumerate(({}, turns(2.0), unclear, turns(None)), 1)]
    Path("run.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = fp8plan("validate", "run.jsonl", "--json")
    closed, tools, _ = json.loads(done.out)["records"]
    assert closed["predicted_s"] < 0.5
    assert 2.0 < tools["predicted_s"] < 2.5
    assert (tools["prefix_hits"], tools["predicted_prefix_hits"]) == (0.25, pytest.approx(0.1, abs=0.1))
    assert "prefix_hits" not in closed
    table = fp8plan("validate", "run.jsonl").out
    assert "prefix hits" in table
    assert "25.0% / " in table
    notes = [
        "note: step 4 is left out: the log does not say how long the tools took, and its seconds hold those waits",
        "note: step 3: the log cannot tell if some tokens are tool output; they count as generated",
    ]
    plan = ["plan", RECORD["model"], "--gpu", "h200", "--prompts", "2", "--response-lengths", "fixed:32"]
    observed = fp8plan(*plan, "--observed", "run.jsonl", "--json")
    assert len(json.loads(observed.out)["anchor"]["rollouts"]) == 3
    for note in notes:
        assert note in done.err
        assert note in observed.err
    Path("tools.jsonl").write_text(json.dumps(RECORD | turns(None)))
    parts = (
        "no rollout can be compared: the log does not say how long the tools took in line 1",
        "give the seconds of each turn's wait",
    )
    refused(fp8plan("validate", "tools.jsonl"), *parts)
    both = [*plan[:4], "--workload", "tools.jsonl", "--observed", "tools.jsonl", "--tool-s", "2", "--json"]
    observed = fp8plan(*both)
    assert "note: line 1 is left out: the log does not say how long the tools took" in observed.err
    assert json.loads(observed.out)["anchor"] is None
    assert json.loads(observed.out)["workload"]["turns"]["rows"] == 3


def test_validate_of_a_run_of_one_rollout_says_what_to_do(fp8plan: Callable[..., Done]) -> None:
    Path("run.jsonl").write_text(json.dumps(RECORD | {"step": 1, "metrics": {}}))
    refused(
        fp8plan("validate", "run.jsonl"), "run.jsonl has only step 1, the first", "let the run go on", "--include-first"
    )
    assert fp8plan("validate", "run.jsonl", "--include-first").code == 0


def test_validate_reads_a_run_that_is_being_written(fp8plan: Callable[..., Done]) -> None:
    """A torn last line is of a process that was killed, or that writes; a broken one before it is an error."""
    record = json.dumps(RECORD)
    Path("records.jsonl").write_text(f"{record}\n{record[:-40]}")
    done = fp8plan("validate", "records.jsonl", "--json")
    assert len(json.loads(done.out)["records"]) == 1
    assert "note: line 2 of records.jsonl, the last one, is left out: it breaks off" in done.err.splitlines()
    Path("records.jsonl").write_text(record[:-1] + ",}")  # nothing else is there: not a run, but one that is wrong
    refused(fp8plan("validate", "records.jsonl"), "line 1 of records.jsonl is not JSON")
    Path("records.jsonl").write_text(f"{record}\n{record[:-40]}\n{record}\n")
    refused(fp8plan("validate", "records.jsonl"), "line 2 of records.jsonl is not JSON")


def test_validate_refuses_another_version_under_strict(fp8plan: Callable[..., Done]) -> None:
    Path("records.jsonl").write_text(json.dumps(RECORD | {"engine_version": "0.31.0"}))
    assert fp8plan("validate", "records.jsonl").code == 0
    refused(fp8plan("validate", "records.jsonl", "--strict"), "line 1", "0.31.0", "leave --strict out")


def test_validate_json_has_the_documented_shape(fp8plan: Callable[..., Done]) -> None:
    lines = [RECORD, RECORD | {"precision": "fp8_block", "seconds": 0.8, "note": "kept"}]
    Path("records.jsonl").write_text("\n".join(map(json.dumps, lines)))
    answer = json.loads(fp8plan("validate", "records.jsonl", "--json").out)
    assert list(answer) == [
        "records", "groups", "makespan_mape", "makespan_worst", "speedup_mae_points", "speedup_worst_points",
        "coverage", "interval_median_halfwidth",
    ]  # fmt: skip
    promised = {
        "predicted_s", "predicted_low_s", "predicted_high_s", "error", "predicted_kv_cache_tokens",
        "predicted_preemptions", "group",
    }  # fmt: skip
    assert all(promised <= row.keys() for row in answer["records"])
    assert answer["records"][1]["note"] == "kept"
    assert [len(group["speedups"]) for group in answer["groups"]] == [1]
    table = fp8plan("validate", "records.jsonl").out
    for text in ("fp8_block", "speed-up over bf16", "MAPE", "90% interval"):
        assert text in table
