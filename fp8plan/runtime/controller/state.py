"""The state, the decisions and the alarms of controllers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from math import inf
from typing import Any, TypeVar

from fp8plan.checks import instance, is_number, whole
from fp8plan.errors import ConfigError
from fp8plan.runtime.controller.law import GRID
from fp8plan.runtime.correction.settings import Thresholds


class Decision(StrEnum):
    """The change that a controller made to the thresholds."""

    WARM_UP = "warm_up"  # still the initial ones
    HOLD = "hold"
    TIGHTEN = "tighten"  # less weight for large ratios
    RELAX = "relax"
    AT_BOUND = "at_bound"  # cannot do what the mismatch asks for within the bounds
    NO_DATA = "no_data"  # no valid token, or a figure that is not a number: nothing moves


class Alarm(StrEnum):
    """A figure that no threshold repairs, or that KL alone does not show. No alarm loosens a threshold.

    fp8plan.runtime.controller.alarms.MEANINGS says what each means, and what to do.
    """

    KL = "kl"
    BROKEN = "broken"
    RAW_ESS = "raw_ess"
    CHI2 = "chi2"
    TAIL = "tail"
    UNIT_MEAN = "unit_mean"
    UNITS = "units"
    IDENTICAL = "identical"
    PLACEHOLDERS = "placeholders"
    INVALID = "invalid"
    LOST = "lost"


class Escalation(StrEnum):
    """The action to take when thresholds can do no more; the cheaper one comes first."""

    RECALIBRATE_KV = "recalibrate_kv"
    STEP_DOWN = "step_down"


def strain(before: int, over: bool, broken: bool, patience: int) -> int:
    """Steps in a row in which thresholds could not do what was asked of them. KL beyond repair needs no patience."""
    if broken:
        return max(before + 1, patience)
    return before + 1 if over else 0


def escalation(strained: int, patience: int) -> Escalation | None:
    """The action due after `strained` steps in a row at a bound.

    Every `patience` steps ask for one action, which then has as many steps to help.
    """
    if not strained or strained % patience:
        return None
    return Escalation.RECALIBRATE_KV if strained == patience else Escalation.STEP_DOWN


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision and its reason.

    reason:   a sentence for the log
    escalate: what the mismatch asks for beyond what thresholds can do, in the step in which it is to be done, or None;
              `engine.apply(step.verdict, step.decided.escalate)` does it
    """

    decision: Decision
    reason: str
    alarms: tuple[Alarm, ...] = ()
    escalate: Escalation | None = None


@dataclass(frozen=True, slots=True)
class ControllerState:
    """The state that every controller remembers: plain numbers, saved with the checkpoint.

    steps:     batches with valid tokens seen
    tis, band: thresholds of the last step, on pi_train / pi_rollout
    kl:        smoothed robust k3 per token; None before the first batch
    limit_kl:  above it the KL alarm sounds
    strained:  steps in a row in which thresholds could not do what was asked of them
    """

    steps: int = 0
    tis: float | None = 2.0
    band: tuple[float, float] | None = None
    kl: float | None = None
    limit_kl: float = 0.03
    strained: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint; json keeps every bit of it."""
        return asdict(self)

    @staticmethod
    def from_dict(saved: Mapping[str, Any]) -> ControllerState:
        """The state that `to_dict` made, of whichever controller. Raises ConfigError for unknown or missing keys, and a
        tail of another grid."""
        instance("a saved ControllerState", saved, Mapping, "what to_dict returned")
        wrong, kind = min(((sorted(saved.keys() ^ names(kind)), kind) for kind in KINDS), key=lambda x: len(x[0]))
        if wrong:
            raise ConfigError(
                f"not a saved ControllerState; unknown or missing: {', '.join(map(str, wrong))}; give what to_dict "
                "returned"
            )
        _check_values(saved)
        if len(saved.get("tail", ())) not in (0, GRID.size):
            raise ConfigError(
                f"a saved ControllerState has a tail of {len(saved['tail'])} bounds, this version of fp8plan "
                f"{GRID.size}; begin with a new state"
            )
        values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in saved.items()}
        return kind(**values)


Update = tuple[Thresholds, ControllerState, Decided]


@dataclass(frozen=True, slots=True)
class AdaptiveState(ControllerState):
    """The state of AdaptiveThresholds.

    start_tis, start_band: where the thresholds begin, and go back to
    target_kl: k3 per token up to which they stay there
    reach:     how far from 1 they are now, as a share of where they begin: log C = reach * log start_tis
    """

    start_tis: float | None = 2.0
    start_band: tuple[float, float] | None = None
    target_kl: float = 0.01
    reach: float = 1.0


@dataclass(frozen=True, slots=True)
class LeastErrorState(ControllerState):
    """The state of LeastErrorThresholds.

    low:         lower end of the band to go back to when more tokens are kept again; None without a band
    tail:        share of tokens with a ratio above each bound of law.GRID, over the last `tail_tokens` tokens
    gradients, gradient2, gradient_noise: gradient norms that `noise.heard` took in: their number, and fading sums
    """

    low: float | None = None
    tail: tuple[float, ...] = ()
    tail_tokens: float = 0.0
    gradients: int = 0
    gradient2: float = 0.0
    gradient_noise: float = 0.0


def _check_values(saved: Mapping[str, Any]) -> None:
    """Raises ConfigError for a value that no state has."""
    for name, value in saved.items():
        if name in ("steps", "strained", "gradients"):
            whole(name, value, 0)
        elif name in ("band", "start_band", "tail"):
            many = value if isinstance(value, (list, tuple)) else ("",)
            fine = all(map(is_number, many)) and (name == "tail" or len(many) == 2)
            if not (fine or (value is None and name != "tail")):
                raise ConfigError(f"a saved {name} is {value!r}; allowed: numbers, as to_dict gave them")
        elif not (value is None and name in OPTIONAL):
            lowest = 0.0 if name in POSITIVE else -inf
            if not (is_number(value, name not in ("tis", "limit_kl")) and value >= lowest):
                least = "of 0 or more, " if name in POSITIVE else ""
                raise ConfigError(f"a saved {name} is {value!r}; allowed: a number {least}as to_dict gave it")


OPTIONAL = ("tis", "start_tis", "kl", "low")
POSITIVE = (
    *("tis", "start_tis", "kl", "low", "limit_kl", "target_kl", "reach"),
    *("tail_tokens", "gradient2", "gradient_noise"),
)
KINDS = (AdaptiveState, LeastErrorState, ControllerState)
State = TypeVar("State", bound=ControllerState)


def expecting(state: State, fresh: ControllerState) -> State:
    """`state` with the KL that `fresh` expects: its limit and, where the law has one, its target."""
    expected = {"limit_kl", "target_kl"} & names(type(state))
    return replace(state, **{name: getattr(fresh, name) for name in expected})


def names(kind: type[ControllerState]) -> set[str]:
    return {field.name for field in fields(kind)}


def resumed(saved: ControllerState, fresh: State) -> State:
    """`fresh`, that a controller begins with, with what `saved` remembers: all that the two have in common but the
    thresholds and the limit, which are those of the settings now.

    Raises ConfigError if one has a C, or a band, and the other has not.
    """
    for name in ("tis", "band"):
        if (getattr(saved, name) is None) != (getattr(fresh, name) is None):
            raise ConfigError(
                f"the saved state has {name}={getattr(saved, name)!r}, these settings {getattr(fresh, name)!r}; "
                "allowed: the state of a controller of the same thresholds"
            )
    return replace(fresh, steps=saved.steps, kl=saved.kl, strained=saved.strained)
