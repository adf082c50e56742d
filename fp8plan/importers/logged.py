"""One rollout in a trainer's log: the text of its prompts and responses, or their numbers of tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from fp8plan.errors import ConfigError
from fp8plan.jsonl import TORN, lines, torn_note
from fp8plan.model.turn_table import Turn
from fp8plan.schemas import checked

Line = TypeVar("Line")

Note = Callable[[str], object]  # called with a remark on the log
Text: TypeAlias = str | list[dict[str, Any]]  # plain, or the messages of a conversation


class Masked(NamedTuple):
    """A response by its mask.

    before: tokens before the first generated one, which belong to the prompt
    turns:  its turns, whose waits are not known
    """

    before: int
    turns: tuple[Turn, ...]


class Request(NamedTuple):
    """One response and its prompt, as text.

    masked: its turns, if the log has a mask of them
    """

    prompt: Text
    response: Text
    masked: Masked | None = None


class Measured(NamedTuple):
    """One response and its prompt in tokens.

    prompt:  its name, equal for equal prompts
    turns:   of the response
    unclear: the log does not tell generated tokens from those of tools, and all are in one turn
    """

    prompt: bytes
    prompt_tokens: int
    turns: tuple[Turn, ...]
    unclear: bool = False


Rollout: TypeAlias = Iterator[Request] | Iterator[Measured]


class Tally(NamedTuple):
    """Numbers of responses and tokens.

    several:       responses with several turns
    unclear:       responses whose turns are not known
    generated:     tokens that the model generated
    tools:         tokens that tools and users added
    unknown_waits: waits for tools whose seconds the log lacks
    """

    responses: int = 0
    several: int = 0
    unclear: int = 0
    generated: int = 0
    tools: int = 0
    unknown_waits: int = 0

    def plus(self, other: Tally) -> Tally:
        return Tally(*map(sum, zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class Logged:
    """One rollout in a log, which is not read yet.

    step:   the training step
    path:   its file
    before: the file of the step before, which it may repeat; None: there is none
    """

    step: int
    path: Path
    before: Path | None = None


@dataclass(frozen=True, slots=True)
class Counted:
    """One rollout in tokens, one entry per request, prompt by prompt.

    prompt_ids: 0, 0, .., 1, 1, ..: equal for equal prompts
    turns:      of each response
    unclear:    the number of responses whose turns are not known
    """

    step: int
    prompt_lengths: list[int]
    prompt_ids: list[int]
    turns: list[tuple[Turn, ...]]
    unclear: int = 0

    @property
    def response_lengths(self) -> list[int]:
        """Tokens that the model generated in each response."""
        return [sum(turn.generated for turn in turns) for turns in self.turns]

    @property
    def tally(self) -> Tally:
        """Its numbers of responses and tokens."""
        every = [turn for turns in self.turns for turn in turns]
        return Tally(
            responses=len(self.turns),
            several=sum(1 for turns in self.turns if len(turns) > 1),
            unclear=self.unclear,
            generated=sum(turn.generated for turn in every),
            tools=sum(turn.tool for turn in every),
            unknown_waits=sum(1 for turn in every if turn.wait_s is None),
        )


@dataclass(frozen=True, slots=True)
class Source:
    """One trainer's log.

    name:     pattern of a rollout's file, with its step
    folder:   the files may be in this subfolder
    switch:   the trainer's setting that writes them
    requests: reads one file, request by request: it may be larger than the memory
    of_text:  requests are text, which needs a tokenizer
    special_tokens: the trainer's tokenizer adds its special tokens (BOS) to plain prompts
    repeats:  true if a rollout is the one in the file before; None: it never is
    seconds, mean_response: names of its figures: seconds of generation, mean tokens of a response; None: not logged
    mean_with_tools: the mean counts tool output, too
    inside:   the program that called the engine, one of fp8plan.model.cost.front.INSIDE; None: a loop of its own
    overwritten: a figure that marks the steps whose logged rollout is an evaluation's; None: there are none
    """

    name: re.Pattern[str]
    switch: str
    requests: Callable[[Path, Note], Rollout]
    folder: str = ""
    of_text: bool = True
    special_tokens: bool = False
    repeats: Callable[[Path, Path], bool] | None = None
    seconds: str | None = None
    mean_response: str | None = None
    mean_with_tools: bool = False
    overwritten: str | None = None
    inside: str | None = None

    def rollouts(self, folder: Path) -> list[Logged]:
        """Find the rollouts of a folder by step, without reading them. Raises ConfigError for a folder without any."""
        inside = folder / self.folder
        paths = (inside if inside.is_dir() else folder).iterdir()
        by_step = {int(name[1]): path for path in paths if (name := self.name.fullmatch(path.name))}
        if not by_step:
            example = self.name.pattern.replace("(\\d+)", "STEP").replace("\\", "")
            raise ConfigError(f"{folder} has no file {example}; let the trainer write them there: {self.switch}")
        steps = sorted(by_step)
        return [
            Logged(step, by_step[step], by_step.get(before)) for before, step in zip([-1, *steps], steps, strict=False)
        ]


def whole_lines(file: Path, kind: type[Line], note: Note) -> Iterator[tuple[int, Line]]:
    """Yield (number, line) of a log of JSON lines, without a last line that breaks off.

    Raises ConfigError, naming the line, for one that is not of that kind.
    """
    for number, row in lines(file, "log of rollouts"):
        if row is TORN:
            note(torn_note(number, file))
            return
        yield number, checked(row, kind, f"line {number} of {file}")


def name_of(prompt: bytes) -> bytes:
    """A short name of a prompt, which stays in memory in its place."""
    return blake2b(prompt, digest_size=16).digest()


def without_waits(turns: Iterable[tuple[int, int]]) -> tuple[Turn, ...]:
    """Turns of (generated, tool) tokens whose waits are not known. An empty answer counts as one token, its end.

    After the last turn there is neither a tool nor a wait.
    """
    *others, last = (Turn(max(1, generated), tool, None) for generated, tool in turns)
    return (*others, Turn(last.generated, 0, 0.0))


def counted(step: int, requests: Iterable[Measured]) -> Counted:
    """Sort requests by prompt, in order of first appearance."""
    ids: dict[bytes, int] = {}
    rows = [(ids.setdefault(x.prompt, len(ids)), max(1, x.prompt_tokens), x.turns, x.unclear) for x in requests]
    rows.sort(key=lambda row: row[0])
    numbers, prompts, turns = [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]
    return Counted(step, prompts, numbers, turns, sum(row[3] for row in rows))
