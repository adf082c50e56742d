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


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_examples_run(example: str) -> None:
    done = subprocess.run([sys.executable, f"examples/{example}"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "fp8_block+fp8_kv" in done.stdout
