"""Two processes that train one policy with TRL, each with an engine of its own, ranked as by `accelerate launch`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import cpu_plan
from trl_runs import model
from vllm_server import free_port, serving

from fp8plan.model.emit.trl import server_command

pytestmark = [pytest.mark.trl, pytest.mark.vllm]


def trained(folder: Path, *more: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Train in two processes. Returns what each of them has seen, and their common log.

    more: URL and PORT of a server, and how the policy is sharded
    """
    import two_processes
    import warm_processes  # it imports vLLM

    log = folder / "log"
    words = (model(), str(folder), *more)
    code, said = warm_processes.output(two_processes.launch, *words, log=log, timeout_s=400)
    assert code == 0, said[-3000:]
    first, second = (json.loads((folder / f"seen_{rank}.json").read_text()) for rank in range(2))
    return first, second, said


@pytest.mark.slow
def test_two_processes_train_one_policy_with_one_set_of_thresholds(tmp_path: Path) -> None:
    first, second, log = trained(tmp_path)
    assert first["weights"] == second["weights"]
    assert first["state"] == second["state"]
    assert first["responses"] == second["responses"] == 16
    assert first["k3_kl"] == second["k3_kl"]  # of both processes' tokens
    assert all(0 < k3 < 0.05 for k3 in first["k3_kl"])
    assert first["threshold_tis"] == second["threshold_tis"]
    # What the guard advises is said, and not done: both engines stay what they are.
    assert first["fp8_kv"] == second["fp8_kv"] == [1.0] * 3
    assert "go on from a checkpoint with choice='bf16'" in log


@pytest.mark.slow
@pytest.mark.parametrize("sharded", ["fsdp2", "zero3"])
def test_two_processes_that_shard_the_policy_sync_it_whole(sharded: str, tmp_path: Path) -> None:
    """By FSDP2, and by DeepSpeed's ZeRO-3, over gloo.

    The tests' environment lacks DeepSpeed. `DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation --target FOLDER
    deepspeed hjson py-cpuinfo` installs it; the test then runs with FOLDER in PYTHONPATH and DS_ACCELERATOR=cpu.
    """
    if sharded == "zero3":
        pytest.importorskip("deepspeed")
    first, second, _ = trained(tmp_path, "", "0", sharded)
    assert first["shards"] == second["shards"] > 0
    assert first["weights"] == second["weights"]
    assert first["same"]
    assert second["same"]
    assert all(0 < k3 < 0.05 for k3 in first["k3_kl"])


@pytest.mark.slow
def test_two_processes_share_a_server(tmp_path: Path) -> None:
    setup = replace(cpu_plan("fp8_kv").setup(), model=model())
    with serving(server_command(setup)) as server:
        first, second, log = trained(tmp_path, server.url, str(free_port()))
        assert server.get("/fp8plan/status")["weights"]["version"] == 3
    assert first["weights"] == second["weights"]
    assert first["responses"] == second["responses"] == 32
    assert first["k3_kl"] == second["k3_kl"]
    assert all(0 < k3 < 0.05 for k3 in first["k3_kl"])
    assert first["threshold_tis"] == second["threshold_tis"]
    assert "is another program; end both" in log
