"""The doctor on what a run has written, and on the answers of a server that is none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fp8plan
from fp8plan.errors import ConfigError
from fp8plan.runtime.doctor.over_http.answers import Completion, Info, facts_of, output_of, samples, total

# As a Monitor's record has them (fp8plan.schemas.RunRecord).
RECORD: dict[str, Any] = {
    "step": 4,
    "metrics": {"rollout_corr/k3_kl": 2e-3, "fp8plan/kl_limit": 1e-2},
    "model": "Qwen/Qwen3-8B",
    "gpu": "h200_sxm",
    "engine_version": "0.26.0",
    "precision": "fp8_block",
    "kernel_backends": {"gemm.fp8_block": "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"},
    "e8m0": False,
    "enforce_eager": False,
    "prompt_lengths": [8] * 40,
    "response_lengths": [9] * 40,
    "seconds": 1.0,
    "preemptions": 0,
}


def faults(file: Path, *rows: dict[str, Any]) -> dict[str | None, str]:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {one.fault: one.says for one in fp8plan.doctor(str(file)).faults}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"e8m0": True}, "e8m0_on"),
        ({"enforce_eager": True}, "graphs_off"),
        ({"preemptions": 30}, "preemption_storm"),
        ({"kernel_backends": {"gemm.fp8_block": "MarlinFP8ScaledMMLinearKernel"}}, "wrong_kernel"),
        ({"metrics": {"rollout_corr/k3_kl": 0.2, "fp8plan/kl_limit": 1e-2}}, "mismatch_high"),
    ],
)
def test_a_monitors_run_file(tmp_path: Path, changes: dict[str, Any], fault: str | None) -> None:
    assert list(faults(tmp_path / "run.jsonl", RECORD, RECORD | changes)) == ([fault] if fault else [])


def told(file: Path, *rows: dict[str, Any]) -> dict[str, tuple[str, str]]:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = fp8plan.doctor(str(file))
    assert found.target == f"{file}, step {rows[-1]['step']}"
    return {one.check: (one.state.value, one.says) for one in found.findings}


def test_a_run_file_whose_lengths_were_cut_tells_the_rest(tmp_path: Path) -> None:
    cut = {name: value for name, value in RECORD.items() if not name.endswith("_lengths")}
    found = told(tmp_path / "run.jsonl", cut)
    assert found["precision"] == ("ok", "fp8_block")
    assert found["kernels"] == ("ok", "gemm.fp8_block FlashInferFp8DeepGEMMDynamicBlockScaledKernel")
    assert found["e8m0"] == ("ok", "scales are FP32")
    assert found["preemption"] == ("ok", "none since step 4 began")
    found = told(tmp_path / "run.jsonl", cut | {"preemptions": 30})
    assert found["preemption"] == ("unknown", "30 since step 4 began; in how many requests is not told")


def test_a_monitor_without_an_engine_knows_no_preemptions(tmp_path: Path) -> None:
    found = told(tmp_path / "run.jsonl", {"step": 4, "metrics": RECORD["metrics"]})
    assert found["preemption"][1].startswith("no record counts preemptions: a Monitor knows rollouts from its engine")
    assert found["mismatch"][0] == "ok"


def test_a_compressed_run_file(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "run.jsonl.gz", "wt") as file:
        file.write(json.dumps(RECORD) + "\n")
    assert fp8plan.doctor(tmp_path / "run.jsonl.gz").observed.runs == "fp8_block"


def test_a_step_without_a_rollout_leaves_the_last_rollout(tmp_path: Path) -> None:
    later = {"step": 5, "metrics": {"rollout_corr/k3_kl": 1e-3}}
    assert list(faults(tmp_path / "run.jsonl", RECORD | {"e8m0": True}, later)) == ["e8m0_on"]


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"rollout_corr/k3_kl": 0.5}, ["mismatch_high"]),
        ({"rollout_corr/k3_kl": 0.001}, []),
        ({"sampling/sampling_logp_difference/mean": 0.4}, ["mismatch_high"]),  # pi / 4 x 0.16 = 0.13
        ({"sampling/sampling_logp_difference/mean": 0.02}, []),
    ],
)
def test_a_trainers_log(tmp_path: Path, figures: dict[str, float], expected: list[str]) -> None:
    assert list(faults(tmp_path / "log.jsonl", {"step": 1, "data": figures})) == expected


def test_a_log_without_a_kl_says_what_to_switch_on(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 1, "data": {"reward": 1.0}}\n')
    with pytest.raises(ConfigError, match=r"algorithm.rollout_correction; TRL: use_vllm"):
        fp8plan.doctor(tmp_path / "log.jsonl")


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(
        ConfigError, match=r"127.0.0.1:9/v1/models does not answer: .*refused; give the URL of a vllm serve that runs"
    ):
        fp8plan.doctor("http://127.0.0.1:9")


# Lines and answers of a vLLM 0.30 server with an FP8 KV cache and --enforce-eager, shortened.
METRICS = """# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 4.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 5.0
vllm:cache_config_info{block_size="128",cache_dtype="fp8",engine="0"} 1.0
"""
INFO = {
    "vllm_config": {
        "model_config": {"enforce_eager": True, "logprobs_mode": "raw_logprobs", "quantization": None},
        "compilation_config": {"cudagraph_mode": 0},
        "device_config": {"device": "cpu"},
    }
}


def test_a_servers_own_pages_are_read() -> None:
    found = samples(METRICS)
    assert total(found, "vllm:num_preemptions_total") == 3
    assert total(found, "vllm:request_success_total") == 9
    with pytest.raises(ConfigError, match="/metrics has no vllm:other_total"):
        total(found, "vllm:other_total")
    assert facts_of(msgspec.convert(INFO, Info), found) == {
        "enforce_eager": True,
        "logprobs_mode": "raw_logprobs",
        "cudagraph_mode": "NONE",
        "device": "cpu",
        "e8m0": None,
        "quantization": None,
        "kv_cache_dtype": "fp8",
    }
    graphs = {"vllm_config": {"compilation_config": {"cudagraph_mode": [2, 1]}}}
    assert facts_of(msgspec.convert(graphs, Info), {}) == {"cudagraph_mode": "FULL_AND_PIECEWISE"}


def test_a_completion_is_read_as_vllms_own_output() -> None:
    choice = {
        "token_ids": [584],
        "logprobs": {"token_logprobs": [-7.2], "top_logprobs": [{"token_id:584": -7.2, "token_id:3": -1.0}]},
        "prompt_logprobs": [None, {"6": {"logprob": -7.0, "rank": 257}}],
    }
    answer = {"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 128}}}
    asked = {"logprobs": 1, "prompt_logprobs": 0}
    output = output_of(msgspec.convert(answer, Completion), [5, 6], asked)
    assert output.outputs[0].logprobs[0][584].logprob == -7.2
    assert output.prompt_logprobs[1][6].logprob == -7.0
    assert output.num_cached_tokens == 128
    bare = {"choices": [choice | {"logprobs": None, "prompt_logprobs": None}], "usage": {}}
    output = output_of(msgspec.convert(bare, Completion), [5, 6], {})
    assert (output.outputs[0].logprobs, output.num_cached_tokens) == ([], None)
