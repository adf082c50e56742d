"""The rollouts that verl dumps into `trainer.rollout_data_dir`: a file STEP.jsonl per step.

Read in verl 0.9.1 and 0.10.0.dev (commit 1dda039b9, August 2026): `_write_generations` of `trainer/ppo/ray_trainer.py`
and of `trainer/ppo/v1/trainer_base.py`. A line is one response, {"input", "output", "gts", "score", "step", ...}. Both
texts are decoded without special tokens: a chat template's markers and the end of a response are not in them.
`trainer.validation_data_dir` has the same files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp8plan.errors import ConfigError
from fp8plan.importers.logged import Source, Texts
from fp8plan.jsonl import read


def rollouts(folder: Path) -> list[Texts]:
    """Read the rollouts of a folder, by step. Raises ConfigError for a folder without any, and for a line that is not
    one of verl's.
    """
    files = {int(path.stem): path for path in folder.glob("*.jsonl") if path.stem.isdecimal()}
    if not files:
        raise ConfigError(
            f"{folder} has no file STEP.jsonl, such as 1.jsonl; give the folder that verl wrote, and run verl with "
            "trainer.rollout_data_dir=FOLDER"
        )
    return [_rollout(step, files[step]) for step in sorted(files)]


def _rollout(step: int, file: Path) -> Texts:
    lines = read(file, "rollout dump").rows
    if not lines:
        raise ConfigError(f"{file} has no lines; delete it")
    prompts, responses = ([_text(row, name, number, file) for number, row in lines] for name in ("input", "output"))
    return Texts(step, prompts, responses)


def _text(row: Any, name: str, number: int, file: Path) -> str:
    value = row.get(name) if isinstance(row, dict) else None
    if not isinstance(value, str):
        raise ConfigError(f'line {number} of {file} has no text "{name}"; allowed: the lines that verl dumps')
    return value


SOURCE = Source(rollouts, seconds="timing_s/gen", mean_response="response_length/mean")
