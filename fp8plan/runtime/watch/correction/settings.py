"""Settings of a correction, frozen and checked when made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from fp8plan.checks import instance, is_number
from fp8plan.errors import ConfigError

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["tis", "mis", "icepop"]
Estimator = Literal["k1", "k2", "k3"]
Over = Literal["token", "seq_sum", "seq_mean", "seq_max"]

LEVELS: Final = ("token", "sequence", "geometric", None)
MODES: Final = ("tis", "mis", "icepop")
ESTIMATORS: Final = ("k1", "k2", "k3")
OVER: Final = ("token", "seq_sum", "seq_mean", "seq_max")


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Bounds on the ratio pi_train / pi_rollout, which a controller moves.

    tis:  C of truncated importance sampling, weight = min(ratio, C); None: weights are not truncated
    band: (low, high) of MIS and IcePop, which keep the ratios inside; None: neither is used

    Raises ConfigError unless tis > 0 and 0 < low <= high.
    """

    tis: float | None = 2.0
    band: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.tis is not None and not (is_number(self.tis, finite=False) and self.tis > 0):
            raise ConfigError(f"tis is {self.tis!r}; allowed: above 0, or None for weights that are not truncated")
        if self.band is not None and not _is_band(self.band):
            raise ConfigError(f"band is {self.band!r}; allowed: (low, high) with 0 < low <= high")


def _is_band(band: Any) -> bool:
    return _is_pair(band) and 0 < band[0] <= band[1]


def _is_veto(veto: Any) -> bool:
    if _is_pair(veto):
        return bool(0 <= veto[0] < 1 < veto[1])
    return is_number(veto) and 0 < veto < 1


def _is_pair(ends: Any) -> bool:
    return isinstance(ends, Sequence) and len(ends) == 2 and all(is_number(end, finite=False) for end in ends)


@dataclass(frozen=True, slots=True)
class Rejection:
    """A bound on a divergence: tokens beyond it are masked out of the loss.

    over:      "token": each token's divergence; "seq_sum", "seq_mean", "seq_max": sum, mean or largest over a sequence,
               which is kept or lost whole
    estimator: k1: -log ratio; k2: log ratio^2 / 2; k3: ratio - 1 - log ratio (of the log ratio clamped to +-20)
    high:      k2, k3: the largest divergence to keep. k1: the largest ratio (seq_sum: product of ratios, seq_mean:
               geometric mean)
    low:       k1: the smallest ratio. Bounds are on pi_train / pi_rollout, verl's on its inverse

    Raises ConfigError for an unknown rejection and for bounds out of range.
    """

    over: Over
    estimator: Estimator
    high: float
    low: float = 0.0

    def __post_init__(self) -> None:
        if self.over not in OVER or self.estimator not in ESTIMATORS or self.name == "seq_max_k1":
            raise ConfigError(f"no rejection {self.name!r}; allowed: {', '.join(REJECTIONS)}")
        ends = all(is_number(end, finite=False) for end in (self.low, self.high))
        if not (ends and 0 <= self.low <= self.high and self.high > 0):
            raise ConfigError(
                f"{self.name} is bounded by {self.low!r} and {self.high!r}; allowed: 0 <= low <= high > 0"
            )
        if self.low and self.estimator != "k1":
            raise ConfigError(f"{self.name} has a lower bound, {self.low!r}; allowed: only k1 has one")

    @property
    def name(self) -> str:
        """verl's name: token_k1, seq_sum_k3, ..."""
        return f"{self.over}_{self.estimator}"


REJECTIONS: Final = tuple(f"{over}_{k}" for over in OVER for k in ESTIMATORS if (over, k) != ("seq_max", "k1"))


@dataclass(frozen=True, slots=True)
class CorrectionSettings:
    """Settings of the correction of gradients.

    level:      the ratio that becomes a token's weight: its own (biased, low variance), the product over its sequence
                (unbiased, useless once length x KL nears 20), or the geometric mean over it; None: no weights
    mode:       tis: min(ratio, thresholds.tis). icepop: 0 outside thresholds.band. mis: the same, and tokens outside
                are masked out of the loss, so means over tokens do not count them
    thresholds: a controller's initial ones; `correct(..., thresholds=...)` has those of a step. None: those of the plan
                or of the default law, and C = 2 without a controller
    reject:     bounds on divergences; a token must pass all of them
    veto:       smallest ratio of a token (1e-4, say), or (smallest, largest): a sequence with a token beyond is masked
                out; None: no veto
    batch_normalize: divide weights by their mean, over tokens (level token) or sequences, and over all ranks if
                torch.distributed is up: then every rank must call `correct`
    floor:      smallest weight of mode tis, which is then max(floor, min(ratio, thresholds.tis))

    Raises ConfigError for values out of range, and for a mode without its band.
    """

    level: Level | None = "token"
    mode: Mode = "tis"
    thresholds: Thresholds | None = None
    reject: tuple[Rejection, ...] = ()
    veto: float | tuple[float, float] | None = None
    batch_normalize: bool = False
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.thresholds is not None:
            instance("thresholds", self.thresholds, Thresholds, "Thresholds(tis=2.0), or None")
        if self.level not in LEVELS:
            raise ConfigError(f"level is {self.level!r}; allowed: {', '.join(map(repr, LEVELS))}")
        if self.mode not in MODES:
            raise ConfigError(f"mode is {self.mode!r}; allowed: {', '.join(map(repr, MODES))}")
        band = None if self.thresholds is None else self.thresholds.band
        if self.level is not None and self.mode != "tis" and band is None:
            raise ConfigError(f"mode {self.mode!r} needs a band; type Thresholds(band=(0.5, 2.0))")
        if isinstance(self.veto, Sequence):
            object.__setattr__(self, "veto", tuple(self.veto))
        if self.veto is not None and not _is_veto(self.veto):
            raise ConfigError(
                f"veto is {self.veto!r}; allowed: between 0 and 1, (low, high) with 0 <= low < 1 < high, or None"
            )
        if not (is_number(self.floor) and 0 <= self.floor <= 1):
            raise ConfigError(f"floor is {self.floor!r}; allowed: 0 to 1")
        if self.floor and (self.level is None or self.mode != "tis"):
            raise ConfigError(f"floor is {self.floor!r} without weights that are truncated; allowed: mode 'tis'")
        if not isinstance(self.reject, Sequence) or not all(isinstance(rule, Rejection) for rule in self.reject):
            allowed = "a list of Rejections, such as [Rejection('seq_mean', 'k1', 1.01)]"
            raise ConfigError(f"reject is {self.reject!r:.60}; allowed: {allowed}")
        object.__setattr__(self, "reject", tuple(self.reject))
