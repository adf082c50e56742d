"""The parts that all laws share: state, decisions, the smoothed KL and its news, levels of alarms, and escalations.

Alarms of the mismatch sound before the thresholds are decided, those of the correction afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from math import isfinite, isnan, sqrt
from statistics import median
from sys import float_info
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from fp8plan.checks import Range, in_range
from fp8plan.errors import ConfigError
from fp8plan.model.risk.expected import RiskBudget
from fp8plan.runtime.watch.controller.alarms import Alarm
from fp8plan.runtime.watch.correction.settings import Thresholds
from fp8plan.runtime.watch.mismatch.metrics import ERRORS
from fp8plan.schemas import checked

if TYPE_CHECKING:
    from fp8plan.model.plan.plan import Plan
    from fp8plan.runtime.watch.correction.correct import Correction
    from fp8plan.runtime.watch.mismatch.metrics import Mismatch


class Decision(StrEnum):
    """A controller's change of the thresholds."""

    WARM_UP = "warm_up"  # still the initial ones
    HOLD = "hold"
    TIGHTEN = "tighten"  # less weight for large ratios
    RELAX = "relax"
    AT_BOUND = "at_bound"  # the bounds do not allow what the mismatch asks for
    NO_DATA = "no_data"  # no valid token, or a figure that is not a number: nothing moves


class Escalation(StrEnum):
    """The action to take when thresholds can do no more; the cheaper one comes first."""

    RECALIBRATE_KV = "recalibrate_kv"
    STEP_DOWN = "step_down"


Can = Callable[[Escalation], bool]  # False for an action that the engine does not have
ADVICE: Final = {
    Escalation.RECALIBRATE_KV: "recalibrate the scales of an FP8 KV cache",
    Escalation.STEP_DOWN: "step down to a safer precision",
    None: "there is no safer precision left to step down to; fp8plan.doctor(engine) looks for other causes, such as "
    "old weights and sampling settings",
}


def any_action(_: Escalation) -> bool:
    """True for every action: nothing is known of the engine."""
    return True


def escalation(before: int, over: bool, broken: bool, patience: int, can: Can) -> tuple[int, Escalation | None, str]:
    """Number of steps in a row at a bound, after one more; the action that is due; and the end of the reason for it.

    over:   at a bound. `patience` such steps ask to recalibrate
    broken: a KL beyond repair. It needs no patience, and then asks for a step down every `patience` steps, at once if
            the engine has no scales to recalibrate. Without a safer precision no action is due
    """
    strained = before + 1 if over or broken else 0
    if broken:
        strained = max(strained, patience)
    actions = [Escalation.RECALIBRATE_KV] if strained == patience else []
    if broken and strained % patience == 0:
        actions.append(Escalation.STEP_DOWN)
    due = next(filter(can, actions), None)
    if due is None and Escalation.STEP_DOWN not in actions:
        return strained, None, ""
    return strained, due, f"; {strained} steps in a row beyond what thresholds can do: {ADVICE[due]}"


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision and its reason.

    reason:   a sentence for the log
    escalate: the action that is due in this step, because thresholds can do no more; None: none, or none that the
              engine has. For an engine, `engine.apply(step.verdict, step.decided.escalate)` does it
    baseline: k3 per token that this step's is compared with; None without data
    news:     this step's k3 over the baseline
    """

    decision: Decision
    reason: str
    alarms: tuple[Alarm, ...] = ()
    escalate: Escalation | None = None
    baseline: float | None = None
    news: float | None = None


EXPECTED: Final = RiskBudget().low_kl  # nats per token, where nothing else is expected
Count = Annotated[int, Meta(ge=0)]
Finite = Annotated[float, Meta(ge=0, le=float_info.max)]


@dataclass(frozen=True, slots=True)
class ControllerState:
    """The state of every controller: plain numbers, saved with the checkpoint.

    steps:     number of batches with valid tokens so far
    thresholds: those of the last step
    kl:        smoothed robust k3 per token; None before the first batch
    recent_kl: robust k3 per token of the last batches, the newest last; their median is the baseline
    target_kl: k3 per token that is expected
    limit_kl:  KL above which the KL alarm sounds
    strained:  steps in a row at a bound
    """

    steps: Count = 0
    thresholds: Thresholds = field(default_factory=Thresholds)
    kl: Finite | None = None
    recent_kl: tuple[Finite, ...] = ()
    target_kl: Finite = EXPECTED
    limit_kl: Annotated[float, Meta(ge=0)] = 0.03
    strained: Count = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint; json keeps every bit of it."""
        saved: dict[str, Any] = msgspec.to_builtins(self)
        return saved

    @staticmethod
    def from_dict(saved: Mapping[str, Any]) -> ControllerState:
        """The state of any controller, from `to_dict`.

        Raises ConfigError for unknown or missing keys, and for values that no state has.
        """
        kind = LevelState if isinstance(saved, Mapping) and "reach" in saved else ControllerState
        state: ControllerState = restored(saved, kind, "the saved ControllerState")
        return state


Update = tuple[Thresholds, ControllerState, Decided]


@dataclass(frozen=True, slots=True)
class LevelState(ControllerState):
    """The state of LevelThresholds.

    start: initial thresholds, the widest ones. They hold up to target_kl
    reach: distance of the thresholds from 1, as a share of the initial one: log C = reach * log start.tis
    """

    start: Thresholds = field(default_factory=Thresholds)
    reach: Finite = 1.0


def restored(saved: Any, kind: Any, where: str) -> Any:
    """Convert what msgspec.to_builtins made of a dataclass back to it.

    Raises ConfigError, which begins with `where`, for unknown and missing keys, and for a value of another type.
    """
    names = {field.name for field in fields(kind)}
    if not isinstance(saved, Mapping):
        raise ConfigError(f"{where} is {saved!r:.60}; allowed: what to_dict returned")
    if wrong := sorted(map(str, saved.keys() ^ names)):
        raise ConfigError(f"{where} has unknown or missing: {', '.join(wrong)}; allowed: what to_dict returned")
    return checked(dict(saved), kind, where)


State = TypeVar("State", bound=ControllerState)


def expecting(state: State, fresh: ControllerState) -> State:
    """`state` with the target and the limit of `fresh`."""
    return replace(state, target_kl=fresh.target_kl, limit_kl=fresh.limit_kl)


def resumed(saved: ControllerState, fresh: State) -> State:
    """`fresh`, a controller's initial state, with the steps, the KLs and the strain of `saved`.

    Raises ConfigError if only one of the two has a C, or only one a band.
    """
    for name in ("tis", "band"):
        before, now = getattr(saved.thresholds, name), getattr(fresh.thresholds, name)
        if (before is None) != (now is None):
            raise ConfigError(
                f"the saved state has {name}={before!r}, these settings {now!r}; allowed: the state of a controller of "
                "the same thresholds"
            )
    return replace(fresh, steps=saved.steps, kl=saved.kl, recent_kl=saved.recent_kl, strained=saved.strained)


BASELINE_OF: Final = 40  # batches whose median is the baseline: a level that stays for half of them becomes it
KL_MEMORY: Final = 0.7  # weight of the last step's smoothed KL: a half-life of two steps
# Largest multiple of the expected KL that a plan may raise a limit to. The theory's 90% interval ends at 2.4 to 2.9
# times for models like those of its fit; for others, small ones above all, it is wider, which must not loosen limits.
MARGIN: Final = 3.0
KL_LEAP: Final = 100.0  # largest multiple of the limit, or of the KL so far, that one batch may count
FEW: Final = 16  # tokens or sequences, the fewest of which a mean says something
LOG10: Final = (1.9, 2.8)  # k1 / k3 is log 10 if both sides are logarithms to base 10, and 1 if they are natural
SHARE: Final[Range] = (lambda x: 0 <= x <= 1, "a share, from 0 to 1")
ABOVE_0: Final[Range] = (lambda x: x > 0, "a number above 0")


@dataclass(frozen=True, slots=True)
class AlarmLimits:
    """Levels at which the alarms sound.

    broken_kl:  verl's open proposal of a KL sentinel trips above 1.0 (verl#7519); of this batch, and smoothed
    raw_ess:    verl's documentation warns below 0.3
    chi2:       the mean of ratio^2, less 1: the same level as raw_ess if the mean ratio is 1
    tail_bound: a ratio above it, or below its inverse, is in the tail
    tail:       share of tokens in the tail
    mean:       allowed distance of the mean ratio from 1, beyond five of its standard errors. Top-p, a temperature that
                the log-probs do not know, and wrong log-probs show here
    placeholders: share of the tokens with a log-prob of exactly 0.0 on one side, and a probability below 0.9 on the
                other
    invalid:    share of the input's tokens with a log-prob that is NaN or infinite
    lost:       share of the batch's weight that the correction removes, `Correction.lost_weight`
    identical:  tokens from which on a batch without any mismatch is no chance; inf for kernels that agree to the bit

    Raises ConfigError for values out of range. tail, placeholders, invalid and lost are shares; 1 switches the alarm
    off, as inf does for the others except tail_bound, and 0 for raw_ess.
    """

    broken_kl: float = 1.0
    raw_ess: float = 0.3
    chi2: float = 7 / 3
    tail_bound: float = 10.0
    tail: float = 0.01
    mean: float = 0.05
    placeholders: float = 0.001
    invalid: float = 0.001
    lost: float = 0.5
    identical: float = 16.0

    def __post_init__(self) -> None:
        shares = dict.fromkeys(("raw_ess", "tail", "placeholders", "invalid", "lost"), SHARE)
        above = dict.fromkeys(("broken_kl", "chi2", "mean", "identical"), ABOVE_0)
        in_range(self, shares | above | {"tail_bound": (lambda x: x > 1, "a number above 1")}, "AlarmLimits: ")


def alarms(mismatch: Mismatch, kl: float, limit_kl: float, limits: AlarmLimits) -> tuple[Alarm, ...]:
    """The alarms that sound for this batch, in the order of Alarm. kl: smoothed robust k3."""
    bound = limits.tail_bound
    sounding = {
        Alarm.KL: kl > limit_kl,
        Alarm.BROKEN: min(kl, mismatch.k3_robust) > limits.broken_kl,
        Alarm.RAW_ESS: mismatch.ess_raw < limits.raw_ess,
        Alarm.CHI2: mismatch.chi2_token > limits.chi2,
        Alarm.TAIL: 1.0 - mismatch.kept_fraction(1.0 / bound, bound) > limits.tail,
        Alarm.UNIT_MEAN: not honest(mismatch, limits),
        Alarm.UNITS: honest(mismatch, limits) and _base_ten(mismatch),
        Alarm.IDENTICAL: mismatch.tokens >= limits.identical and mismatch.k1 == mismatch.k3 == 0.0,
        Alarm.PLACEHOLDERS: mismatch.placeholder_share > limits.placeholders,
        Alarm.INVALID: mismatch.invalid_share > limits.invalid,
    }
    return tuple(alarm for alarm, on in sounding.items() if on)


def no_data(mismatch: Mismatch, limits: AlarmLimits) -> Decided:
    """The decision on a batch with figures that no threshold can follow."""
    if mismatch.tokens:
        reason = "a figure is not a number"
    elif mismatch.invalid:
        reason = f"no valid token: the log-probs of all {mismatch.invalid:,} are NaN or infinite"
    else:
        reason = "no token: the mask is empty"
    alarm = (Alarm.INVALID,) if mismatch.invalid_share > limits.invalid else ()
    return Decided(Decision.NO_DATA, reason, alarm)


def of_correction(correction: Correction, limits: AlarmLimits) -> tuple[Alarm, ...]:
    """The alarms that sound for a correction with the sums of all ranks."""
    sequences = correction.sums.get("raw_sequences")
    sounding = {
        Alarm.UNIT_MEAN: correction.settings.level == "sequence"
        and sequences is not None
        and sequences.count >= FEW
        and not _is_one(sequences.mean, sequences.std(1) / sqrt(sequences.count), limits),
        Alarm.LOST: correction.lost_weight > limits.lost,
    }
    return tuple(alarm for alarm, on in sounding.items() if on)


def honest(mismatch: Mismatch, limits: AlarmLimits) -> bool:
    """True if the mean ratio is 1 within its error, as for the policy that really sampled.

    Ratios are clamped to e^+-20, as in ess_raw and chi2_token: one token never exceeds its own error.
    """
    return _is_one(mismatch.mean_ratio, mismatch.mean_ratio_error, limits)


def _is_one(mean: float, error: float, limits: AlarmLimits) -> bool:
    return abs(mean - 1.0) <= limits.mean + ERRORS * error


def _base_ten(mismatch: Mismatch) -> bool:
    """True if k1 is about log 10 times k3.

    Both have the expectation KL(rollout || train) if the mean ratio is 1. To base 10 every log ratio d shrinks to
    d / log 10: k1 by log 10, and k3, which goes with d^2 for small d, by log^2 10.
    """
    low, high = LOG10
    certain = mismatch.k1 - mismatch.k3 > ERRORS * mismatch.mean_ratio_error
    return certain and low * mismatch.k3 < mismatch.k1 < high * mismatch.k3


def usable(mismatch: Mismatch) -> bool:
    """True if there is a valid token and the deciding figures are numbers. One token can make k3 infinite."""
    figures = (mismatch.k1, mismatch.k3, mismatch.k3_robust, mismatch.ess_raw, mismatch.chi2_token)
    if not mismatch.tokens or any(value is None or isnan(value) for value in figures):
        return False
    return isfinite(mismatch.k3_robust) and isfinite(mismatch.kept_fraction(0.0, 1.0))


class News(NamedTuple):
    """A batch's KL beside its baseline, both robust k3 in nats per token.

    kl:       the smaller of the batch's and the smoothed one
    baseline: the median of the batches before, and never below the expected KL
    """

    kl: float
    baseline: float

    @property
    def ratio(self) -> float:
        return self.kl / self.baseline


def observed(state: State, mismatch: Mismatch) -> tuple[State, News]:
    """The state with this batch in its KLs, and the same thresholds; and the batch's news."""
    counts = min(mismatch.k3_robust, KL_LEAP * max(state.limit_kl, state.kl or 0.0))
    kl = counts if state.kl is None else KL_MEMORY * state.kl + (1 - KL_MEMORY) * counts
    baseline = max(median(state.recent_kl or (0.0,)), state.target_kl)
    recent = (*state.recent_kl, mismatch.k3_robust)[-BASELINE_OF:]
    return replace(state, steps=state.steps + 1, kl=kl, recent_kl=recent), News(min(mismatch.k3_robust, kl), baseline)


def beside(kl: float, standard: float, name: str) -> str:
    """A KL beside a standard, as a clause."""
    relation = f"{kl / standard:,.1f} times" if kl > standard else "within"
    return f"KL {kl:.2g} is {relation} its {name} of {standard:.2g}"


def predicted_kl(plan: Plan | None, choice: int | str | None = None) -> float:
    """The upper end of the KL that a plan predicts for `choice` (None: the one it chose); 0 if it predicts none.

    It is the end of the 90% interval, and at most MARGIN times the expected KL.
    """
    picked = None if plan is None else plan.select(choice)
    if picked is None or not picked.kl_k3_high or picked.kl_k3 is None:
        return 0.0
    return min(picked.kl_k3_high, MARGIN * picked.kl_k3)


def expected_kl(plan: Plan | None, choice: int | str | None = None) -> float:
    """The KL that a plan predicts at most for `choice`, as `predicted_kl` has it, or EXPECTED."""
    return predicted_kl(plan, choice) or EXPECTED


def beginning(plan: Plan | None, level: str, start: Thresholds) -> Thresholds:
    """The initial thresholds: those of `start`, but C from the plan if it has one for this level. None stays None."""
    if plan is None or start.tis is None:
        return start
    return replace(start, tis=plan.thresholds.get(f"{level}_tis", start.tis))
