"""Trajectories that any program writes: a file STEP.jsonl for each rollout, with a line for each trajectory.

{"prompt": 900, "turns": [[300, 1200, 2.5], [150, 0, 0]]} has a prompt of 900 tokens and two turns. A turn has the
tokens that the engine generated, those that a tool or a user added then, and the seconds until the next request (null:
not known). Lines with an equal "prompt_id" share their prompt. Other keys are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from fp8plan.importers.logged import Measured, Note, Source, name_of, whole_lines
from fp8plan.model.distributions import MOST_SECONDS, MOST_TOKENS
from fp8plan.model.turn_table import Turn

Generated = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
Added = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
Seconds = Annotated[float, Meta(ge=0, le=MOST_SECONDS)]
LINE: Final = '{"prompt": TOKENS, "turns": [[GENERATED, TOOL, WAIT_S], ...]}'


class Trajectory(msgspec.Struct):
    """One line."""

    prompt: Generated
    turns: Annotated[list[tuple[Generated, Added, Seconds | None]], Meta(min_length=1)]
    prompt_id: Any = None


def requests(file: Path, note: Note) -> Iterator[Measured]:
    """Read the trajectories of a file, as `whole_lines` does."""
    for number, trajectory in whole_lines(file, Trajectory, note):
        *others, last = (Turn(*turn) for turn in trajectory.turns)
        own = number if trajectory.prompt_id is None else trajectory.prompt_id
        name = name_of(repr((trajectory.prompt_id is None, own)).encode())
        yield Measured(name, trajectory.prompt, (*others, Turn(last.generated, 0, 0.0)))


SOURCE = Source(
    re.compile(r"(\d+)\.jsonl"),
    f"a line {LINE} for each trajectory",
    requests,
    of_text=False,
)
