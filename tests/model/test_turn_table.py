"""Tables of turns: what is refused, and batches that have one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from turn_batches import batch_of, table

from fp8plan.errors import ConfigError
from fp8plan.model.turn_table import TurnTable
from fp8plan.model.workload import Batch

TURNS = table([(5, 20, 1.5), (7, 0, 0.0)], [(3, 0, 0.0)], [(1, 4, 0.1), (2, 0, 0.2), (9, 0, 0.0)])


def test_a_sound_table_is_taken() -> None:
    TURNS.check(3)
    assert TURNS.added.tolist() == [32, 3, 16]


def test_no_trajectory_has_no_turn() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    TurnTable.single(nothing).check(0)
    assert TurnTable.single(nothing).added.tolist() == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tool": TURNS.tool[1:]}, r"tool of turns has shape \(5,\); allowed: that of generated, \(6,\)"),
        (
            {"first": TURNS.first[:-1]},
            r"first of turns is \[0, 2, 3\] for 3 trajectories and 6 turns; allowed: 0, then",
        ),
        ({"first": np.array([0, 2, 2, 6])}, r"first of turns is \[0, 2, 2, 6\]"),
        ({"first": np.array([1, 2, 3, 6])}, r"first of turns is \[1, 2, 3, 6\]"),
        ({"first": np.array([0, 2, 3, 5])}, r"first of turns is \[0, 2, 3, 5\]"),
        ({"generated": np.array([5, 7, 3, 1, 0, 9])}, r"generated of turn 1 of trajectory 2 is 0; allowed: at least 1"),
        ({"tool": np.array([-1, 0, 0, 4, 0, 0])}, r"tool of turn 0 of trajectory 0 is -1; allowed: at least 0 tokens"),
        ({"tool": np.array([20, 0, 6, 4, 0, 0])}, r"tool of turn 0 of trajectory 1 is 6; allowed: 0 after the last"),
        (
            {"wait_s": np.array([np.nan, 0, 0, 0, 0, 0])},
            "the log does not say how long the tools took; give the seconds",
        ),
        ({"wait_s": np.array([1, 0, 0, 0, -2.5, 0])}, r"wait_s of turn 1 of trajectory 2 is -2.5; allowed: finite"),
        ({"wait_s": np.array([1, 0, 0, 0, 0, 1.0])}, r"wait_s of turn 2 of trajectory 2 is 1.0; allowed: 0 after"),
        (
            {"dropped": np.array([6, 0, 0, 0, 0, 0])},
            r"dropped of turn 0 of trajectory 0 is 6; allowed: at least 0, at most the",
        ),
        ({"dropped": np.array([0, 1, 0, 0, 0, 0])}, r"dropped of turn 1 of trajectory 0 is 1; allowed: 0 after the l"),
    ],
)
def test_a_malformed_table_is_one_error(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TURNS._replace(**changed).check(3)


@pytest.mark.parametrize("rows", [slice(1, 3), np.array([2, 0]), np.array([True, False, True]), slice(0, 0)])
def test_a_part_of_the_trajectories_keeps_their_turns(rows: Any) -> None:
    part = TURNS.take(rows)
    part.check(len(np.arange(3)[rows]))
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
    stopped.check(len(added))
    assert stopped.added.tolist() == added


def test_a_turn_that_reaches_the_number_is_the_last_though_its_reasoning_is_dropped() -> None:
    turns = TurnTable.of([[(300, 20, 1.0)] * 3])
    turns = turns._replace(dropped=np.array([250, 250, 0]))
    stopped = turns.stopped_at(350)
    stopped.check(1)
    assert stopped.generated.tolist() == [300, 280]
    assert turns.stopped_at(100).generated.tolist() == [100]
