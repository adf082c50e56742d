"""Rollouts measured with the real vLLM on a CPU: the records are good, resume skips, a time-out ends the engine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from fp8plan.errors import ConfigError
from fp8plan.jsonl import write
from fp8plan.model.precision import find_precision
from fp8plan.model.validate.records import read_records
from fp8plan.model.validate.validate import validate
from fp8plan.runtime.measure.rollouts import jobs as cell_files
from fp8plan.runtime.measure.rollouts import run as run_rollouts
from fp8plan.runtime.measure.rollouts.engine import TRIES, kernel_backends, model_runner, uses_e8m0
from fp8plan.runtime.measure.rollouts.timed import token_prompts

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
}


def setting(folder: Path, **changes: Any) -> dict[str, Any]:
    """Sixteen blocks of 32 tokens less the null block: the second workload cannot keep all its requests."""
    model = folder / "tiny"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(TINY))
    return {
        "model": str(model),
        "gpu": "h200_sxm",
        "precisions": ["bf16"],
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "block_size": 32,
        "enforce_eager": True,
        "kv_cache_tokens": 512,
        "repeats": 2,
        "workloads": [
            {"prompts": 2, "samples": 2, "prompt_lengths": "fixed:40", "response_lengths": "fixed:6"},
            {"prompts": 6, "samples": 1, "prompt_lengths": "fixed:60", "response_lengths": "fixed:70", "repeats": 1},
        ],
    } | changes


def cells(folder: Path, *settings: Any) -> Path:
    file = folder / "cells.json"
    file.write_text(json.dumps(settings))
    return file


def measure(folder: Path, *more: str) -> int:
    return run_rollouts.main(["--cells", str(folder / "cells.json"), "--output", str(folder / "out.jsonl"), *more])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    cells(folder, setting(folder))
    status = measure(folder, "--warmup", "short", "--trace", "--timeout", "400")
    log = folder / "out.tiny.bf16.log"
    assert status == 0, log.read_text()[-3000:] if log.exists() else "no log"
    return folder


@pytest.mark.slow
@pytest.mark.vllm
def test_records_are_what_validate_reads(measured: Path) -> None:
    records = read_records(measured / "out.jsonl")
    assert len(records) == 3
    assert len({record.fields["key"] for record in records}) == 3
    assert len({record.group for record in records}) == 2  # two repeats of one workload, and the other
    assert len(validate(records).records) == 3
    for record in records:
        assert record.limits.num_gpu_blocks == 15
        assert record.fields["measured_kv_cache_tokens"] == 512
        assert record.fields["generation_tokens"] == record.batch.responses.sum()


@pytest.mark.slow
@pytest.mark.vllm
def test_a_pool_too_small_preempts_and_a_large_one_does_not(measured: Path) -> None:
    *roomy, starved = (record.fields["preemptions"] for record in read_records(measured / "out.jsonl"))
    assert roomy == [0, 0]
    assert starved > 0


@pytest.mark.slow
@pytest.mark.vllm
def test_siblings_hit_the_prefix_cache_and_repeats_start_it_empty(measured: Path) -> None:
    """One full block of 32 of each 40-token prompt can be shared, by the second sample of each of two prompts; a cache
    that lived on from the warm-up or the last run would give all four requests a hit."""
    hits = [record.fields["prefix_cache_hits"] for record in read_records(measured / "out.jsonl")[:2]]
    assert hits == [64, 64]


@pytest.mark.slow
@pytest.mark.vllm
def test_the_trace_adds_up(measured: Path) -> None:
    import gzip

    with gzip.open(measured / "out.trace.jsonl.gz", "rt") as file:
        runs = {row["key"]: row for row in map(json.loads, file)}
    for record in read_records(measured / "out.jsonl"):
        run = runs.pop(record.fields["key"])
        assert sum(run["generation_tokens"]) == record.batch.responses.sum()
        assert len(run["t_s"]) == record.fields["steps_with_output"]
        assert 0 < run["t_s"][0] < run["t_s"][-1] <= record.seconds
        assert all(0 < core <= front for core, front in zip(run["core_s"], run["t_s"], strict=True))
        assert run["core_s"] == sorted(run["core_s"])
        assert record.fields["first_step_s"] == run["t_s"][0]
        assert run["t_s"][0] <= record.fields["longest_step_s"] <= record.seconds
        assert 1 <= record.fields["host_slowdown"] < 50
        assert 0 < record.fields["host_loop_s"] < 1
        assert record.fields["attempt"] in range(TRIES)
    assert not runs


@pytest.mark.slow
@pytest.mark.vllm
def test_what_is_measured_is_not_measured_again(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(run_rollouts, "_run", lambda job, timeout: started.append(job))
    assert measure(measured, "--warmup", "short") == 0
    assert started == []
    kept = (measured / "out.jsonl").read_text().splitlines()
    (measured / "less.jsonl").write_text(kept[0] + "\n" + kept[2] + "\n")
    run_rollouts.main(["--cells", str(measured / "cells.json"), "--output", str(measured / "less.jsonl")])
    assert [run["repeat"] for job in started for cell in job["work"] for run in cell["runs"]] == [1]


@pytest.mark.vllm
def test_a_timeout_ends_the_engine_and_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hang = tmp_path / "hang.py"
    hang.write_text(
        "import os, subprocess, sys, time\n"
        "grandchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(grandchild.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(run_rollouts, "CHILD", "hang")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    cells(tmp_path, setting(tmp_path))
    begun = time.monotonic()
    assert measure(tmp_path, "--timeout", "5") == 1
    assert time.monotonic() - begun < 60
    assert "killed after 5 s" in capfd.readouterr().err
    process = int((tmp_path / "out.tiny.bf16.log").read_text())
    assert not _alive(process)


def _alive(process: int) -> bool:
    """Return whether a process still runs after 5 s.

    A zombie, which its adopter has not waited for, does not run.
    """
    for _ in range(50):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        if state == "Z":
            return False
        time.sleep(0.1)
    return True


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("raise SystemExit('out of luck')", "last line of the log: out of luck"),
        (
            "print('(pid=1) ValueError: no room')\nraise RuntimeError('see above')",
            "first error in the log: ValueError: no room",
        ),
    ],
    ids=["last words", "first error"],
)
def test_a_broken_engine_is_reported_with_what_its_log_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], program: str, told: str
) -> None:
    (tmp_path / "broken.py").write_text(program)
    monkeypatch.setattr(run_rollouts, "CHILD", "broken")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    cells(tmp_path, setting(tmp_path))
    assert measure(tmp_path) == 1
    assert f"exit status 1; {told}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_num_seq": 8}, "unknown max_num_seq"),
        ({"workloads": [{"prompts": 1}]}, "lacks prompt_lengths, response_lengths, samples"),
        ({"precisions": ["fp4"]}, "unknown precision 'fp4'"),
        ({"gpu": "h20000"}, "unknown GPU"),
        ({"max_model_len": 50}, "max_model_len is 50"),
    ],
)
def test_bad_cells_are_one_clear_error(
    change: dict[str, Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cell_files, "engine_version", lambda: "0.26.0")
    cells(tmp_path, setting(tmp_path, **change))
    assert measure(tmp_path) == 2
    assert words in capfd.readouterr().err


def test_a_torn_record_is_measured_again_and_a_broken_one_refused(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert cell_files.keys_in(output) == set()
    output.write_text('{"key": "a"}\n{"ke')
    assert cell_files.keys_in(output) == {"a"}
    write(output, {"key": "b"})  # cuts the torn one off
    assert cell_files.keys_in(output) == {"a", "b"}
    output.write_text('{"ke\n{"key": "a"}\n')
    with pytest.raises(ConfigError, match=r"line 1 of .*not JSON"):
        cell_files.keys_in(output)


def test_samples_of_a_prompt_share_its_tokens_and_prompts_do_not() -> None:
    work = {"seed": 3, "prompt_ids": [0, 0, 1], "prompt_lengths": [50, 50, 50]}
    first, sibling, other = (prompt["prompt_token_ids"] for prompt in token_prompts(work, 1000))
    assert first == sibling
    assert first != other
    assert 0 <= min(first) <= max(first) < 1000


def test_the_cells_for_the_first_look_starve_bf16_and_not_fp8_kv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cell_files, "engine_version", lambda: "0.26.0")
    file = Path(run_rollouts.__file__).parents[1] / "cells" / "first_look.json"
    options = cell_files.Options(tmp_path / "out.jsonl", "full", False, {}, ())
    assert len(cell_files.jobs(file, options)) == 4
    starved = [line for line in capfd.readouterr().err.splitlines() if "starved" in line]
    assert len(starved) == 4
    assert [" 0 preemptions" in line for line in starved] == [False, False, True, True]


def test_cells_can_be_measured_on_another_gpu_than_they_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_files, "engine_version", lambda: "0.26.0")
    options = cell_files.Options(tmp_path / "out.jsonl", "full", False, {}, (), gpu="h100")
    (job,) = cell_files.jobs(cells(tmp_path, setting(tmp_path)), options)
    assert job["fields"]["gpu"] == "h100_sxm"


# Lines as vLLM 0.26 formats them (rollouts.engine names the sources).
LOG = """INFO [flash_attn.py:776] Using FlashAttention version 3
INFO [cuda.py:482] Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'TRITON_ATTN'].
INFO [__init__.py:604] Selected SomeBlockScaledMMKernel for Fp8PerBlockOnlineLinearMethod
INFO [deep_gemm.py:123] DeepGEMM E8M0 disabled on current configuration.
"""


def test_the_engine_log_names_the_kernels() -> None:
    both = find_precision("fp8_block+fp8_kv")
    expected = {"gemm.fp8_block": "SomeBlockScaledMMKernel", "attention.fp8": "FLASH_ATTN"}
    assert kernel_backends(LOG, both) == expected
    assert model_runner(LOG) == "V1"
    assert model_runner(LOG + "INFO [gpu_worker.py:378] Using V2 Model Runner\n") == "V2"
    assert uses_e8m0(LOG, both) is False
    assert uses_e8m0(LOG.replace("disabled", "enabled"), both) is True
    assert uses_e8m0(LOG, find_precision("fp8_kv")) is None
