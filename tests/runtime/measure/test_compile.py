"""The compilation of FP8 GEMM kernels in several processes before engines start."""

from __future__ import annotations

import subprocess
import sys
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


def test_every_kernel_of_every_layer_is_compiled_once() -> None:
    weights = compiling.weights_of([MODEL, f"{MODEL}@2"])
    shapes = set().union(*weights.values())
    assert shapes == {(x.n, x.k) for ranks in (1, 2) for x in ModelShape.from_hf(MODEL).linears(ranks) if x.quantised}
    compiled = [point.shape for point in compiling.points(shapes, MOST, SMS)]
    for n, k in shapes:
        rows = [shape["m"] for shape in compiled if (shape["n"], shape["k"]) == (n, k)]
        assert len(rows) == len(set(rows))
        kernels = [choose(np.asarray(m), np.array(n), np.array(k), SMS) for m in (np.arange(1, MOST + 1), rows)]
        used = [set(zip(x.block_m.tolist(), x.block_n.tolist(), x.cluster.tolist(), strict=True)) for x in kernels]
        assert used[0] == used[1]


def test_a_model_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a@b"  # no number of ranks
    assert compiling.weights_of([str(folder), f"{folder}@2"]) == {}
    assert capsys.readouterr().err.count(f"no kernels of {folder} are compiled: ") == 2


@pytest.mark.parametrize(
    ("code", "status"), [("pass", 0), ("import sys; sys.exit(1)", 1), ("import os; os.abort()", 1)]
)
def test_each_process_compiles_a_share(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: str, status: int
) -> None:
    """A process that fails, or that is killed, leaves the others alone."""
    started, start = [], subprocess.Popen

    def popen(command: list[str], **to: Any) -> subprocess.Popen[bytes]:
        started.append(command)
        return start([sys.executable, "-c", code if len(started) == 1 else "pass"], **to)

    monkeypatch.setattr("fp8plan.runtime.measure.kernels.sweep.subprocess.Popen", popen)
    assert compiling.main(["--models", MODEL, "nothing", "--processes", "3", "--gpu", "h100"]) == status
    assert ("some kernels are not compiled" in capsys.readouterr().err) == bool(status)
    parts, kernels = [], []
    monkeypatch.setattr(compiling, "_compile", kernels.extend)
    for _, _, module, *words in started:
        assert module == compiling.__name__
        parts.append(words[-1])
        compiling.main(words)
    assert parts == ["1/3", "2/3", "3/3"]
    assert sorted(kernels, key=str) == sorted(
        compiling.points(compiling.weights_of([MODEL])[MODEL], MOST, SMS), key=str
    )
    assert "nothing" not in capsys.readouterr().err  # it was noted once


def test_bad_input_ends_it() -> None:
    assert compiling.main(["--models", MODEL, "--gpu", "nothing"]) == 2
    assert compiling.main(["--models", "nothing", "--gpu", "h100"]) == 0


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
