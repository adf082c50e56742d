"""README says what the code and the committed measurements say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import readme  # noqa: E402

from fp8plan.model.records import read_records  # noqa: E402
from fp8plan.model.validate import validate  # noqa: E402


def test_the_tables_are_the_ones_that_make_readme_writes() -> None:
    text = (ROOT / "README.md").read_text()
    made = readme.blocks()
    assert set(re.findall(r"<!-- begin ([\w ]+) -->", text)) == set(made)
    assert readme.filled(text, made) == text, "README is out of date; type: make readme"


def test_every_file_that_readme_links_to_is_there() -> None:
    text = (ROOT / "README.md").read_text()
    linked = [path for path in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in path]
    assert linked
    assert [path for path in linked if not (ROOT / path).exists()] == []


def run(example: str, *words: str) -> str:
    """Its stdout. stderr is empty: what an engine writes while it starts is held back."""
    done = subprocess.run(
        [sys.executable, f"examples/{example}", *words], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_example_of_choosing_runs() -> None:
    assert "fp8_block+fp8_kv" in run("choose_precision.py")


@pytest.mark.vllm
def test_the_example_of_applying_prints_what_readme_says_it_prints() -> None:
    steps = run("apply_to_vllm.py").splitlines()
    said = (ROOT / "examples" / "apply_to_vllm.txt").read_text().splitlines()
    without_seconds = [[re.sub(r"in [\d.]+ s", "", line) for line in lines] for lines in (steps, said)]
    assert without_seconds[0] == without_seconds[1]


@pytest.mark.vllm
def test_the_example_of_grpo_learns_and_its_run_can_be_read(tmp_path: Path) -> None:
    run_file = tmp_path / "run.jsonl"
    steps = run("grpo_loop.py", str(run_file)).splitlines()
    assert all(line.startswith("step ") for line in steps)
    rewards = [float(re.findall(r"reward ([\d.]+)", line)[0]) for line in steps]
    assert 0.45 < rewards[0] < 0.55
    assert rewards[-1] > 0.8
    rows = [json.loads(line) for line in run_file.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(steps) + 1))
    assert all(0 < row["metrics"]["rollout_corr/k3_kl"] < 0.01 for row in rows)
    assert all(row["precision"] == "fp8_kv" and row["guard"]["verdict"] for row in rows)
    assert not any(row["guard"]["verdict"]["cold"] for row in rows[1:])
    assert "too slow" not in rows[0]["guard"]["verdict"]["reason"]
    assert len(validate(read_records(run_file)).records) == len(rows)


def test_every_example_has_its_test() -> None:
    tested = {"choose_precision.py", "apply_to_vllm.py", "grpo_loop.py"}
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == tested
