"""The compilation of FP8 GEMM kernels in several processes before engines start."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fp8plan.model.architecture import ModelShape
from fp8plan.model.cost.gemm import choose
from fp8plan.runtime.measure.kernels import compile as compiling
from fp8plan.runtime.measure.rollouts import run

MODEL, SMS, MOST = "Qwen/Qwen3-1.7B", 132, 16384


def test_every_kernel_of_every_layer_is_compiled_by_one_task_alone() -> None:
    work = compiling.tasks([MODEL, f"{MODEL}@2"], MOST, SMS)
    shapes = {(x.n, x.k) for ranks in (1, 2) for x in ModelShape.from_hf(MODEL).linears(ranks) if x.quantised}
    assert {(n, k) for n, k, _ in work} == shapes
    for n, k in shapes:
        rows = [m for *shape, part in work for m in part if shape == [n, k]]
        assert len(rows) == len(set(rows))
        kernels = [choose(np.asarray(m), np.array(n), np.array(k), SMS) for m in (np.arange(1, MOST + 1), rows)]
        used = [set(zip(x.block_m.tolist(), x.block_n.tolist(), x.cluster.tolist(), strict=True)) for x in kernels]
        assert used[0] == used[1]


def test_a_model_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a@b"  # no number of ranks
    assert compiling.tasks([str(folder), f"{folder}@2"], MOST, SMS) == []
    assert capsys.readouterr().err.count(f"no kernels of {folder} are compiled: ") == 2


def killed(task: compiling.Task) -> None:
    os._exit(9)


def test_a_killed_process_ends_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compiling, "run", killed)
    assert compiling.main(["--models", MODEL, "--processes", "2", "--gpu", "h100"]) == 1
    assert "a process was killed" in capsys.readouterr().err
    assert compiling.main(["--models", MODEL, "--gpu", "nothing"]) == 2


def job(model: str, precision: str, ranks: int = 1) -> dict[str, Any]:
    fields = {"precision": precision, "tensor_parallel": ranks, "max_num_batched_tokens": 8192, "gpu": "h100_sxm"}
    return {"fields": fields, "kwargs": {"model": model}, "env": {"NAME": "value"}}


def test_engines_with_block_fp8_weights_are_compiled_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []

    def ended(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        assert env["NAME"] == "value"
        started.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(run, "subprocess", SimpleNamespace(run=ended))
    run.compile_kernels([job("a", "bf16"), job("a", "fp8_kv")], 4)
    assert started == []
    run.compile_kernels([job("a", "bf16"), job("b", "fp8_block", 2), job("c", "fp8_block+fp8_kv")], 4)
    ((_, _, module, *words),) = started
    assert module == compiling.__name__
    assert words == ["--models", "b@2", "c@1", "--processes", "4", "--gpu", "h100_sxm", "--rows", "8192"]
    assert "their engines compile them" in capsys.readouterr().err
