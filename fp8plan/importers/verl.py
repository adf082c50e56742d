"""The rollouts that verl dumps into `trainer.rollout_data_dir`: a file STEP.jsonl per step.

Read in verl 0.9.1 and 0.10.0.dev (commit 1dda039b9, August 2026): `_write_generations` of `trainer/ppo/ray_trainer.py`
and of `trainer/ppo/v1/trainer_base.py`. A line is one response, {"input", "output", "gts", "score", "step", ...}. Both
texts are decoded without special tokens: a chat template's markers and the end of a response are not in them. A
response of several turns has tool output in it. A list "response_mask", 1 for each generated token, tells them apart.
verl does not write it by itself: a reward function can return it.
`trainer.validation_data_dir` has the same files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8plan.errors import ConfigError
from fp8plan.importers.logged import Note, Request, Source
from fp8plan.importers.turn_boundaries import masked
from fp8plan.jsonl import TORN, lines, torn_note


def requests(file: Path, note: Note) -> Iterator[Request]:
    """Read the requests of a file, without a last line that breaks off.

    Raises ConfigError for a line that is not one of verl's.
    """
    for number, row in lines(file, "rollout dump"):
        if row is TORN:
            note(torn_note(number, file))
            return
        prompt, response = (_text(row, name, number, file) for name in ("input", "output"))
        yield Request(prompt, response, masked(row.get("response_mask")))


def _text(row: Any, name: str, number: int, file: Path) -> str:
    value = row.get(name) if isinstance(row, dict) else None
    if not isinstance(value, str):
        raise ConfigError(f'line {number} of {file} has no text "{name}"; allowed: the lines that verl dumps')
    return value


SOURCE = Source(
    re.compile(r"(\d+)\.jsonl"),
    "trainer.rollout_data_dir=FOLDER",
    requests,
    seconds="timing_s/gen",
    mean_response="response_length/mean",
    mean_with_tools=True,
    inside="verl-stock",
)
