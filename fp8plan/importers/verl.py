"""The rollouts that verl dumps into `trainer.rollout_data_dir`: a file STEP.jsonl per step.

Read in verl 0.9.1 and 0.10.0.dev (commit 1dda039b9, August 2026): `_write_generations` of `trainer/ppo/ray_trainer.py`
and of `trainer/ppo/v1/trainer_base.py`. A line is one response, {"input", "output", "gts", "score", "step", ...}. Both
texts are decoded without special tokens: a chat template's markers and the end of a response are not in them. A
response of several turns has tool output in it. A list "response_mask", 1 for each generated token, tells them apart.
verl does not write it by itself: `ray_trainer.py` writes what a reward function returns, `v1` only the texts.
`trainer.validation_data_dir` has the same files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from fp8plan.importers.logged import Note, Request, Source, whole_lines
from fp8plan.importers.turn_boundaries import masked


class Line(msgspec.Struct):
    """One response."""

    input: str
    output: str
    response_mask: Any = None


def requests(file: Path, note: Note) -> Iterator[Request]:
    """Read the requests of a file, as `whole_lines` does."""
    for _, line in whole_lines(file, Line, note):
        yield Request(line.input, line.output, masked(line.response_mask))


SOURCE = Source(
    re.compile(r"(\d+)\.jsonl"),
    "trainer.rollout_data_dir=FOLDER",
    requests,
    seconds="timing_s/gen",
    mean_response="response_length/mean",
    mean_with_tools=True,
    inside="verl-stock",
)
