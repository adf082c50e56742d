"""`fp8plan doctor`: a table or JSON, and an exit code that says whether there is a fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from command import Done, refused

HEALTHY = {"step": 1, "data": {"rollout_corr/k3_kl": 0.001}}
ILL = {"step": 2, "data": {"rollout_corr/k3_kl": 0.5}}


def test_a_healthy_run_exits_with_0_and_a_fault_with_1(fp8plan: Callable[..., Done]) -> None:
    Path("log.jsonl").write_text(json.dumps(HEALTHY) + "\n")
    done = fp8plan("doctor", "log.jsonl")
    assert (done.code, done.err) == (0, "")
    assert "No fault; " in done.out
    Path("log.jsonl").write_text(json.dumps(HEALTHY) + "\n" + json.dumps(ILL) + "\n")
    done = fp8plan("doctor", "log.jsonl")
    assert done.code == 1
    assert "mismatch_high: type doctor(engine, weights=" in done.out


def test_json(fp8plan: Callable[..., Done]) -> None:
    Path("log.jsonl").write_text(json.dumps(ILL) + "\n")
    done = fp8plan("doctor", "log.jsonl", "--json")
    found = json.loads(done.out)
    assert done.code == 1
    assert [one["fault"] for one in found["findings"] if one["state"] == "fault"] == ["mismatch_high"]


def test_what_cannot_be_looked_at_is_refused(fp8plan: Callable[..., Done]) -> None:
    Path("prompts.jsonl").write_text('{"prompt": "a"}\n')
    refused(fp8plan("doctor", "none.jsonl"), "there is no log none.jsonl")
    refused(fp8plan("doctor", "localhost:8000"), "no file localhost:8000; for a server type: http://localhost:8000")
    refused(fp8plan("doctor", "log.jsonl", "--prompts", "prompts.jsonl"), "--prompts are for a server")
    refused(fp8plan("doctor", "log.jsonl", "--precision", "fp9"), "unknown precision 'fp9'")
