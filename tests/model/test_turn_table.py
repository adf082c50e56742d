"""Tables of turns, and batches that have one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from turn_batches import batch_of, table

from fp8plan.model.turn_table import TurnTable
from fp8plan.model.workload import Batch

TURNS = table([(5, 20, 1.5), (7, 0, 0.0)], [(3, 0, 0.0)], [(1, 4, 0.1), (2, 0, 0.2), (9, 0, 0.0)])


def test_a_trajectory_is_as_long_as_its_turns() -> None:
    assert TURNS.added.tolist() == [32, 3, 16]
    assert TurnTable.single(np.zeros(0, dtype=np.int64)).added.tolist() == []


@pytest.mark.parametrize("rows", [slice(1, 3), np.array([2, 0]), np.array([True, False, True]), slice(0, 0)])
def test_a_part_of_the_trajectories_keeps_their_turns(rows: Any) -> None:
    part = TURNS.take(rows)
    for own, number in enumerate(np.arange(3)[rows]):
        mine, theirs = (slice(*each) for each in (part.first[own : own + 2], TURNS.first[number : number + 2]))
        for name in ("generated", "tool", "wait_s", "dropped"):
            assert getattr(part, name)[mine].tolist() == getattr(TURNS, name)[theirs].tolist()


def test_a_batch_splits_with_its_turns() -> None:
    batch = batch_of([100, 100, 90], [4, 4, 7], TURNS)
    assert batch.longest == 132
    first, second = batch.split(2)
    assert first.turns is not None
    assert second.turns is not None
    assert first.turns.generated.tolist() == [5, 7]
    assert second.turns.generated.tolist() == [3, 1, 2, 9]
    assert (second.prompts.tolist(), second.prompt_ids.tolist()) == ([100, 90], [0, 1])
    assert Batch(*batch[:3]).take([0]).turns is None


@pytest.mark.parametrize(
    ("tokens", "added"),
    [(1, [1, 1, 1]), (5, [5, 3, 1]), (6, [5, 3, 6]), (25, [5, 3, 16]), (26, [26, 3, 16]), (100, [32, 3, 16])],
)
def test_trajectories_stop_at_a_number_of_tokens(tokens: int, added: list[int]) -> None:
    """One that stops within a tool's tokens ends with the turn before."""
    stopped = TURNS.stopped_at(tokens)
    assert stopped.added.tolist() == added


def test_a_turn_that_reaches_the_number_is_the_last_though_its_reasoning_is_dropped() -> None:
    turns = TurnTable.of([[(300, 20, 1.0)] * 3])
    turns = turns._replace(dropped=np.array([250, 250, 0]))
    stopped = turns.stopped_at(350)
    assert stopped.generated.tolist() == [300, 280]
    assert turns.stopped_at(100).generated.tolist() == [100]
