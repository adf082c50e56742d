"""The shape of the tree: imports, lazy and type-only ones included, walks, sizes, and the page that describes them."""

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
from tools import size, words

ROOT = Path(fp8plan.__file__).parent
MOST_LINES = 450  # of a module
SPARE = 0.02  # of a budget, beside the rounding to hundreds, may be left over before it is lowered
MOST = {  # hops between files on a walk of benchmarks/walks.py, and lines of the files that it enters
    "plan": {"hops": 166, "lines": 14_420},
    "tensor": {"hops": 28, "lines": 4815},
    "log-prob": {"hops": 22, "lines": 3975},
}

# What may import what: a part imports its own and what stands above it.
PARTS = tuple(
    f"fp8plan.{x}" for x in ("errors", "checks", "model", "importers", "runtime", "views", "integrations", "cli")
)
MODEL = (
    ("distributions", "turn_table", "workload_turns", "workload"),
    ("architecture", "configs", "hardware", "precision", "limits"),
    ("profile",),
    ("cost",),
    ("schedule",),
    ("rollout",),
    ("risk", "plan", "validate", "calibrate"),
)


WATCH = "fp8plan.runtime.watch"  # needs no other wing of the runtime: neither an engine nor vLLM
TOKENS = "fp8plan.runtime.tokens"  # checks of token ids, which both sides use


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
    folders = {name: parts[:2] for name, parts in inside.items() if len(parts) > 2}  # a wing and a folder in it
    graph: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for name, here in folders.items():
        graph.setdefault(here, set()).update({folders[other] for other in GRAPH[name] if other in folders} - {here})
    assert len(graph) > 10
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join("/".join(folder) for folder in error.args[1]))


def test_what_watches_names_neither_an_engine_nor_vllm() -> None:
    """Lazy and type-only imports count, too."""
    watch = {name for name in MODULES if watches(name)}
    assert len(watch) > 15
    others = {name for name in MODULES if below(name, "fp8plan.runtime")} - {"fp8plan.runtime", TOKENS} - watch
    assert len(others) > 50
    wrong = [
        f"{name} imports {other}"
        for name in watch
        for other in named(MODULES[name])
        if below(other, "vllm") or other in others
    ]
    assert not wrong


def watches(name: str) -> bool:
    return below(name, WATCH)


def named(path: Path) -> Iterator[str]:
    """Every module that this one imports anywhere in its text, and names in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def test_what_watches_runs_without_an_engine_and_vllm() -> None:
    """Their modules are imported, and a Monitor takes a step."""
    code = f"""
import importlib, sys, torch
for name in {list(filter(watches, MODULES))!r}:
    importlib.import_module(name)
import fp8plan
fp8plan.Monitor().step(-torch.rand(2, 8), -torch.rand(2, 8))
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT.parent)
    loaded = done.stdout.split()
    assert "vllm" not in loaded
    of_runtime = {name for name in loaded if name.startswith("fp8plan.runtime.")}
    assert {name for name in of_runtime if not watches(name)} == {TOKENS}


def test_a_module_is_read_in_one_sitting() -> None:
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert not [name for name, count in lines.items() if count > MOST_LINES]


@pytest.mark.vllm
def test_the_walk_of_a_tensor_is_short(tmp_path: Path) -> None:
    """Forked from a process that has imported vLLM."""
    import warm_processes

    code, said = warm_processes.output(walks.main, "--only", "tensor", log=tmp_path / "log")
    assert code == 0, said[-2000:]
    assert not longer("tensor", said)


@pytest.mark.parametrize("name", ["plan", "log-prob"])
def test_a_walk_is_short(name: str) -> None:
    command = [sys.executable, "-m", "benchmarks.walks", "--only", name]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT.parent).stdout
    assert not longer(name, output)


def longer(name: str, said: str) -> list[str]:
    """The measures of a walk that exceed their bound. said: what benchmarks/walks.py prints of it"""
    counts = {measure: int(count) for count, measure in re.findall(r"(\d+) (hops|lines)", said)}
    assert counts.keys() == MOST[name].keys()
    return [f"{counts[kind]} {kind}, at most {most}" for kind, most in MOST[name].items() if counts[kind] > most]


ARCHITECTURE = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("part", ["model", "runtime"])
def test_each_folder_of_the_package_has_a_row_in_the_architecture(part: str) -> None:
    """A row's first cell names folders, below fp8plan/."""
    rows = re.findall(r"^\| (`[^|]+`) \|", ARCHITECTURE, re.M)
    named = {folder for row in rows for folder in re.findall(r"`([\w/]+)`", row)}
    wings = {part, "runtime/watch", "runtime/apply"}  # have a heading each
    folders = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / part).rglob("*.py")} - wings
    assert len(folders) > 10
    assert sorted(folders - named) == []
    assert [folder for folder in named if folder.startswith(f"{part}/") and not (ROOT / folder).is_dir()] == []


def test_what_a_walk_calls_is_defined_in_the_file_that_it_names() -> None:
    """As in: `choose` in `model/plan/choice.py`."""
    pairs = re.findall(r"`([\w.]+)`\s+in\s+`([\w/]+\.py)`", ARCHITECTURE)
    assert len(pairs) > 30
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for _, file in pairs}
    wrong = [
        f"{name} in {file}"
        for name, file in pairs
        if not all(re.search(rf"^ *(async )?(def|class) {part}\b", texts[file], re.M) for part in name.split("."))
    ]
    assert wrong == []


def test_growth_has_a_row_in_the_budget() -> None:
    """The rows of CONTRIBUTING.md's budget add up to what the tree has, or to a little more."""
    page = (ROOT.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = page.partition("## Budget")[2].partition("\n## ")[0]
    lines = [line.strip("|") for line in table.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    heads, _, *budget = rows
    counted = {**size.counts(ROOT.parent), **words.counts()}
    assert heads[1:] == list(counted)
    wrong = []
    for column, name in enumerate(heads[1:], start=1):
        allowed = sum(int(row[column].replace(",", "") or 0) for row in budget)
        if counted[name] > allowed:
            wrong.append(f"{name}: {counted[name]:,}, budget {allowed:,}; add a row that says for what")
        if counted[name] < allowed * (1 - SPARE) - 100:
            wrong.append(f"{name}: {counted[name]:,}, budget {allowed:,}; lower its first row to what is there now")
    assert wrong == []
