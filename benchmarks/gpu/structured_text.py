"""Synthetic documents with structure: some tokens follow from others, some are chosen freely.

A mismatch measured on random weights means little: their distributions are flat and no error can flip anything. These
documents make a small model learn what large ones do: look tokens up (attention), remember which follow which (MLPs),
calculate, and be sure of some tokens and unsure of others. They are lines of LINE tokens:

    copy    COPY x1..x7 IS x1..x7              words by Zipf's law, then again
    add     ADD 3 digits PLUS 3 digits EQ 4 digits END END END
    chain   CHAIN w1..w15                      each word is one of 4 that may follow the one before it
    again   AGAIN, then what followed the first token of the line before
    stop    STOP ...                           the document is over
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]

LINE: Final = 16
DIGITS: Final = 10  # tokens 0 to 9
COPY, IS, ADD, PLUS, EQ, END, CHAIN, AGAIN, STOP = range(DIGITS, DIGITS + 9)
FIRST_WORD: Final = 32
KINDS: Final = ("copy", "add", "chain", "again", "stop")
SHARES: Final = (0.25, 0.2, 0.35, 0.17, 0.03)
FOLLOWERS: Final = (0.6, 0.25, 0.1, 0.05)  # how likely each of the 4 words that may follow is
ZIPF: Final = 1.1


@dataclass(frozen=True, slots=True)
class Language:
    """The words and their possible followers: the same for one vocabulary and seed.

    followers: (words, 4) tokens; frequency: (words,), sums to 1
    """

    followers: Tokens
    frequency: NDArray[np.float64]

    @classmethod
    def of(cls, vocabulary: int, seed: int = 0) -> Language:
        """vocabulary: tokens in all, the first FIRST_WORD of which are no words."""
        words = vocabulary - FIRST_WORD
        chance = np.random.default_rng(seed)
        followers = FIRST_WORD + chance.integers(0, words, (words, len(FOLLOWERS)))
        frequency = 1 / np.arange(1, words + 1) ** ZIPF
        return cls(followers, frequency / frequency.sum())

    def documents(self, count: int, lines: int, chance: np.random.Generator) -> Tokens:
        """(count, lines * LINE) tokens."""
        made = {
            "copy": self._copy(count * lines, chance),
            "add": _add(count * lines, chance),
            "chain": self._chain(count * lines, chance),
            "stop": np.full((count * lines, LINE), STOP),
        }
        kinds = chance.choice(len(KINDS), (count, lines), p=SHARES)
        kinds[:, 0] = KINDS.index("chain")
        text = np.zeros((count, lines, LINE), np.int64)
        for number, name in enumerate(KINDS):
            if name in made:
                where = kinds == number
                text[where] = made[name].reshape(count, lines, LINE)[where]
        for line in range(1, lines):  # one after the other: a line may repeat one that repeats
            repeats = kinds[:, line] == KINDS.index("again")
            text[repeats, line, 0] = AGAIN
            text[repeats, line, 1:] = text[repeats, line - 1, 1:]
        return text.reshape(count, lines * LINE)

    def _words(self, shape: tuple[int, ...], chance: np.random.Generator) -> Tokens:
        return FIRST_WORD + np.searchsorted(self.frequency.cumsum()[:-1], chance.random(shape))

    def _copy(self, count: int, chance: np.random.Generator) -> Tokens:
        words = self._words((count, LINE // 2 - 1), chance)
        return np.hstack([_column(COPY, count), words, _column(IS, count), words])

    def _chain(self, count: int, chance: np.random.Generator) -> Tokens:
        steps = [self._words((count,), chance)]
        for _ in range(LINE - 2):
            which = chance.choice(len(FOLLOWERS), count, p=FOLLOWERS)
            steps.append(self.followers[steps[-1] - FIRST_WORD, which])
        return np.hstack([_column(CHAIN, count), np.stack(steps, 1)])


def prompts(language: Language, count: int, lines: int, seed: int) -> list[list[int]]:
    """Beginnings of documents that nobody has trained on (another seed), cut anywhere in their last line."""
    chance = np.random.default_rng(seed)
    text = language.documents(count, lines, chance)
    ends = chance.integers((lines - 1) * LINE + 1, lines * LINE + 1, count)
    return [row[:end].tolist() for row, end in zip(text, ends.tolist(), strict=True)]


def _add(count: int, chance: np.random.Generator) -> Tokens:
    left, right = chance.integers(0, 1000, (2, count))
    parts: list[Any] = [_column(ADD, count), _digits(left, 3), _column(PLUS, count), _digits(right, 3)]
    parts += [_column(EQ, count), _digits(left + right, 4)]
    return np.hstack([*parts, np.full((count, LINE - 13), END)])


def _digits(numbers: Tokens, width: int) -> Tokens:
    return numbers[:, None] // 10 ** np.arange(width - 1, -1, -1) % 10


def _column(token: int, count: int) -> Tokens:
    return np.full((count, 1), token)
