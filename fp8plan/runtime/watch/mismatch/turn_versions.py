"""The weight versions of a trajectory's tokens, from those of its turns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fp8plan.errors import ConfigError
from fp8plan.runtime.watch.mismatch.sums import IntArray


def turn_versions(
    versions: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], length: int | None = None
) -> IntArray:
    """Return the version of the weights behind each token, for `measure` and `Monitor.step`.

    versions: for each trajectory the number of the weights that generated each turn; a turn that went on after a sync
              counts as two
    tokens:   in the same form, the tokens of each turn in the trainer's sequence: the answer, and those that a tool
              added after it. The mask leaves the tool's out, and so they count for no version
    length:   tokens of a row of padded log-probs, which begins with its first turn; None: log-probs are packed

    Returns int64 [trajectories, length], with 0 for padding, or [tokens] without a length.
    Raises ConfigError for a trajectory with other turns in `versions` than in `tokens`, for one that is too long, and
    for numbers that are not whole, or below 0.
    """
    if [len(turns) for turns in versions] != [len(turns) for turns in tokens]:
        raise ConfigError(
            "versions and tokens differ in their numbers of turns; allowed: for each trajectory a list with a number "
            "for each turn, as versions=[[7, 8]], tokens=[[120, 95]]"
        )
    numbers = [number for table in (versions, tokens) for turns in table for number in turns]
    if wrong := [number for number in numbers if number != int(number) or number < 0]:
        raise ConfigError(f"versions and tokens have {wrong[0]!r}; allowed: whole numbers of at least 0")
    rows = [np.repeat(np.asarray(one, np.int64), each) for one, each in zip(versions, tokens, strict=True)]
    if length is None:
        return np.concatenate([np.empty(0, np.int64), *rows])
    padded = np.zeros((len(rows), length), np.int64)
    for number, row in enumerate(rows):
        if len(row) > length:
            raise ConfigError(f"trajectory {number} has {len(row):,} tokens; allowed: {length:,}, the row's length")
        padded[number, : len(row)] = row
    return padded
