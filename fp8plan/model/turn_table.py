"""A table of turns: the tokens that each generates, those that a tool adds after it, and the tool's seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
NO_WAITS: Final = "the log does not say how long the tools took"


class Turn(NamedTuple):
    """One turn of a trajectory, as records and logs have it.

    generated: tokens that the engine generates, at least 1
    tool:      tokens that a tool or a user adds after it
    wait_s:    seconds from the end of the turn to the next turn's request; None: not known
    """

    generated: int
    tool: int = 0
    wait_s: float | None = None


class TurnTable(NamedTuple):
    """The turns of trajectories, one trajectory after another.

    first:     the first turn of each trajectory, and the number of turns; int64 of shape (trajectories + 1,)
    generated: tokens that each turn generates, at least 1; int64 of shape (turns,), like those below
    tool:      tokens that a tool adds after the turn; 0 after the last turn of a trajectory
    wait_s:    seconds from the end of the turn to the arrival of the next turn's request, float64; 0 after the last;
               NaN where a log does not have them
    dropped:   first tokens of the turn's answer that the next prompt leaves out, as a chat template that drops
               reasoning does; 0 after the last
    concurrent: most trajectories at once; the next one begins when one ends. None: all begin at the start
    """

    first: IntArray
    generated: IntArray
    tool: IntArray
    wait_s: FloatArray
    dropped: IntArray
    concurrent: int | None = None

    @classmethod
    def single(cls, responses: IntArray) -> TurnTable:
        """One turn for each trajectory. responses: tokens that it generates, int64 of shape (trajectories,)"""
        nothing = np.zeros_like(responses)
        return cls(np.arange(len(responses) + 1), responses, nothing, np.zeros(len(responses)), nothing)

    @classmethod
    def of(cls, trajectories: Iterable[Sequence[tuple[int, int, float | None]]]) -> TurnTable:
        """The turns of trajectories, each (generated, tool, wait_s) as in Turn. Nothing counts after a last turn."""
        sizes, generated, tool, wait_s = [0], list[int](), list[int](), list[float]()
        for turns in trajectories:
            sizes.append(len(turns))
            for turn in turns:
                generated.append(turn[0])
                tool.append(turn[1])
                wait_s.append(math.nan if turn[2] is None else turn[2])
        first = np.cumsum(sizes, dtype=np.int64)
        tokens, added, seconds = np.array(generated, np.int64), np.array(tool, np.int64), np.array(wait_s, np.float64)
        return cls(first, tokens, added, seconds, np.zeros_like(tokens)).ended()

    def ended(self) -> TurnTable:
        """The table with zeros after the last turn of each trajectory."""
        after = self._replace(tool=self.tool.copy(), wait_s=self.wait_s.copy(), dropped=self.dropped.copy())
        for name, column in after._columns():
            if name != "generated":
                column[self.first[1:] - 1] = 0
        return after

    @property
    def responses(self) -> IntArray:
        """Tokens that the turns of each trajectory generate, int64 of shape (trajectories,)."""
        before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.generated)])
        sums: IntArray = np.diff(before[self.first])
        return sums

    @property
    def has_waits(self) -> bool:
        """True if the seconds of all waits are known."""
        return not np.isnan(self.wait_s).any()

    @property
    def added(self) -> IntArray:
        """Tokens after each trajectory's prompt, at the turn where they are most, int64 of shape (trajectories,).

        With drops an earlier turn may be longer than the last one.
        """
        added: IntArray = np.maximum.reduceat(self._before() + self.generated, self.first[:-1])
        return added

    def stopped_at(self, tokens: int) -> TurnTable:
        """The turns of trajectories that stop at so many tokens after their prompts, those of tools among them.

        Each generates at least one token.
        """
        before = self._before()
        reached = before + self.generated >= tokens
        earlier: IntArray = np.cumsum(reached) - reached
        begun = (before < tokens) & (earlier == np.repeat(earlier[self.first[:-1]], np.diff(self.first)))
        begun[self.first[:-1]] = True
        counts = np.add.reduceat(begun, self.first[:-1], dtype=np.int64)
        generated = np.minimum(self.generated, np.maximum(tokens - before, 1))
        columns: dict[str, Any] = {name: column[begun] for name, column in self._columns()}
        columns |= {"first": np.append(0, np.cumsum(counts)), "generated": generated[begun]}
        return self._replace(**columns).ended()

    def take(self, rows: Any) -> TurnTable:
        """The turns of some trajectories, in their order. rows: an index of numpy's"""
        starts, counts = self.first[:-1][rows], np.diff(self.first)[rows]
        first = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        turns = np.repeat(starts - first[:-1], counts) + np.arange(first[-1])
        return self._replace(first=first, **{name: column[turns] for name, column in self._columns()})

    def beside(self, other: TurnTable) -> TurnTable:
        """The trajectories of both tables, with as many at once as in this one."""
        joined: dict[str, Any] = {name: np.append(column, getattr(other, name)) for name, column in self._columns()}
        return self._replace(first=np.append(self.first, self.first[-1] + other.first[1:]), **joined)

    def _before(self) -> IntArray:
        """Tokens after the trajectory's prompt when each turn begins, int64 of shape (turns,)."""
        kept = self.generated + self.tool - self.dropped
        every = np.cumsum(kept) - kept
        before: IntArray = every - np.repeat(every[self.first[:-1]], np.diff(self.first))
        return before

    def _columns(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """The columns of shape (turns,) by name."""
        for name in ("generated", "tool", "wait_s", "dropped"):
            yield name, getattr(self, name)
