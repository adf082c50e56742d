"""README says what the code and the committed measurements say."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import readme  # noqa: E402

from fp8plan.model.validate.records import read_records  # noqa: E402
from fp8plan.model.validate.validate import validate  # noqa: E402


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


# What a command of README needs beside a checkout: a machine, an extra or a run of the user's own.
NEEDS = ("--gpu auto", "fp8plan calibrate", "fp8plan probe", "import-aic", "run.jsonl", "MODEL")


def readme_commands() -> list[str]:
    """Every fp8plan command that README shows with its arguments, in a block or in a sentence."""
    text = (ROOT / "README.md").read_text()
    block = re.compile(r"^```\w*\n(.*?)^```$", re.S | re.M)
    lines = "".join(block.findall(text)).replace("\\\n", " ").splitlines()
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", block.sub("", text))]
    return [line for line in lines if line.startswith("fp8plan ")] + [
        code for code in inline if re.match(r"fp8plan \w+ \S", code)
    ]


@pytest.mark.slow
def test_the_commands_run_as_they_are_pasted(tmp_path: Path) -> None:
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    (tmp_path / "fp8plan").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m fp8plan "$@"\n')
    (tmp_path / "fp8plan").chmod(0o755)
    path = os.environ | {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    commands = [command for command in readme_commands() if not any(need in command for need in NEEDS)]
    assert len(commands) >= 9
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=path, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
    assert {"plan.json", "verl.args", "plan.html"} <= {path.name for path in tmp_path.iterdir()}


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
