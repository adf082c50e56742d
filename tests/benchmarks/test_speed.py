"""The gate of the CPU seconds that a plan takes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import speed
from fp8plan import jsonl

COMMITTED = [row for row in jsonl.rows(speed.RESULTS / "speed.jsonl") if "most_s" in row]
# Parts of the package that need no plan without a picture, records or groups of KV caches, and packages that are slow
# to import. Each was loaded by one once, or costs as much as the plan itself.
UNUSED = (
    "fp8plan.runtime.watch",
    *("fp8plan.views.page", "fp8plan.views.plan_page", "fp8plan.views.run_plots", "fp8plan.model.emit.trl"),
    *("fp8plan.model.emit.verl", "fp8plan.model.validate.validate", "fp8plan.model.schedule.state"),
    *("fp8plan.model.calibrate", "fp8plan.model.tune"),
    *("torch", "vllm", "pandas", "scipy", "sklearn", "matplotlib", "plotly", "pyarrow", "huggingface_hub"),
)


def test_the_committed_rows_are_of_the_gated_commands_and_pass() -> None:
    limits = {f"fp8plan plan {gated.arguments}": gated.most_s for gated in speed.GATED}
    assert {row["command"]: row["most_s"] for row in COMMITTED} == limits
    assert speed.faults(COMMITTED) == []


def test_a_command_that_takes_longer_is_named_with_its_limit() -> None:
    slow = COMMITTED[0] | {"median_s": COMMITTED[0]["most_s"] + 0.01}
    (fault,) = speed.faults([slow, *COMMITTED[1:]])
    assert str(slow["what"]) in fault
    assert f"allowed: {slow['most_s']}" in fault


def test_the_quick_start_loads_nothing_that_it_does_not_use() -> None:
    arguments = ["fp8plan", "plan", *speed.GATED[0].arguments.split()]
    code = f"import atexit, sys; sys.argv = {arguments!r}; from fp8plan.cli import main"
    code += "; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stderr.splitlines()[-1].split()
    assert "fp8plan.model.plan.planner" in loaded
    assert [name for name in loaded if any(f"{name}.".startswith(f"{part}.") for part in UNUSED)] == []


@pytest.mark.slow
def test_the_gate_is_open() -> None:
    assert speed.faults(speed.gated(runs=3)) == []
