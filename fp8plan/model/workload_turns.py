"""The turns of a workload's trajectories: as a user describes them, or as they were logged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray

from fp8plan.checks import is_number, whole
from fp8plan.errors import ConfigError
from fp8plan.model.distributions import (
    ADDED,
    LENGTHS,
    SECONDS,
    TURNS,
    Distribution,
    Quantity,
    distribution_of,
    parse_distribution,
)
from fp8plan.model.turn_table import NO_WAITS, TurnTable
from fp8plan.options import TURNS as PANEL
from fp8plan.options import Option, group_of

# Field of Turns -> its quantity.
QUANTITIES: Final[dict[str, Quantity]] = {
    "turns": TURNS, "turn_tokens": LENGTHS, "tool_tokens": ADDED, "tool_s": SECONDS,
}  # fmt: skip
NEEDED: Final = "none: needed with --turns above 1"
WAITS: Final = "lognormal:mean=2,sigma=1,max=60"  # an example


@dataclass(frozen=True, slots=True, init=False)
class Turns:
    """Trajectories whose turns are drawn: an engine generates, a tool answers, and the engine goes on with all of it.

    turns:           number of turns in each trajectory
    turn_tokens:     tokens that the engine generates in a turn
    tool_tokens:     tokens that a tool, or a user, adds between two turns
    tool_s:          seconds from the end of a turn to the next request
    concurrent:      trajectories that run at once; None: all of them
    reasoning_share: share of each answer that the chat template drops from the next prompts, from the start of it. Each
                     turn loses its own once, before the next turn, as in Qwen3's template if a user's message follows
                     each turn. Between the tool calls of one message that template drops nothing

    Each of the first four is a number for all, Fixed, LogNormal or Trace.
    """

    turns: Annotated[Distribution, Option(PANEL, "number of turns, as lengths", "one", kind=str)]
    turn_tokens: Annotated[
        Distribution, Option(PANEL, "generated in a turn, as lengths", "none: needed with --turns", kind=str)
    ]
    tool_tokens: Annotated[Distribution, Option(PANEL, "that a tool adds between turns", NEEDED, kind=str)]
    tool_s: Annotated[
        Distribution, Option(PANEL, f"seconds that a tool takes: 2 or {WAITS}; also of a --workload", NEEDED, kind=str)
    ]
    concurrent: Annotated[
        int | None, Option(PANEL, "trajectories that run at once; also of a --workload", "all of them")
    ]
    reasoning_share: Annotated[
        float, Option(PANEL, "share of each answer that the chat template drops from later prompts", "0")
    ]

    def __init__(
        self,
        turns: Distribution | int,
        turn_tokens: Distribution | int,
        tool_tokens: Distribution | int,
        tool_s: Distribution | float,
        concurrent: int | None = None,
        reasoning_share: float = 0.0,
    ) -> None:
        """Raises ConfigError for a number that its quantity does not have."""
        described = {"turns": turns, "turn_tokens": turn_tokens, "tool_tokens": tool_tokens, "tool_s": tool_s}
        for name, value in described.items():
            object.__setattr__(self, name, distribution_of(name, value, QUANTITIES[name]))
        object.__setattr__(self, "concurrent", _concurrent(concurrent))
        object.__setattr__(self, "reasoning_share", _share(reasoning_share))

    @property
    def most_turns(self) -> int:
        """Turns of the longest trajectory that can be drawn."""
        return int(self.turns.largest)

    @property
    def shorten(self) -> str:
        """Advice for trajectories that are too long."""
        return "lower --turns, or shorten --prompt-lengths, --turn-tokens and --tool-tokens (in Python the workload's)"

    def describe(self) -> dict[str, Any]:
        described = {name: getattr(self, name).describe(quantity.unit) for name, quantity in QUANTITIES.items()}
        return described | {"concurrent": self.concurrent, "reasoning_share": self.reasoning_share}

    def draw(self, count: int, rng: np.random.Generator) -> TurnTable:
        """The turns of `count` trajectories, independent of each other."""
        first = np.append(0, np.cumsum(self.turns.draw(count, rng, TURNS)))
        turns = int(first[-1])
        generated = self.turn_tokens.draw(turns, rng, LENGTHS)
        tool = self.tool_tokens.draw(turns, rng, ADDED)
        wait_s = self.tool_s.draw(turns, rng, SECONDS)
        dropped = _dropped(generated, self.reasoning_share)
        return TurnTable(first, generated, tool, wait_s, dropped, self.concurrent).ended()


@dataclass(frozen=True, slots=True, eq=False)
class LoggedTurns:
    """Trajectories that were observed, each with all its turns: used in order if `count` equals their number, else
    drawn with replacement. Equal only to itself.

    table:   the trajectories, without dropped tokens
    source:  the file and line that they are from
    tool_s:  seconds of the waits that the log does not have; None: it has all
    concurrent, reasoning_share: as in Turns; concurrent=None: as in the table

    Raises ConfigError if waits are unknown without tool_s, or all known with it.
    """

    table: TurnTable
    source: str
    tool_s: Distribution | float | None = None
    concurrent: int | None = None
    reasoning_share: float = 0.0

    def __post_init__(self) -> None:
        at_once = self.table.concurrent if self.concurrent is None else self.concurrent
        object.__setattr__(self, "concurrent", _concurrent(at_once))
        object.__setattr__(self, "reasoning_share", _share(self.reasoning_share))
        if self.tool_s is None and not self.table.has_waits:
            raise ConfigError(f"{NO_WAITS}; give --tool-s {WAITS} (tool_s)")
        if self.tool_s is None:
            return
        if self.table.has_waits:
            raise ConfigError("tool_s (--tool-s) is given, and the log says how long each tool took; leave it out")
        object.__setattr__(self, "tool_s", distribution_of("tool_s", self.tool_s, SECONDS))

    @property
    def most_turns(self) -> int:
        return int(np.diff(self.table.first).max())

    @property
    def shorten(self) -> str:
        """Advice for trajectories that are too long."""
        return "give a --workload of shorter trajectories"

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = {"kind": "trace", "source": self.source, "rows": len(self.table.first) - 1}
        if isinstance(self.tool_s, Distribution):
            described["tool_s"] = self.tool_s.describe(SECONDS.unit)
        return described | {"concurrent": self.concurrent, "reasoning_share": self.reasoning_share}

    def draw(self, count: int, rng: np.random.Generator) -> TurnTable:
        table, trajectories = self.table, len(self.table.first) - 1
        if count != trajectories:
            table = table.take(rng.integers(trajectories, size=count))
        wait_s, unknown = table.wait_s.copy(), np.isnan(table.wait_s)
        if isinstance(self.tool_s, Distribution):
            wait_s[unknown] = self.tool_s.draw(int(unknown.sum()), rng, SECONDS)
        dropped = _dropped(table.generated, self.reasoning_share)
        return table._replace(wait_s=wait_s, dropped=dropped, concurrent=self.concurrent).ended()


TURN_OPTIONS: Final = group_of(Turns)


def parse_turns(typed: Mapping[str, Any]) -> Turns:
    """The trajectories that the command line describes. typed: field of Turns -> the value of its option

    Raises ConfigError for options that are missing, and as `parse_distribution` and Turns do.
    """
    words = dict(typed)
    if "turns" in words and parse_distribution(words["turns"], "turns", TURNS).largest == 1:
        words = {"tool_tokens": "0", "tool_s": "0"} | words  # a single turn has no tool after it
    missing = [f"--{name.replace('_', '-')}" for name in QUANTITIES if name not in words]
    if missing:
        raise ConfigError(
            f"turns need {', '.join(missing)}, too; type: --turns 8 --turn-tokens 400 --tool-tokens "
            f"lognormal:mean=600,sigma=1,max=4000 --tool-s {WAITS}"
        )
    parsed = {name: parse_distribution(words[name], name, quantity) for name, quantity in QUANTITIES.items()}
    return Turns(**words | parsed)


def _concurrent(value: Any) -> int | None:
    return None if value is None else whole("concurrent", value, otherwise=", or None for all trajectories")


def _share(value: Any) -> float:
    if not is_number(value) or not 0 <= value < 1:
        raise ConfigError(f"reasoning_share is {value!r}; allowed: a share of each answer, from 0 to below 1")
    return float(value)


def _dropped(generated: NDArray[np.int64], share: float) -> NDArray[np.int64]:
    """The first tokens of each answer that later prompts leave out. At least one token stays."""
    dropped: NDArray[np.int64] = np.minimum(np.rint(share * generated), generated - 1).astype(np.int64)
    return dropped
