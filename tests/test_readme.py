"""README says what the code and the committed measurements say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import readme  # noqa: E402


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


def run(example: str) -> str:
    done = subprocess.run(
        [sys.executable, f"examples/{example}"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_of_choosing_runs() -> None:
    assert "fp8_block+fp8_kv" in run("choose_precision.py")


@pytest.mark.vllm
def test_the_example_of_applying_prints_what_readme_says_it_prints() -> None:
    steps = [line for line in run("apply_to_vllm.py").splitlines() if line.startswith("step ")]
    said = (ROOT / "examples" / "apply_to_vllm.txt").read_text().splitlines()
    without_seconds = [[re.sub(r"in [\d.]+ s", "", line) for line in lines] for lines in (steps, said)]
    assert without_seconds[0] == without_seconds[1]


def test_every_example_has_its_test() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {"choose_precision.py", "apply_to_vllm.py"}
