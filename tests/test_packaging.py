"""The wheel that a user installs carries every data file. The core neither needs nor imports torch or vllm."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from fp8plan.errors import ConfigError
from fp8plan.importers import trl
from fp8plan.model.distributions import parse_distribution
from fp8plan.runtime.apply.weight_sync.delta.store import Publisher

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAVY = ("torch", "vllm")
SOURCE = "https://git.example/fp8plan"
MOST_BYTES = 8_000_000  # of the wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=os.environ | {"FP8PLAN_SOURCE": SOURCE})
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_carries_every_file_of_the_package_and_the_profiles(wheel: zipfile.ZipFile) -> None:
    """Raw measurements stay in the repository."""
    in_package = (p for p in (ROOT / "fp8plan").rglob("*") if "__pycache__" not in p.parts)
    paths = [ROOT / "profiles" / "datasheet.json", *(ROOT / "profiles").rglob("profile.json")]
    profiles = {Path("fp8plan") / p.relative_to(ROOT) for p in paths}
    expected = {p.relative_to(ROOT) for p in in_package if p.is_file()} | profiles
    packed = {Path(name) for name in wheel.namelist() if name.startswith("fp8plan/")}
    assert packed == expected
    assert len(profiles) > 7
    assert Path(str(wheel.filename)).stat().st_size < MOST_BYTES
    assert any(p.parts[1:3] == ("model", "configs") for p in packed)


def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    info = next(name for name in wheel.namelist() if name.endswith("METADATA")).removesuffix("METADATA")
    metadata = wheel.read(info + "METADATA").decode()
    assert f"Version: {PROJECT['version']}\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    assert wheel.read(info + "licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert wheel.read(info + "entry_points.txt").decode().split() == [
        *"[console_scripts] fp8plan = fp8plan.cli:main".split(),
        *"[verl.plugins] fp8plan = fp8plan.integrations.verl.plugin".split(),
        *"[vllm.endpoint_plugins] fp8plan = fp8plan.runtime.apply.server.routes:Routes".split(),
        *"[vllm.general_plugins] fp8plan = fp8plan.runtime.apply.plugin:register".split(),
    ]


def test_an_index_shows_readme_with_links_that_lead_out_of_it(wheel: zipfile.ZipFile) -> None:
    info = next(name for name in wheel.namelist() if name.endswith("METADATA"))
    page = wheel.read(info).decode().partition("\n\n")[2]
    here = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    assert len(links) == len(re.findall(r"\]\(([^)\s]+)\)", here)) > 30
    assert [link for link in links if "://" not in link] == []
    base = f"{SOURCE}/blob/v{PROJECT['version']}"
    assert f"Project-URL: Source, {SOURCE}\n" in wheel.read(info).decode()
    assert f"({base}/docs/guides/trl.md)" in page
    assert f"]({base.replace('blob', 'raw')}/examples/plan.png)" in page
    assert page.count("\n") == here.count("\n")


def test_the_wheel_has_the_source_that_the_first_plan_compiles(wheel: zipfile.ZipFile) -> None:
    assert "fp8plan/model/schedule/c/scheduler.c" in wheel.namelist()


def test_the_wheel_has_no_benchmark_and_no_test(wheel: zipfile.ZipFile) -> None:
    info = {name.partition("/")[0] for name in wheel.namelist()} - {"fp8plan"}
    assert info == {f"fp8plan-{PROJECT['version']}.dist-info"}
    assert not [name for name in wheel.namelist() if "benchmark" in name or "test_" in name or "cpu_kernels" in name]


def test_the_wheel_plans_offline_is_imported_in_no_time_and_names_one_plugin(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    """`make wheel` asks the same in an environment of its own."""
    wheel.extractall(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(ROOT / "tests" / "check_wheel.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"the wheel at {tmp_path / 'fp8plan'} is sound" in done.stdout


def test_the_core_depends_on_neither_torch_nor_vllm() -> None:
    assert not [d for d in PROJECT["dependencies"] if d.startswith(HEAVY)]


def test_only_a_typer_that_works_with_the_newest_click_is_allowed() -> None:
    """With click 8.5.1, the newest of November 2026, typer 0.15 prints no help, and 0.16 and 0.17 take a missing
    argument for None. 0.19.2, 0.21.0 and later ones did neither, with click 8.5.1 and 8.2."""
    (wanted,) = (Requirement(x).specifier for x in PROJECT["dependencies"] if x.startswith("typer"))
    assert not [broken for broken in ("0.15.0", "0.15.3", "0.15.4", "0.16.0", "0.17.0") if wanted.contains(broken)]
    assert wanted.contains("0.19.2")
    assert wanted.contains(version("typer"))


def test_the_model_half_never_names_torch_vllm_or_the_runtime() -> None:
    for path in (ROOT / "fp8plan" / "model").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            bad = [n for n in names if n.split(".")[0] in HEAVY or n.startswith("fp8plan.runtime")]
            assert not bad, f"{path.name}: {bad}"


def test_importing_fp8plan_loads_nothing_heavy() -> None:
    heavy = ("torch", "vllm", "sklearn", "scipy", "pandas", "pyarrow", "rich", "typer", "matplotlib", "plotly")
    code = f"import sys, fp8plan; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("use", "start"),
    [
        (lambda: parse_distribution("lengths.parquet", "response_length"), "response_length: reading lengths.parquet"),
        (lambda: next(iter(trl.requests(Path("completions_1.parquet"), str))), "reading completions_1.parquet"),
        (lambda: Publisher("folder", fp8=[], codec="zstd"), "the codec zstd"),
    ],
)
def test_the_extra_with_pyarrow_is_named_where_it_is_missing(
    use: Callable[[], object], start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lengths.parquet").touch()
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"^{start} needs pyarrow; type: pip install 'fp8plan\[parquet\]'$"):
        use()


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.name)
def test_workflows_may_only_read_and_pin_each_action_by_its_commit(path: Path) -> None:
    """A job's own permissions say more. A tag can be moved to another commit."""
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    used = [step["uses"] for step in steps if "uses" in step]
    assert used
    assert [action for action in used if not re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", action)] == []
    targets = [word for step in steps for word in re.findall(r"^make ([\w-]+)$", step.get("run", ""), re.M)]
    known = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert targets
    assert set(targets) <= known
