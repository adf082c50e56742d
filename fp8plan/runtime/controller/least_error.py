"""Opt-in: the thresholds that leave the least squared error of one step's gradient. They loosen as the mismatch grows.

    monitor = Monitor(controller=LeastErrorThresholds(noise_tokens=250_000))

AdaptiveThresholds answer to the KL's news. This law instead finds the C that makes the gradient of one step most
accurate (gradient_error.py). benchmarks/control/laws.md has the laws that were considered, and the measurements.

C follows the tail of the ratios (more mismatch never gives a smaller C; `bounds` end at 8, as in published runs) and
the noise of the batch's gradient. A trainer measures the noise (`noise_scale`), or reports its gradients step by step
(`Monitor.report_gradients`). Guess low: too high a noise scale costs more than too low a one.

Bounds, a slew limit that is the same both ways, and a dead band surround the law. Neither of the
last two holds back the floor on kept tokens. Batches are averaged only if one alone has too few tokens. The law
reads the share of tokens above each C, never their ratios, so one token of any ratio moves no more than one token. If
the mean ratio is not 1, the ratios are not those of the policy that sampled, and never loosen a threshold.

The law holds for token-level weights alone; Monitor refuses it for others. A C of 8 under the worst mismatch is wide
open where training is in danger.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf, log
from typing import TYPE_CHECKING, Final

import numpy as np

from fp8plan.checks import Range
from fp8plan.errors import ConfigError
from fp8plan.runtime.controller import gradient_error
from fp8plan.runtime.controller.alarms import Alarm
from fp8plan.runtime.controller.noise import measured
from fp8plan.runtime.controller.state import (
    AlarmLimits,
    ControllerState,
    Decided,
    Decision,
    LeastErrorState,
    Update,
    alarms,
    beginning,
    check_law,
    escalation,
    honest,
    is_pair,
    no_data,
    observed,
    predicted_kl,
    resumed,
    strain,
    usable,
)
from fp8plan.runtime.correction.settings import Thresholds

if TYPE_CHECKING:
    from fp8plan.model.plan.plan import Plan
    from fp8plan.runtime.mismatch.metrics import Mismatch

RANGES: Final[dict[str, Range]] = {
    "noise": (lambda x: 0 < x < inf, "a finite number above 0"),
    "noise_tokens": (lambda x: 0 < x < inf, "a finite number above 0, or None"),
    "tail_tokens": (lambda x: 0 <= x < inf, "a finite number, 0 or more"),
}


@dataclass(frozen=True, slots=True)
class LeastErrorThresholds:
    """Thresholds that follow the mismatch and the size of the batch, by the law of gradient_error.py.

    tis, band:    initial thresholds on pi_train / pi_rollout; None: not controlled. A plan's come first
    bounds:       (smallest, largest) C and upper end of the band
    noise_tokens: the gradient noise scale: tokens in a batch whose gradient has noise as large as itself (squared
                  norms; arXiv 1812.06162, appendix A, measures it from the gradient norms of two batch sizes).
                  None: measured by `Monitor.report_gradients`, with `noise` for the first ten steps
    noise:        squared noise of a batch's gradient relative to its squared size, if the noise scale is unknown
    max_clipped:  share of the weight; if more is cut away for `patience` steps, escalate (TIS)
    min_kept:     share of the tokens; the band widens until it keeps so many, and escalates after `patience` steps in
                  which it cannot
    slew:         (down, up): largest factors by which a threshold moves in one step
    dead_band:    smaller factors do not move a threshold
    tail_tokens:  tokens of the batches over which the tail is averaged
    warm_up:      number of batches that get the initial thresholds
    patience:     steps at a bound before each escalation
    limit_kl:     k3 per token above which the KL alarm sounds, unless a plan predicts a range for the model
    limits:       levels of the other alarms

    Raises ConfigError, when made, for values that are out of range.
    """

    tis: float | None = 2.0
    band: tuple[float, float] | None = None
    bounds: tuple[float, float] = (1.05, 8.0)
    noise_tokens: float | None = None
    noise: float = 0.03
    max_clipped: float = 0.5
    min_kept: float = 0.95
    slew: tuple[float, float] = (4.0, 4.0)
    dead_band: float = 1.1
    tail_tokens: float = 2_000
    warm_up: int = 1
    patience: int = 3
    limit_kl: float = 0.03
    limits: AlarmLimits = field(default_factory=AlarmLimits)

    def __post_init__(self) -> None:
        check_law(self, RANGES)
        if not (is_pair(self.bounds) and 1.0 <= self.bounds[0] < self.bounds[1] <= gradient_error.GRID[-1]):
            raise ConfigError(
                f"bounds are {self.bounds!r}; allowed: (low, high), 1 <= low < high <= {gradient_error.GRID[-1]:g}"
            )
        lower, upper = self.bounds
        for name, start in (("tis", self.tis), ("band", None if self.band is None else self.band[1])):
            if start is not None and not lower <= start <= upper:
                raise ConfigError(f"{name} begins at {start!r}; allowed: within bounds, {lower:g} to {upper:g}")

    def initial(self, plan: Plan | None = None, choice: int | str | None = None) -> LeastErrorState:
        """The state before the first batch. A plan gives initial thresholds, and the KL of `choice`."""
        tis, band = beginning(plan, "token", self.tis, self.band)
        low = None if band is None else band[0]
        limit = max(self.limit_kl, predicted_kl(plan, choice))
        return self._within(LeastErrorState(tis=tis, band=band, low=low, limit_kl=limit))

    def resume(self, saved: ControllerState, fresh: LeastErrorState) -> LeastErrorState:
        """A saved state within these bounds, with the limit and the band's lower end of `fresh`, a new state.

        Only the KL of another law's state counts.

        Raises ConfigError if the state controls other thresholds than these settings.
        """
        state = resumed(saved, fresh)
        if isinstance(saved, LeastErrorState):
            state = replace(saved, limit_kl=fresh.limit_kl, low=fresh.low)
        return self._within(state)

    def _within(self, state: LeastErrorState) -> LeastErrorState:
        lower, upper = self.bounds
        tis = None if state.tis is None else min(max(state.tis, lower), upper)
        band = None if state.band is None else (state.band[0], min(max(state.band[1], lower), upper))
        return replace(state, tis=tis, band=band)

    def update(self, state: LeastErrorState, mismatch: Mismatch) -> Update:
        """Thresholds for this very batch, the next state, and the decision with its reason."""
        if not usable(mismatch):
            return Thresholds(state.tis, state.band), state, no_data(mismatch, self.limits)
        seen = self._tailed(observed(state, mismatch), mismatch)
        sounding = alarms(mismatch, seen.kl or 0.0, seen.limit_kl, self.limits)
        warming = seen.steps <= self.warm_up
        new = seen if warming else self._moved(seen, mismatch)
        over = self._strain(new, mismatch)
        new = replace(new, strained=strain(new.strained, bool(over), Alarm.BROKEN in sounding, self.patience))
        decision, reason = Decision.WARM_UP, f"step {seen.steps} of {self.warm_up} with the initial thresholds"
        if not warming:
            decision, reason = self._said(seen, new, mismatch)
        if over:
            decision, reason = Decision.AT_BOUND, f"{over}; {reason}"
        decided = Decided(decision, reason, sounding, escalation(new.strained, self.patience))
        return Thresholds(new.tis, new.band), new, decided

    def _tailed(self, state: LeastErrorState, mismatch: Mismatch) -> LeastErrorState:
        """The state with this batch in its tail. Earlier batches count as far as this one lacks `tail_tokens`."""
        above = gradient_error.tail(mismatch)
        past = min(state.tail_tokens, max(self.tail_tokens - mismatch.tokens, 0.0))
        if past:
            above = (past * np.array(state.tail) + mismatch.tokens * above) / (past + mismatch.tokens)
        return replace(state, tail=tuple(above.tolist()), tail_tokens=float(past + mismatch.tokens))

    def _noise(self, state: LeastErrorState, mismatch: Mismatch) -> float:
        tokens = measured(state) if self.noise_tokens is None else self.noise_tokens
        return self.noise if tokens is None else tokens / mismatch.tokens

    def _moved(self, state: LeastErrorState, mismatch: Mismatch) -> LeastErrorState:
        """The state with the law's thresholds, within slew and dead band."""
        above, noise, (lower, upper) = np.array(state.tail), self._noise(state, mismatch), self.bounds
        trusted = honest(mismatch, self.limits)

        def step(now: float, wanted: float) -> float:
            wanted = max(wanted, lower) if trusted else min(max(wanted, lower), now)
            if abs(log(wanted / now)) <= log(self.dead_band):
                return now
            return min(max(wanted, now / self.slew[0]), now * self.slew[1])

        tis = None if state.tis is None else step(state.tis, gradient_error.best_cap(above, noise, upper))
        band = state.band
        if band is not None:
            keeping = gradient_error.cap_of_share(above, 1.0 - self.min_kept, upper)  # a floor: no slew, no dead band
            high = max(step(band[1], gradient_error.best_mask(above, noise, upper)), keeping if trusted else 0.0)
            band = (gradient_error.low_end(mismatch, state.low or band[0], high, self.min_kept), high)
        return replace(state, tis=tis, band=band)

    def _strain(self, state: LeastErrorState, mismatch: Mismatch) -> str:
        """The limit that cannot be kept, as a sentence; empty if none."""
        cut = 0.0 if state.tis is None else gradient_error.cut_share(np.array(state.tail), state.tis)
        if cut > self.max_clipped:
            return f"{cut:.0%} of the weight is cut away, above {self.max_clipped:.0%}"
        kept = 1.0 if state.band is None else mismatch.kept_fraction(*state.band)
        return f"{kept:.1%} of the tokens are kept, below {self.min_kept:.1%}" if kept < self.min_kept else ""

    def _said(self, old: LeastErrorState, new: LeastErrorState, mismatch: Mismatch) -> tuple[Decision, str]:
        """The decision and a sentence with the figures behind it."""
        now = _uppers(new)
        moves = [(a, b) for a, b in zip(_uppers(old), now, strict=True) if a != b]
        facts = f"KL {new.kl:.2g}, noise {self._noise(new, mismatch):.2g} of the gradient"
        if not moves:
            return Decision.HOLD, f"{' and '.join(f'{upper:.3g}' for upper in now) or 'no threshold'} kept: {facts}"
        decision = Decision.TIGHTEN if moves[0][1] < moves[0][0] else Decision.RELAX
        return decision, f"{' and '.join(f'{a:.3g} -> {b:.3g}' for a, b in moves)}: {facts}"


def _uppers(state: LeastErrorState) -> list[float]:
    """The controlled upper bounds: C, the band's upper end, or both."""
    return [upper for upper in (state.tis, None if state.band is None else state.band[1]) if upper is not None]
