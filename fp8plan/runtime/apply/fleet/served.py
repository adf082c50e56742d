"""The sequences that replicas have served, so that a trajectory's next turn finds the replica that holds its prefix.

verl's load balancer calls this a sticky session, and routers of vLLM and SGLang session or prefix affinity. A caller
names trajectories, or their tokens tell: with token-in, token-out a turn's prompt begins with the last one's prompt and
answer.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from typing import Final

MOST_NAMES: Final = 1 << 20  # trajectories that are remembered by name
MOST_BYTES: Final = 1 << 30  # of sequences that are remembered by their tokens, four for each token


class Served:
    """The replicas that served trajectories, by the callers' names and by tokens; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._by_name: dict[Hashable, int] = {}
        self._by_tokens: dict[bytes, int] = {}
        self._bytes = 0

    def named(self, names: Sequence[Hashable]) -> list[int | None]:
        """Return the replica that served each trajectory last; None for a new one."""
        return [self._by_name.get(name) for name in names]

    def continued(self, prompts: Sequence[Hashable]) -> list[int | None]:
        """Return the replica that served the longest sequence with which a prompt begins; None without one.

        prompts: token ids, as tuples; a text continues nothing
        """
        known = sorted(self._by_tokens)
        begun = [longest_prefix(known, _bytes(each)) if isinstance(each, tuple) else None for each in prompts]
        return [None if sequence is None else self._by_tokens[sequence] for sequence in begun]

    def learn(self, name: Hashable | None, sequences: Sequence[Sequence[int]], replica: int) -> None:
        """Note a request's replica. name: of its trajectory, or None; sequences: its prompt with each answer"""
        if name is not None:
            self._by_name.pop(name, None)
            self._by_name[name] = replica
            if len(self._by_name) > MOST_NAMES:
                del self._by_name[next(iter(self._by_name))]
            return
        for tokens in sequences:
            sequence = _bytes(tokens)
            if self._by_tokens.pop(sequence, None) is None:
                self._bytes += len(sequence)
            self._by_tokens[sequence] = replica
        while self._bytes > MOST_BYTES:
            oldest = next(iter(self._by_tokens))
            del self._by_tokens[oldest]
            self._bytes -= len(oldest)

    def forget(self, replica: int | None = None) -> None:
        """Forget what a replica has served, whose prefix cache is lost; None: what all have."""
        self._by_name = {name: owner for name, owner in self._by_name.items() if replica not in (None, owner)}
        self._by_tokens = {tokens: owner for tokens, owner in self._by_tokens.items() if replica not in (None, owner)}
        self._bytes = sum(map(len, self._by_tokens))


def longest_prefix(known: Sequence[bytes], sequence: bytes) -> bytes | None:
    """Return the longest of the `known`, which are sorted, with which a sequence begins; None without one.

    All that stand between a prefix and the sequence begin with that prefix, too. So the one before the sequence shares
    every known prefix with it, and what both have in common is looked up next.
    """
    while place := bisect_right(known, sequence):
        before = known[place - 1]
        if sequence.startswith(before):
            return before
        sequence = sequence[: _common(before, sequence)]
    return None


def _common(one: bytes, other: bytes) -> int:
    """The number of leading bytes that both have."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda last: one[: last + 1] != other[: last + 1])


def _bytes(tokens: Sequence[int]) -> bytes:
    """Four bytes for each token, so that a prefix of tokens is one of bytes."""
    return array("I", tokens).tobytes()
