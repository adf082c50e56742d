"""Rollouts of models that fp8plan cannot read: the engine's arguments, and why one failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8plan.errors import ConfigError
from fp8plan.jsonl import rows
from fp8plan.runtime.measure.rollouts import jobs as cell_files
from fp8plan.runtime.measure.rollouts import run as run_rollouts

MAMBA = {"model_type": "nemotron_h", "hybrid_override_pattern": "M*", "_source": "nowhere"}
WORK = [{"prompts": 1, "samples": 1, "prompt_lengths": "fixed:8", "response_lengths": "fixed:4"}]


@pytest.fixture(autouse=True)
def a_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_files, "engine_version", lambda: "0.26.0")


def cells(folder: Path, **changes: Any) -> Path:
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text(json.dumps(MAMBA))
    setting = {"model": "owner/hybrid", "config": "tiny", "gpu": "h200_sxm", "precisions": ["fp8_kv"]}
    (folder / "cells.json").write_text(json.dumps([setting | {"workloads": WORK} | changes]))
    return folder / "cells.json"


def only_job(folder: Path, **changes: Any) -> dict[str, Any]:
    options = cell_files.Options(folder / "out.jsonl", "full", False, {}, ())
    (job,) = cell_files.jobs(cells(folder, **changes), options)
    return job


def test_vllm_is_left_to_choose_what_depends_on_the_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = only_job(tmp_path, max_num_seqs=32)
    assert not {"block_size", "enable_prefix_caching"} & job["kwargs"].keys()
    assert (job["kwargs"]["kv_cache_dtype"], job["kwargs"]["max_num_seqs"]) == ("fp8", 32)
    assert job["fields"]["model"] == "owner/hybrid"
    given = json.loads((Path(job["kwargs"]["model"]) / "config.json").read_text())
    assert given == {name: value for name, value in MAMBA.items() if name != "_source"}
    assert "owner/hybrid is measured without a prediction" in capsys.readouterr().err


def test_a_setting_decides_itself(tmp_path: Path) -> None:
    job = only_job(tmp_path, block_size=64, enable_prefix_caching=False, engine_args={"gdn_prefill_backend": "triton"})
    assert (job["kwargs"]["block_size"], job["kwargs"]["enable_prefix_caching"]) == (64, False)
    assert job["kwargs"]["gdn_prefill_backend"] == "triton"
    assert job["fields"]["engine_args"] == {"gdn_prefill_backend": "triton"}  # the records say so


def test_a_model_that_is_read_keeps_its_plan_and_its_key(tmp_path: Path) -> None:
    """The key is that of a rollout in steps/ of the H200's profile, of the same setting."""
    setting = json.loads((Path(cell_files.__file__).parents[1] / "cells" / "fit.json").read_text())[0]
    changes = setting | {"precisions": ["bf16"]}
    file = cells(tmp_path)
    file.write_text(json.dumps([changes]))
    (job,) = cell_files.jobs(file, cell_files.Options(tmp_path / "out.jsonl", "full", False, {}, ()))
    assert job["kwargs"]["enable_prefix_caching"] is True
    assert job["work"][0]["runs"][0]["key"] == "09e02f40f170b713"


def test_a_folder_without_a_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing.*config\.json"):
        only_job(tmp_path, config="nothing/here")


def test_why_an_engine_failed_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = only_job(tmp_path)
    monkeypatch.setattr(run_rollouts, "gpu_facts", lambda: {"gpu_product": None, "gpu_memory_used_bytes": None})
    monkeypatch.setattr(run_rollouts, "CHILD", "no.such.module")
    options = cell_files.Options(tmp_path / "out.jsonl", "full", False, {}, ())
    (failure,) = run_rollouts.run_jobs([job], options, 60)
    (row,) = rows(tmp_path / "out.failed.jsonl")
    assert failure.endswith(row["reason"])
    assert (row["model"], row["precision"]) == ("owner/hybrid", "fp8_kv")
    assert "No module named 'no'" in row["reason"]
