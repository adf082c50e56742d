"""Rollouts of several turns: what each turn generates, what a tool adds after it, and how long the tool takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


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
    wait_s:    seconds from the end of the turn to the arrival of the next turn's request, float64; 0 after the last
    dropped:   first tokens of the turn's answer that the next prompt leaves out, as a chat template that drops
               reasoning does; 0 after the last
    """

    first: IntArray
    generated: IntArray
    tool: IntArray
    wait_s: FloatArray
    dropped: IntArray

    @classmethod
    def of(cls, trajectories: Iterable[Sequence[tuple[int, int, float | None]]]) -> TurnTable:
        """The turns of trajectories, each (generated, tool, wait_s) as in Turn. A wait that is not known becomes NaN.

        Nothing counts after the last turn of a trajectory.
        """
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
        for column in after[2:]:
            column[self.first[1:] - 1] = 0
        return after

    @property
    def responses(self) -> IntArray:
        """Tokens that the turns of each trajectory generate, int64 of shape (trajectories,)."""
        return self._sums(self.generated)

    @property
    def peaks(self) -> IntArray:
        """Tokens behind the prompt at the end of each trajectory's longest turn, int64 of shape (trajectories,).

        Drops make an earlier turn longer than the last one.
        """
        kept = self.generated + self.tool - self.dropped
        before = np.cumsum(kept) - kept
        of_trajectory = np.repeat(before[self.first[:-1]], np.diff(self.first))
        peaks: IntArray = np.maximum.reduceat(before - of_trajectory + self.generated, self.first[:-1])
        return peaks

    def take(self, rows: Any) -> TurnTable:
        """The turns of some trajectories, in their order. rows: an index of numpy's"""
        starts, counts = self.first[:-1][rows], np.diff(self.first)[rows]
        first = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        turns = np.repeat(starts - first[:-1], counts) + np.arange(first[-1])
        return TurnTable(first, *(column[turns] for column in self[1:]))

    def _sums(self, column: IntArray) -> IntArray:
        """The sum over each trajectory's turns."""
        before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(column)])
        sums: IntArray = np.diff(before[self.first])
        return sums
