"""Sequences that a later prompt begins with, beside a plain search."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.runtime.apply.engine import prefixes
from fp8plan.runtime.apply.engine.prefixes import Hashed, Prefixes

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=12)


@given(SEQUENCES, st.lists(st.integers(0, 2), max_size=20), st.integers(1, 5), st.integers(0, 9))
def test_the_longest_prefix_is_that_of_a_plain_search(
    known: list[list[int]], sequence: list[int], chunk: int, first: int
) -> None:
    """Also of sequences that went on after their first tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "CHUNK", chunk)
        memory = Prefixes[list[int]]()
        for each in known:
            memory.at(Hashed(each[:first]).followed_by(each[first:])).append(each)
        longest = max((each for each in known if sequence[: len(each)] == each), key=len, default=None)
        values = memory.beginning(Hashed(sequence))
    assert values == ([] if longest is None else [longest] * known.count(longest))


def test_values_that_are_taken_away_leave_the_shorter_prefix() -> None:
    memory = Prefixes[str]()
    memory.at(Hashed([1] * 300)).append("long")
    memory.at(Hashed([1] * 280)).append("short")
    memory.at(Hashed([1] * 280)).append("second")
    assert memory.beginning(Hashed([1] * 400)) == ["long"]
    memory.at(Hashed([1] * 300)).clear()
    assert memory.beginning(Hashed([1] * 400)) == ["short", "second"]
    memory.keep(lambda value: value == "second")
    assert memory.beginning(Hashed([1] * 400)) == ["second"]
    memory.at(Hashed([2]))
    assert len(memory) == 2
    memory.forget_oldest()
    assert memory.beginning(Hashed([1] * 400)) == []


def test_forgotten_sequences_take_no_memory() -> None:
    memory = Prefixes[str]()
    for sequence in ([1] * 300, [1] * 301, [2] * 300):
        memory.at(Hashed(sequence)).append("value")
    memory.keep(lambda value: False)
    assert pickle.dumps(memory) == pickle.dumps(Prefixes[str]())
