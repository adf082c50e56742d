"""The script that runs TRL with a colocated engine, without a trainer."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu import trl_colocated
from fp8plan.model.distributions import Trace

pytestmark = pytest.mark.trl  # the rows hold its version


def test_each_precision_has_its_process_and_its_run_file_names_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, output = tmp_path / "model", tmp_path / "rows.jsonl"
    folder.mkdir()
    started = list[str]()

    def run(words: list[str], log: Path, limit_s: float) -> str:
        precision = words[words.index("--train") + 1]
        started.append(precision)
        log.touch()
        assert words[words.index("--folder") + 1] == str(folder)
        record = json.dumps({"model": str(folder), "seconds": 1.0}, separators=(",", ":"))
        (tmp_path / f"rows.{precision}.run.jsonl").write_text(record + "\n")
        return f"ended after {limit_s:g} s" if precision == "fp8_kv" else ""

    monkeypatch.setattr(trl_colocated.process, "run", run)
    words = ["--model", "fp8plan/dense-9m", "--folder", str(folder), "--output", str(output), "--gpu", "cpu"]
    trl_colocated.main([*words, "--precisions", "fp8_kv", "bf16"])
    assert started == ["fp8_kv", "bf16"]
    (row,) = [json.loads(line) for line in output.read_text().splitlines()]
    assert (row["what"], row["precision"], row["error"]) == ("failed", "fp8_kv", "the trainer ended after 460 s")
    for precision in started:
        assert json.loads((tmp_path / f"rows.{precision}.run.jsonl").read_text())["model"] == "fp8plan/dense-9m"


def test_answers_end_at_the_lengths_of_the_frozen_plan() -> None:
    frozen = json.loads((Path(trl_colocated.__file__).parents[1] / "results" / "trl_auto" / "prior.json").read_text())
    calls = []
    engine = SimpleNamespace(generate=lambda prompts, params: calls.append([each.max_tokens for each in params]))
    trainer = SimpleNamespace(rollout_engine=engine, _prompt_lengths=lambda: Trace((64,) * 256, "prompts"))
    trl_colocated.end_as_planned(argparse.Namespace(batch=256, completion=384), trainer)
    shared = SimpleNamespace(max_tokens=384)
    shared.clone = lambda: copy.copy(shared)
    engine.generate([[1] * 64] * 256, shared)
    (tokens,) = calls
    assert sum(tokens) == frozen["workload"]["response_tokens"]
    assert max(tokens) == 384
