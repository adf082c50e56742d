"""The sequences of rollouts that an engine remembers, to calibrate KV scales with and to be examined on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any

from fp8plan.runtime.apply.engine.judge import How
from fp8plan.runtime.apply.weight_sync.kv_calibration import CALIBRATION_SEQUENCES, CALIBRATION_TOKENS


class Sequences:
    """A sample of the sequences of rollouts, spread evenly over all of them.

    weights: number of the weights that sampled them
    """

    def __init__(self, weights: int) -> None:
        self.weights = weights
        self._kept: list[list[int]] = []  # every n-th of those that came
        self._every, self._came = 1, 0

    def add(self, parts: Iterable[Sequence[int]], longest: int) -> None:
        """Add a sequence. parts: its token ids; longest: tokens that the engine takes"""
        if self._came % self._every == 0:
            self._kept.append([*islice(chain.from_iterable(parts), min(CALIBRATION_TOKENS, longest))])
        self._came += 1
        if len(self._kept) > 2 * CALIBRATION_SEQUENCES:
            self._kept, self._every = self._kept[::2], 2 * self._every

    @property
    def spread(self) -> list[list[int]]:
        """CALIBRATION_SEQUENCES of the sequences, or all if they are fewer."""
        count = min(len(self._kept), CALIBRATION_SEQUENCES)
        return [self._kept[number * len(self._kept) // count] for number in range(count)]


class Remembered:
    """Some sequences of the last rollout, or of all that were opened since the last sync.

    sequences: prompt and response of each, as token ids
    """

    def __init__(self) -> None:
        self.sequences: list[list[int]] = []
        self._opened: Sequences | None = None  # those of the rollouts that were opened since the last sync

    def add(self, outputs: Sequence[Any], how: How, more: bool, weights: int, longest: int) -> None:
        """Take some sequences of a call.

        how:     what the call was to the rollouts
        more:    keep the sequences of earlier calls that were alone, too
        weights: number of the weights that sampled them
        longest: tokens that the engine takes
        """
        if how == "beside" or not outputs:
            return
        sampled = self._opened
        if how == "alone" or sampled is None or sampled.weights != weights:
            sampled = Sequences(weights)
        for output in outputs:
            sampled.add((output.prompt_token_ids or (), output.outputs[0].token_ids), longest)
        if how == "open":
            self._opened, self.sequences = sampled, sampled.spread
        else:
            earlier = self.sequences if more else []
            self.sequences = [*earlier, *sampled.spread][-CALIBRATION_SEQUENCES:]
