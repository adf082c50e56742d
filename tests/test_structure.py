"""The package's own imports, lazy and type-only ones included: they form no circle and no arrow runs back up."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import fp8plan
from benchmarks import walks

ROOT = Path(fp8plan.__file__).parent
MOST_LINES = 450  # of a module
LEAST_MEAN_LINES = 160  # of the modules, empty __init__.py aside
MOST_FILES = {"plan": 52, "log-prob": 17, "tensor": 21}  # that a walk of benchmarks/walks.py enters

# What may import what: a part imports its own and what stands above it.
PARTS = tuple(
    f"fp8plan.{x}" for x in ("errors", "checks", "model", "importers", "runtime", "integrations", "views", "cli")
)
MODEL = (
    ("architecture", "configs", "hardware", "precision", "limits", "workload"),
    ("profile",),
    ("cost",),
    ("schedule",),
    ("rollout",),
    ("risk", "plan", "validate", "calibrate"),
)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def imported(path: Path) -> Iterator[str]:
    """Modules of the package that this one imports anywhere in its text."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            assert node.level == 0, f"{path}: a relative import"
            inside = (f"{node.module}.{name.name}" for name in node.names)
            yield from (name if name in MODULES else node.module for name in inside)


GRAPH = {name: set(imported(path)) - {name} for name, path in MODULES.items()}


def below(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def level(name: str) -> int | None:
    """The number of a model's module in MODEL."""
    return next((i for i, names in enumerate(MODEL) for x in names if below(name, f"fp8plan.model.{x}")), None)


def test_there_is_something_to_look_at() -> None:
    assert len(GRAPH) > 100
    assert "fp8plan.model.cost.step" in GRAPH["fp8plan.model.rl_step"]  # lazy, or for types only, or neither


def test_imports_form_no_circle() -> None:
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_part_imports_a_later_one() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, others in GRAPH.items()
        for i, part in enumerate(PARTS)
        for other in others
        if below(name, part) and any(below(other, later) for later in PARTS[i + 1 :])
    ]
    assert not wrong


def test_nothing_in_the_model_runs_back_up() -> None:
    known = {name: level(name) for name in GRAPH}
    wrong = [
        f"{name} imports {other}"
        for name, others in GRAPH.items()
        for other in others
        if known[name] is not None and known[other] is not None and known[name] < known[other]
    ]
    assert not wrong


def test_folders_of_the_runtime_form_no_circle() -> None:
    runtime = ROOT / "runtime"
    inside = {name: path.relative_to(runtime).parts for name, path in MODULES.items() if runtime in path.parents}
    folders = {name: parts[0] for name, parts in inside.items() if len(parts) > 1}
    graph: dict[str, set[str]] = {}
    for name, here in folders.items():
        graph.setdefault(here, set()).update({folders[other] for other in GRAPH[name] if other in folders} - {here})
    assert len(graph) > 10
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_a_module_is_read_in_one_sitting() -> None:
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert not [name for name, count in lines.items() if count > MOST_LINES]
    counts = [count for count in lines.values() if count > 1]
    assert sum(counts) / len(counts) >= LEAST_MEAN_LINES


@pytest.mark.vllm
def test_the_walk_of_a_tensor_enters_few_files(tmp_path: Path) -> None:
    """Forked from a process that has imported vLLM."""
    import warm_processes

    code, said = warm_processes.output(walks.main, "--only", "tensor", log=tmp_path / "log")
    assert code == 0, said[-2000:]
    assert files_of(said) <= MOST_FILES["tensor"]


def files_of(said: str) -> int:
    """The number of files that benchmarks/walks.py prints for one walk."""
    (files,) = re.findall(r"(\d+) files", said)
    return int(files)


@pytest.mark.parametrize("name", ["plan", "log-prob"])
def test_a_walk_enters_few_files(name: str) -> None:
    command = [sys.executable, "-m", "benchmarks.walks", "--only", name]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT.parent).stdout
    assert files_of(output) <= MOST_FILES[name]
