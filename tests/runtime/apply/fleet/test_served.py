"""What replicas have served, and the replica that holds a prompt's prefix."""

from __future__ import annotations

from typing import Any

import pytest

from fp8plan.runtime.apply.fleet import served
from fp8plan.runtime.apply.fleet.served import Served


def test_a_prompt_continues_the_longest_sequence_that_it_begins_with() -> None:
    memory = Served()
    memory.learn(None, [[1, 2, 3], [1, 2, 4]], 0)  # two answers to one prompt
    memory.learn(None, [[1, 2, 3, 9, 9]], 2)
    memory.learn(None, [[1, 2]], 1)
    prompts = [(1, 2, 4, 7), (1, 2, 3, 9, 9, 7), (1, 2, 3, 9, 8), (1, 2, 5), (2, 1), (1,), (256, 2), "1, 2, 3"]
    assert memory.continued(prompts) == [0, 2, 0, 1, None, None, None, None]
    memory.learn(None, [[1, 2, 4]], 3)  # the last one counts
    memory.forget(2)
    assert memory.continued(prompts[:3]) == [3, 0, 0]
    memory.forget()
    assert memory.continued(prompts[:3]) == [None] * 3


def test_names_are_those_of_the_caller() -> None:
    memory = Served()
    memory.learn("a", [[1, 2]], 1)
    memory.learn(7, [[1, 3]], 0)
    memory.learn("a", [[1, 2, 3]], 2)
    assert memory.named([7, "a", "b"]) == [0, 2, None]
    assert memory.continued([(1, 2, 3)]) == [None]
    memory.forget(0)
    assert memory.named([7, "a"]) == [None, 2]


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "MOST", 2)
    memory, longs = Served(), [[number] * 4 for number in range(3)]
    found: list[Any] = [*longs[:2], longs[0], longs[2]]
    for sequence in found:
        memory.learn(None, [sequence], 0)
    assert memory.continued([tuple(sequence) for sequence in longs]) == [0, None, 0]
    for name in ("a", "b", "a", "c"):
        memory.learn(name, [], 1)
    assert memory.named(["a", "b", "c"]) == [1, None, 1]
