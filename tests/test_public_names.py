"""`import fp8plan`: every public name is there, and neither it nor a whole plan loads what it does not need."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import fp8plan

HEAVY = ("torch", "vllm", "sklearn", "matplotlib", "plotly", "rich", "typer")


@pytest.mark.parametrize("name", fp8plan.__all__)
def test_every_public_name_is_the_object_of_that_name(name: str) -> None:
    found = getattr(fp8plan, name)
    assert name in dir(fp8plan)
    assert found.__module__.startswith("fp8plan.")
    if hasattr(found, "__name__"):
        assert found.__name__ == {"Trainer": "StepTimes", "gpu": "find_gpu"}.get(name, name)  # names that were


def test_plan_shows_its_options_and_they_are_those_of_predict() -> None:
    from fp8plan.model.plan.planner import predict

    shown = inspect.signature(fp8plan.plan).parameters
    assert {"limits", "gpus", "precisions", "budget", "engine_version"} <= shown.keys()
    assert all(option.kind is not inspect.Parameter.VAR_KEYWORD for option in shown.values())
    assert list(shown.values()) == list(inspect.signature(predict).parameters.values())


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"fp8plan.*'plam'"):
        fp8plan.plam  # noqa: B018  # reading it is the test


def loaded(code: str, names: tuple[str, ...]) -> str:
    """Which of the packages `names` a fresh Python has loaded after `code`."""
    report = f"import sys\n{code}\nprint([m for m in {names!r} if m in sys.modules])"
    return subprocess.run([sys.executable, "-c", report], check=True, capture_output=True, text=True).stdout.strip()


def test_importing_loads_none_of_its_own_modules_and_not_even_numpy() -> None:
    names = (*HEAVY, "scipy", "numpy", "fp8plan.model", "fp8plan.model.plan.planner")
    assert loaded("import fp8plan", names) == "[]"
    assert loaded("import fp8plan; fp8plan.plan", names) != "[]"  # the check sees what is loaded


def test_a_plan_loads_no_torch_vllm_or_sklearn() -> None:
    code = (
        "from fp8plan import Fixed, Workload, plan\n"
        "assert plan('Qwen/Qwen3-0.6B', 'h200', Workload(1, 2, Fixed(8), Fixed(8))).choices"
    )
    assert loaded(code, (*HEAVY, "scipy", "pandas", "huggingface_hub", "fp8plan.runtime")) == "[]"
