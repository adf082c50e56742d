"""Alarms: figures of a batch that no threshold repairs, or that stay hidden where only KL is watched."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

from fp8plan.runtime.controller.state import Alarm

if TYPE_CHECKING:
    from fp8plan.runtime.mismatch.metrics import Mismatch


@dataclass(frozen=True, slots=True)
class AlarmLimits:
    """When to sound.

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
    """Those that sound for this batch, in the order of Alarm. kl: smoothed robust k3."""
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
    """Whether the mean of the ratios is 1 within its error, as it is for the policy that really sampled.

    The mean and its error are of ratios within e^+-20, as ess_raw and chi2_token are: a single token of any ratio is
    never more than its own error.
    """
    mean = sqrt(mismatch.ess_raw * (mismatch.chi2_token + 1.0))
    error = sqrt(max(mismatch.chi2_token, 0.0) / mismatch.tokens)
    return abs(mean - 1.0) <= limits.mean + 5 * error
