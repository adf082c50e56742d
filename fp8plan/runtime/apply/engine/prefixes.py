"""Sequences of tokens that are found again as the beginning of a later prompt.

With token-in, token-out a turn's prompt begins with the last turn's prompt and answer. Only hashes are kept, so that a
sequence of any length takes about 200 bytes. As in vLLM's prefix cache, a chunk's hash includes that of the chunks
before it. A sequence is kept under the hash of its full chunks, and a prompt is looked up there alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from itertools import accumulate
from typing import Final, Generic, TypeVar

CHUNK: Final = 256  # tokens

T = TypeVar("T")
Key = tuple[int, int, int]  # hash of the full chunks, number of tokens after them, and their hash


class Hashed:
    """A sequence of tokens with its hashes, so that all who look it up hash it once.

    chunks: hash of the first 0, 1, 2, ... full chunks
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self.chunks = _hashes(tokens, 0)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def key(self) -> Key:
        """The identity of the whole sequence."""
        rest = tuple(self.tokens[CHUNK * (len(self.chunks) - 1) :])
        return self.chunks[-1], len(rest), hash(rest)

    def followed_by(self, more: Sequence[int]) -> Hashed:
        """Return the tokens with more behind them. Chunks that are full already are not hashed again."""
        whole = copy(self)
        whole.tokens = [*self.tokens, *more]
        start = CHUNK * (len(self.chunks) - 1)
        whole.chunks = [*self.chunks[:-1], *_hashes(whole.tokens[start:], self.chunks[-1])]
        return whole


class Prefixes(Generic[T]):
    """Values under sequences of tokens; a sequence may have several."""

    def __init__(self) -> None:
        self._values: dict[Key, list[T]] = {}
        self._rests: dict[int, set[int]] = {}  # hash of full chunks -> numbers of tokens after them

    def __len__(self) -> int:
        return len(self._values)

    def at(self, tokens: Hashed) -> list[T]:
        """Return the values of this very sequence, to be changed. The sequence becomes the newest."""
        key = chunks, rest, _ = tokens.key
        self._rests.setdefault(chunks, set()).add(rest)
        values = self._values.pop(key, [])
        self._values[key] = values
        return values

    def beginning(self, tokens: Hashed) -> list[T]:
        """Return the values of the longest sequence with which these tokens begin; [] without one.

        A sequence without values does not count.
        """
        for number, chunks in reversed([*enumerate(tokens.chunks)]):
            rests = self._rests.get(chunks)
            if rests is None:
                continue
            after = tuple(tokens.tokens[CHUNK * number : CHUNK * (number + 1)])
            for rest in sorted(rests, reverse=True):
                values = self._values.get((chunks, rest, hash(after[:rest]))) if rest <= len(after) else None
                if values:
                    return values
        return []

    def keep(self, wanted: Callable[[T], bool]) -> None:
        """Forget all values but the wanted ones."""
        kept = ((key, [value for value in values if wanted(value)]) for key, values in self._values.items())
        self._values = {key: values for key, values in kept if values}
        self._rests = {}
        for chunks, rest, _ in self._values:
            self._rests.setdefault(chunks, set()).add(rest)

    def forget_oldest(self) -> None:
        """Forget the sequence that was asked for longest ago."""
        del self._values[next(iter(self._values))]


def _hashes(tokens: Sequence[int], before: int) -> list[int]:
    """Return the hash of the first 0, 1, 2, ... full chunks of a sequence. before: that of the chunks before it"""
    starts = range(0, len(tokens) - CHUNK + 1, CHUNK)
    chunks = (hash(tuple(tokens[start : start + CHUNK])) for start in starts)
    return list(accumulate(chunks, lambda before, chunk: hash((before, chunk)), initial=before))
