"""The trajectories at once of a plan of turns, in what each target gets."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from fp8plan.errors import ConfigError
from fp8plan.model.emit.targets import EMITTERS
from fp8plan.model.emit.trainers import OPENRLHF, TRAINERS
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.planner import plan
from fp8plan.model.targets import TARGETS, words_at_once
from fp8plan.model.workload import Workload
from fp8plan.model.workload_turns import Turns


@cache
def planned(concurrent: int | None) -> Plan:
    work = Workload(8, 4, 64, turns=Turns(2, 30, 20, 1.0, concurrent=concurrent))
    return plan("Qwen/Qwen3-0.6B", "h200", work, precisions=["bf16"])


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_says_how_many_trajectories_were_planned(target: str) -> None:
    told = planned(12).emit(target)
    assert "planned for 12 trajectories at once, of 32" in told
    for words in (
        "orchestrator.concurrency.max_inflight",
        "--sglang-server-concurrency",
        "max_inflight_tasks=12",
    ):
        assert words in told
    of_all = planned(None).emit(target)
    assert "planned for 32 trajectories at once, of 32" in of_all
    assert "elsewhere" not in of_all
    single = plan("Qwen/Qwen3-0.6B", "h200", Workload(8, 4, 64, 32), precisions=["bf16"])
    assert "trajectories" not in single.emit(target)


@pytest.mark.parametrize("target", [target for target, starts in TARGETS.items() if starts.at_once])
def test_each_setting_stands_in_the_settings_of_its_target_unless_that_starts_all(target: str) -> None:
    text, starts = planned(12).emit(target), TARGETS[target]
    lines = [line.removesuffix(" \\") for line in text.splitlines() if line.startswith(tuple(starts.at_once))]
    assert [line.split()[-1].split("=")[-1] for line in lines] == {
        "prime-rl": ["12", "12"],
        "slime": ["12"],
        "trl": [],
    }[target]
    assert f"at once, of 32: {starts.starts_all or 'bounded by ' + next(iter(starts.at_once))}" in text
    assert not set(lines) & set(planned(None).emit(target).splitlines())


def test_replicas_share_the_trajectories_of_slime() -> None:
    assert TARGETS["slime"].settings_at_once(13, 2) == {"--sglang-server-concurrency": 7}
    assert TARGETS["verl"].settings_at_once(13, 2) == {}


def test_fewer_trajectories_than_samples_are_refused_where_samples_run_together() -> None:
    said = (
        r"^prime-rl runs all samples of a prompt at once, and this plan has 3 trajectories at once; "
        r"allowed: 4 or more; plan again with --concurrent 4$"
    )
    with pytest.raises(ConfigError, match=said):
        planned(3).emit("prime-rl")
    assert planned(4).emit("prime-rl")
    assert "prime-rl" not in planned(3).emit("vllm-serve")
    assert "prime-rl" not in words_at_once(3, 4, 1)


def test_every_table_by_target_has_targets_alone() -> None:
    assert EMITTERS.keys() == TARGETS.keys()
    assert words_at_once(12, 4, 1).keys() <= TARGETS.keys()
    assert {trainer.target for trainer in (*TRAINERS, OPENRLHF)} <= TARGETS.keys()


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
