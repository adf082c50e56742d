"""What a controller remembers, decides and says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from fp8plan.errors import ConfigError
from fp8plan.runtime.controlling.law import GRID


class Decision(StrEnum):
    """What was done with the thresholds."""

    WARM_UP = "warm_up"  # still the initial ones
    HOLD = "hold"
    TIGHTEN = "tighten"  # less weight for large ratios
    RELAX = "relax"
    AT_BOUND = "at_bound"  # cannot keep its limits within the bounds
    NO_DATA = "no_data"  # no valid token, or a figure that is not a number: nothing moves


class Alarm(StrEnum):
    """What a threshold cannot repair, or what KL alone does not show. None of them moves a threshold upwards."""

    KL = "kl"  # smoothed robust KL above the plan's range, or the target
    BROKEN = "broken"  # KL beyond what any correction repairs
    RAW_ESS = "raw_ess"
    CHI2 = "chi2"
    TAIL = "tail"  # too many tokens whose ratio is beyond all bounds
    UNIT_MEAN = "unit_mean"  # the ratios' mean is not 1: they are not those of the policy that sampled


@dataclass(frozen=True, slots=True)
class Decided:
    """reason: a sentence for the log
    escalate: the mismatch is beyond what thresholds can do. It is for the log, and for the trainer to act on: the guard
              hears the KL itself, and steps down at a far lower one
    """

    decision: Decision
    reason: str
    alarms: tuple[Alarm, ...] = ()
    escalate: bool = False


@dataclass(frozen=True, slots=True)
class ControllerState:
    """Saved with the checkpoint; plain numbers only.

    steps:       batches with valid tokens seen
    tis, band:   thresholds of the last step, on pi_train / pi_rollout
    low:         lower end of the band to go back to when more tokens are kept again; None without a band
    kl:          smoothed robust k3 per token; None before the first batch
    limit_kl:    above it the KL alarm sounds
    tail:        share of tokens with a ratio above each bound of law.GRID, over the last `tail_tokens` tokens
    strained:    steps in a row in which the limits could not be kept within the bounds
    gradients, gradient2, gradient_noise: what `noise.heard` of gradient norms; how many, and fading sums
    """

    steps: int = 0
    tis: float | None = 2.0
    band: tuple[float, float] | None = None
    low: float | None = None
    kl: float | None = None
    limit_kl: float = 0.03
    tail: tuple[float, ...] = ()
    tail_tokens: float = 0.0
    strained: int = 0
    gradients: int = 0
    gradient2: float = 0.0
    gradient_noise: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint; json keeps every bit of it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> ControllerState:
        """The state that `to_dict` made. Raises ConfigError for unknown or missing keys, and a tail of another grid."""
        known = {field.name for field in fields(cls)}
        if saved.keys() != known:
            wrong = ", ".join(sorted(saved.keys() ^ known))
            raise ConfigError(f"not a saved ControllerState; unknown or missing: {wrong}; give what to_dict returned")
        if len(saved["tail"]) not in (0, GRID.size):
            raise ConfigError(
                f"a saved ControllerState has a tail of {len(saved['tail'])} bounds, this version of fp8plan "
                f"{GRID.size}; begin with a new state"
            )
        band = saved["band"]
        return cls(**{**saved, "tail": tuple(saved["tail"]), "band": None if band is None else (band[0], band[1])})
