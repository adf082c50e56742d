"""The smoothed KL and the alarms, which all laws share.

Alarms tell of figures that no threshold repairs, or that stay hidden when only KL is watched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite, isnan, sqrt
from typing import TYPE_CHECKING, Final

from fp8plan.runtime.controller.state import Alarm, State

if TYPE_CHECKING:
    from fp8plan.model.plan.plan import Plan
    from fp8plan.runtime.mismatch.metrics import Mismatch

KL_MEMORY: Final = 0.7  # of the last step's smoothed KL: a half-life of two steps
# Of the expected KL. The theory's own 90% interval ends at 2.4 to 2.9 times, for models like those it was fitted to. Of
# others, small ones above all, it is wider because less is known, and that should not loosen thresholds.
MARGIN: Final = 3.0
KL_LEAP: Final = 100.0  # times the limit, or the KL so far, that a batch may count: no single one rules for long after


@dataclass(frozen=True, slots=True)
class AlarmLimits:
    """Levels at which the alarms sound.

    broken_kl:  verl's open proposal of a KL sentinel trips above 1.0 (verl#7519); of this batch, and smoothed
    raw_ess:    verl's documentation warns below 0.3
    chi2:       the mean of ratio^2, less 1: the same level as raw_ess where the ratios' mean is 1
    tail_bound: a ratio above it, or below its inverse, is in the tail
    tail:       share of tokens there
    mean:       by how much the mean of the ratios may differ from 1, beyond five of its standard errors. Sampling with
                top-p or a temperature that the log-probs do not know shows here, and so does a wrong log-prob
    """

    broken_kl: float = 1.0
    raw_ess: float = 0.3
    chi2: float = 7 / 3
    tail_bound: float = 10.0
    tail: float = 0.01
    mean: float = 0.05


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
    }
    return tuple(alarm for alarm, on in sounding.items() if on)


def honest(mismatch: Mismatch, limits: AlarmLimits) -> bool:
    """Return True if the mean of the ratios is 1 within its error, as it is for the policy that really sampled.

    The mean and its error are of ratios within e^+-20, as ess_raw and chi2_token are: a single token of any ratio is
    never more than its own error.
    """
    mean = sqrt(mismatch.ess_raw * (mismatch.chi2_token + 1.0))
    error = sqrt(max(mismatch.chi2_token, 0.0) / mismatch.tokens)
    return abs(mean - 1.0) <= limits.mean + 5 * error


def usable(mismatch: Mismatch) -> bool:
    """Return True if there is a valid token and the deciding figures are numbers. One token can make k3 infinite."""
    figures = (mismatch.k1, mismatch.k3, mismatch.k3_robust, mismatch.ess_raw, mismatch.chi2_token)
    if not mismatch.tokens or any(value is None or isnan(value) for value in figures):
        return False
    return isfinite(mismatch.k3_robust) and isfinite(mismatch.kept_fraction(0.0, 1.0))


def observed(state: State, mismatch: Mismatch) -> State:
    """The state with this batch in its KL, thresholds unmoved."""
    counts = min(mismatch.k3_robust, KL_LEAP * max(state.limit_kl, state.kl or 0.0))
    kl = counts if state.kl is None else KL_MEMORY * state.kl + (1 - KL_MEMORY) * counts
    return replace(state, steps=state.steps + 1, kl=kl)


def predicted_kl(plan: Plan | None, choice: int | str | None = None) -> float:
    """The KL up to which a plan's `choice` (None: the one it chose) does as expected; 0 if it predicts none.

    The upper end of the 90% interval, and no more than MARGIN times the expected KL.
    """
    found = None if plan is None else plan.select(choice)
    if found is None or not found.kl_k3_high or found.kl_k3 is None:
        return 0.0
    return min(found.kl_k3_high, MARGIN * found.kl_k3)


def beginning(
    plan: Plan | None, level: str, tis: float | None, band: tuple[float, float] | None
) -> tuple[float | None, tuple[float, float] | None]:
    """The initial (tis, band) of what is controlled: the plan's, if it has them, else those given."""
    planned = {} if plan is None else plan.thresholds
    tis = None if tis is None else planned.get(f"{level}_tis", tis)
    return tis, None if band is None else tuple(planned.get(f"{level}_mis", band))
