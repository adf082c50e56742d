"""What is added up over tokens, batches and ranks: one vector of float64 sums, and two extremes."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fp8plan.errors import ConfigError
from fp8plan.model.arrays import FloatArray
from fp8plan.runtime.mismatch.histogram import BINS
from fp8plan.runtime.mismatch.segments import all_reduced

if TYPE_CHECKING:
    from fp8plan.runtime.mismatch.metrics import Mismatch

# Where in a response tokens are: [0, 64), [64, 128), [128, 256), ..., [2^20, infinity).
POSITIONS: Final = (0, *(64 << i for i in range(15)))
# Weight versions of one batch: at most this many in a row; version v has slot v mod SLOTS.
SLOTS: Final = 64
VERSION_SUMS: Final = ("tokens", "turns", "turns_squared", "k1", "k3")

# log p is the mean log-prob of a sequence; ratio is clamped to e^+-20, k3 is not. An empty sequence has log p = 0.
_SCALARS: Final = (
    "tokens", "sequences", "invalid",
    "k1", "k3", "ratio", "ratio_squared",  # over tokens
    "training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl",  # over sequences, from here on
    "log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio", "sequence_ratio_squared",
)  # fmt: skip
_LAYOUT: Final = (
    *((name, 1) for name in _SCALARS),
    *((f"histogram_{name}", BINS) for name in ("tokens", "ratio", "k3")),
    # Over the tokens of sequences, by their sequence's log ratio: of the sum (sequence) and of the mean (geometric).
    *((f"{level}_{name}", BINS) for level in ("sequence", "geometric") for name in ("tokens", "ratio")),
    *((f"position_{name}", len(POSITIONS)) for name in ("tokens", "k1", "k3")),
    *((f"version_{name}", SLOTS) for name in VERSION_SUMS),
)
_ENDS: Final = np.cumsum([size for _, size in _LAYOUT]).tolist()
_PLACES: Final = {name: slice(end - size, end) for (name, size), end in zip(_LAYOUT, _ENDS, strict=True)}
SIZE: Final[int] = _ENDS[-1]


@dataclass(frozen=True, slots=True, eq=False)
class MismatchSums:
    """Sums of one or more batches. a + b are those of both together.

    values:   [SIZE] float64; `sums["k3"]` is one of them, `sums["histogram_k3"]` an array
    smallest, largest: mean log ratio of a sequence, negated: the extremes of log_ppl_diff
    """

    values: FloatArray
    smallest: float = inf
    largest: float = -inf

    def __getitem__(self, name: str) -> Any:
        part = self.values[_PLACES[name]]
        return float(part[0]) if name in _SCALARS else part

    def __setitem__(self, name: str, value: Any) -> None:
        self.values[_PLACES[name]] = value

    def __add__(self, other: MismatchSums) -> MismatchSums:
        return MismatchSums(
            self.values + other.values, min(self.smallest, other.smallest), max(self.largest, other.largest)
        )

    def reduced(self, group: Any = None) -> MismatchSums:
        """Summed over the ranks of `group` (None: all), by one all_reduce; unchanged without torch.distributed.

        Every rank of the group must call it, also one that has no tokens.
        """
        from torch import distributed

        if not (distributed.is_available() and distributed.is_initialized()):
            return self
        ranks, rank = distributed.get_world_size(group), distributed.get_rank(group)
        # Each rank has two places of its own for the extremes, and adds zero to those of the others.
        vector = np.zeros(SIZE + 2 * ranks)
        vector[:SIZE] = self.values
        vector[SIZE + 2 * rank :][:2] = self.smallest, self.largest
        vector = all_reduced(vector, group)
        return MismatchSums(vector[:SIZE], float(vector[SIZE::2].min()), float(vector[SIZE + 1 :: 2].max()))

    def metrics(self) -> Mismatch:
        """Every figure that follows from the sums."""
        from fp8plan.runtime.mismatch.metrics import Mismatch

        return Mismatch.from_sums(self)


@dataclass(frozen=True, slots=True)
class Span:
    """Mismatch of some tokens: those of a bin of position, [first, last + 1), or of one weight version."""

    tokens: int
    k1: float
    k3: float
    first: int = 0
    last: float = inf


def by_position(sums: MismatchSums) -> tuple[Span, ...]:
    """Bins of position that have tokens, in order; `first` and `last` are tokens from the response's beginning."""
    ends = (*POSITIONS[1:], inf)
    rows = zip(POSITIONS, ends, *(sums[f"position_{name}"] for name in ("tokens", "k1", "k3")), strict=True)
    return tuple(Span(int(n), float(k1 / n), float(k3 / n), first, end - 1) for first, end, n, k1, k3 in rows if n)


def by_version(sums: MismatchSums) -> dict[int, Span]:
    """By weight version, in order. Raises ConfigError if versions that were added are SLOTS or more apart."""
    found = {}
    for slot in np.flatnonzero(sums["version_tokens"]):
        tokens, turns, squared, k1, k3 = (float(sums[f"version_{name}"][slot]) for name in VERSION_SUMS)
        if turns**2 != squared * tokens:  # not all of one version
            raise _apart()
        found[int(turns / tokens) * SLOTS + int(slot)] = Span(int(tokens), k1 / tokens, k3 / tokens)
    if found and max(found) - min(found) >= SLOTS:
        raise _apart()
    return {version: found[version] for version in sorted(found)}


def _apart() -> ConfigError:
    return ConfigError(f"weight versions of one step are {SLOTS} or more apart; allowed: less than {SLOTS}")
