"""Speed-ups, each with its 90% interval: how many times as fast one rollout, or RL step, is as another."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fp8plan.model.profile.profile import Profile
from fp8plan.model.rollout import Z90, Rollout

# Correlation of the log errors of two precisions on one layout that the coefficients do not explain: 0.39 over the 65
# speed-ups in profiles/h200_sxm/vllm-0.26.0/validation/rollouts.jsonl whose hosts were not slow, plus or minus 0.10;
# the 90% interval holds 97%. A slow host is an error in common: with it, it is 0.63 over 86.
SHARED_ERROR = 0.35


class Timed(NamedTuple):
    """The predicted time of one choice, and what its error is made of.

    seconds:      of the rollout, or of the whole RL step
    rollout_s:    seconds of the rollout in it; the rest of a step is taken as known
    log_gradient: of the rollout, as in Rollout
    cut:          as in EngineLimits
    sampling_sd:  of the rollout, as in Rollout
    """

    seconds: float
    rollout_s: float
    log_gradient: dict[str, float]
    cut: tuple[int, bool] = (1, False)
    sampling_sd: float = 0.0

    @property
    def share(self) -> float:
        """The rollout's share of the time, and so of its relative error."""
        return self.rollout_s / self.seconds


def timed(rollout: Rollout, cut: tuple[int, bool], step_s: float | None = None) -> Timed:
    """The Timed of a rollout, or of an RL step of `step_s` seconds around it."""
    seconds = rollout.makespan_s if step_s is None else step_s
    return Timed(seconds, rollout.makespan_s, rollout.log_gradient, cut, rollout.sampling_sd)


class SpeedUp(NamedTuple):
    """A ratio of speeds, with the ends of its 90% interval; None where they are not known."""

    ratio: float
    low: float | None = None
    high: float | None = None

    @property
    def certain(self) -> bool:
        """True for a choice beside itself, which has no interval."""
        return self.low == self.high

    @property
    def in_doubt(self) -> bool:
        """True if the interval holds 1.00 as it is printed, so that the two may be equally fast."""
        if self.low is None or self.high is None or self.certain:
            return False
        return round(self.low, 2) <= 1 <= round(self.high, 2)

    @property
    def cell(self) -> str:
        """The words of a table, such as "1.20x (0.88-1.64)"."""
        return f"{self.ratio:.2f}x" + ("" if self.certain else f" ({self.low:.2f}-{self.high:.2f})")

    def over(self, other: str) -> str:
        """The words of a sentence: "1.20x as fast as bf16 (90%: 0.88 to 1.64)", or "3.0% slower than bf16 (...)"."""
        if round(self.ratio, 2) < 1:
            return self.percent(other)
        band = "" if self.certain else f" (90%: {self.low:.2f} to {self.high:.2f})"
        return f"{self.ratio:.2f}x as fast as {other}{band}"

    def percent(self, other: str) -> str:
        """The words of a small gain: "1.5% faster than bf16 (90%: 2.0% slower to 5.1% faster)". Percent of speed."""
        band = "" if self.low is None or self.high is None else f" (90%: {_percent(self.low)} to {_percent(self.high)})"
        return f"{_percent(self.ratio)} than {other}{'' if self.certain else band}"

    def of_step(self, share: float) -> SpeedUp:
        """The speed-up of a step with this share of rollout, whose rest takes as long as before (Amdahl's law)."""
        ratio, *ends = (None if x is None else 1 / (1 - share + share / x) for x in self)
        return SpeedUp(ratio or 1.0, *ends)


def _percent(ratio: float) -> str:
    part = abs(ratio - 1)
    return f"{part:{'.1%' if part < 0.0995 else '.0%'}} {'slower' if ratio < 1 else 'faster'}"


def speed_up(baseline: Timed, other: Timed, profile: Profile) -> SpeedUp:
    """The ratio of the speed of `other` to that of `baseline`, by the same profile.

    The coefficients that both use move both, so only the difference of their gradients counts. Of the rest of the error
    both have SHARED_ERROR in common, for which they need the same layout as far as it is the layout's. In an RL step a
    rollout's error counts by its share. What samples of a large batch leave open is taken for independent.
    """
    ratio = baseline.seconds / other.seconds
    if other.log_gradient is baseline.log_gradient and ratio == 1:
        return SpeedUp(1.0, 1.0, 1.0)
    names = list(dict.fromkeys((*baseline.log_gradient, *other.log_gradient)))
    gradients = [[x.share * x.log_gradient.get(name, 0.0) for name in names] for x in (baseline, other)]
    apart = np.array(gradients[0]) - np.array(gradients[1])
    layout, other_layout = (x.share * profile.layout_error(*x.cut) for x in (baseline, other))
    common = SHARED_ERROR if baseline.cut == other.cut else 0.0
    variance = float(apart @ profile.covariance(names) @ apart)
    variance += profile.model_error**2 * _apart(baseline.share, other.share, SHARED_ERROR)
    variance += _apart(layout, other_layout, common)
    variance += sum((x.share * x.sampling_sd) ** 2 for x in (baseline, other))
    factor = float(np.exp(Z90 * np.sqrt(variance)))
    return SpeedUp(ratio, ratio / factor, ratio * factor)


def _apart(first: float, second: float, correlation: float) -> float:
    """The variance of the difference of two errors with these standard deviations."""
    return first**2 + second**2 - 2 * correlation * first * second
