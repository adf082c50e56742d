"""`import fp8plan`: every public name is there, typed, and neither it nor a whole plan loads what it does not need."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fp8plan

HEAVY = ("torch", "vllm", "sklearn", "matplotlib", "plotly", "rich", "typer")


def test_every_public_name_is_the_object_of_that_name() -> None:
    named = {name: getattr(fp8plan, name) for name in fp8plan.__all__}
    assert set(named) <= set(dir(fp8plan))
    assert [name for name, value in named.items() if not value.__module__.startswith("fp8plan.")] == []
    assert {name: getattr(value, "__name__", name) for name, value in named.items()} == {name: name for name in named}


def test_a_type_checker_sees_each_name_in_the_module_that_it_is_loaded_from() -> None:
    tree = ast.parse(Path(fp8plan.__file__).read_text())
    imports = [node for branch in tree.body if isinstance(branch, ast.If) for node in branch.body]
    seen = {x.asname: node.module for node in imports if isinstance(node, ast.ImportFrom) for x in node.names}
    assert seen == fp8plan._HOME


USER = """
import numpy as np

import fp8plan
from fp8plan import Fixed, GuardSettings, LogNormal, Monitor, Observation, Plan, RolloutEngine, Scored, SyncSettings
from fp8plan import Workload, correct, measure, pack, plan


def choose() -> Plan:
    work = Workload(8, 4, Fixed(64), LogNormal(200, 0.8, 1000))
    return plan("Qwen/Qwen3-8B", "h200", work, limits=fp8plan.EngineLimits(max_num_seqs=8), gpus=2)


def own_loop(weight: fp8plan.CorrectionSettings) -> float:
    train = np.zeros(2, np.float32)
    tokens = pack(train, train, lengths=[2])
    correction = correct(tokens, weight)
    reveal_type(correction)
    return measure(tokens).metrics().k3


def train(engine: RolloutEngine, rollout: Observation) -> None:
    monitor = Monitor(engine=engine, sinks=[fp8plan.JsonLines("run.jsonl")])
    engine.sync_weights({}, scored=Scored([1, 2], [-1.0]))
    step = monitor.step(np.zeros((1, 2)), np.zeros((1, 2)), rollout=rollout)
    reveal_type(step.thresholds.tis)


found = choose()
train(RolloutEngine.from_plan(found, sync=SyncSettings(), guard=GuardSettings()), Observation(1.0, [1], [2]))
reveal_type(found.select().speedup)
plan("Qwen/Qwen3-8B", "h200", Workload(8, 4, Fixed(64), Fixed(64)), gpus="two")
fp8plan.plam
"""


def test_a_users_script_type_checks_and_its_slips_are_found(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    script = tmp_path / "user.py"
    script.write_text(USER)
    settings = tmp_path / "mypy.ini"  # what else is installed takes minutes to read
    settings.write_text("[mypy]\nstrict = true\n[mypy-torch.*,vllm.*,transformers.*]\nfollow_imports = skip\n")
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--ignore-missing-imports", f"--cache-dir={tmp_path}", script.name],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(Path(fp8plan.__file__).parents[1])},
        check=False,
        capture_output=True,
        text=True,
    )
    said = [line.partition(": ")[2] for line in checked.stdout.splitlines()[:-1]]
    assert said == [
        'note: Revealed type is "fp8plan.runtime.watch.correction.correct.Correction"',
        'note: Revealed type is "float | None"',
        'note: Revealed type is "float | None"',
        'error: Argument "gpus" to "plan" has incompatible type "str"; expected "int | None"  [arg-type]',
        'error: Module has no attribute "plam"  [attr-defined]',
    ], checked.stdout  # and the summary


@pytest.mark.parametrize("name", ["plan", "tune"])
def test_a_function_of_a_request_shows_its_fields(name: str) -> None:
    shown = inspect.signature(getattr(fp8plan, name)).parameters
    assert {"limits", "gpus", "precisions", "budget", "engine_version"} <= shown.keys()
    assert all(option.kind is not inspect.Parameter.VAR_KEYWORD for option in shown.values())
    assert ("keep" in shown) is (name == "tune")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"fp8plan.*'plam'"):
        fp8plan.plam  # noqa: B018  # reading it is the test


PLAN = """
from fp8plan import Fixed, Workload, plan
assert plan('Qwen/Qwen3-0.6B', 'h200', Workload(1, 2, Fixed(8), Fixed(8))).choices
"""
# (what one Python runs, one after the other; what it must not have loaded then)
IMPORTS: list[tuple[str, tuple[str, ...]]] = [
    ("import fp8plan", (*HEAVY, "scipy", "numpy", "fp8plan.model", "fp8plan.model.plan.planner")),
    ("import fp8plan.model.risk.expected as risk; risk.committed_fit()", ("sklearn", "scipy")),
    (PLAN, (*HEAVY, "scipy", "pandas", "huggingface_hub", "fp8plan.runtime")),
    ("import fp8plan.runtime.watch.mismatch.metrics, fp8plan.runtime.watch.correction.correct", ("torch",)),
    ("import fp8plan.runtime.watch.controller.laws", ("torch",)),
]


def test_nothing_loads_what_it_does_not_need() -> None:
    """`import fp8plan` not even numpy, a plan no torch, scikit-learn or scipy, the correction and its laws no torch."""
    report = "print([name for name in {!r} if name in sys.modules])"
    lines = [line for code, names in IMPORTS for line in (code, report.format(names))]
    lines = ["import sys", *lines, report.format(("numpy", "fp8plan.model.plan.planner"))]  # it sees what is loaded
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [*["[]"] * len(IMPORTS), "['numpy', 'fp8plan.model.plan.planner']"]
