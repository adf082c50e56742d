"""The trajectories at once of a plan of turns, in what each target gets."""

from __future__ import annotations

import ast
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.planner import plan
from fp8plan.model.workload import Workload
from fp8plan.model.workload_turns import Turns


@cache
def planned(concurrent: int | None) -> Plan:
    work = Workload(8, 4, 64, turns=Turns(2, 30, 20, 1.0, concurrent=concurrent))
    return plan("Qwen/Qwen3-0.6B", "h200", work, precisions=["bf16"])


def notes(target: str, made: Plan) -> list[str]:
    text = made.emit(target)
    return text.splitlines() if target == "verl" else json.loads(text)["notes"]


@pytest.mark.parametrize("target", ["vllm", "verl", "trl"])
def test_every_target_says_how_many_trajectories_were_planned(target: str) -> None:
    told = " ".join(notes(target, planned(12)))
    assert "planned for 12 trajectories at once, of 32" in told
    assert "orchestrator.concurrency.max_inflight=12" in told
    assert "num_parallel_generation_workers=3" in told  # groups of four samples
    assert "max_inflight_tasks=12" in told
    of_all = " ".join(notes(target, planned(None)))
    assert "planned for 32 trajectories at once, of 32" in of_all
    assert "max_inflight" not in of_all


def test_a_plan_of_one_turn_says_nothing_of_it() -> None:
    single = plan("Qwen/Qwen3-0.6B", "h200", Workload(8, 4, 64, 32), precisions=["bf16"])
    assert not any("trajectories" in note for target in ("vllm", "verl", "trl") for note in notes(target, single))


def source(package: str, file: str) -> str:
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / file).read_text()


@pytest.mark.verl
def test_verls_agent_loops_have_no_setting_for_the_trajectories_at_once() -> None:
    tree = ast.parse(source("verl", "workers/config/rollout.py"))
    (config,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "AgentLoopConfig")
    names = {field.target.id for field in config.body if isinstance(field, ast.AnnAssign)}  # type: ignore[union-attr]
    assert names == {
        "num_workers",
        "default_agent_loop",
        "agent_loop_config_path",
        "custom_async_server",
        "agent_loop_manager_class",
    }
    assert "Semaphore" not in source("verl", "experimental/agent_loop/agent_loop.py")


@pytest.mark.trl
def test_trl_has_the_setting_in_its_asynchronous_trainer_alone() -> None:
    assert "    max_inflight_tasks: int" in source("trl", "experimental/async_grpo/async_grpo_config.py")
    assert "max_inflight" not in source("trl", "trainer/grpo_config.py")
