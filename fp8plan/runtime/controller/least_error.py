"""Opt-in: the thresholds that leave the least squared error of one step's gradient. They loosen as the mismatch grows.

    monitor = Monitor(controller=LeastErrorThresholds(noise_tokens=250_000))

It answers another question than AdaptiveThresholds: not how to keep a run out of danger, but which C makes the gradient
of this one step most accurate. What follows was measured on a problem of 12 tokens with an exact gradient
(benchmarks/control), not in real RL runs.

What a threshold trades. Cutting large ratios takes variance out of the gradient and puts bias in. C does not change
this step's mismatch, which comes from outside with drifts, steps and spikes: there is no loop to close, only a best C
to find for what was just measured. Laws that were considered, with squared gradient error relative to token TIS at
C = 2 in the scenario of spikes, at 16, 128 and 1,024 sequences per batch (benchmarks/control/table.md has them all):

 1. Tighten as KL rises, C = 2 (KL / 0.01)^-0.2 within [1.2, 2]: 0.95, 1.02, 1.19. With the mismatch the weight above
    any C grows, and what is cut away is bias that more tokens do not average out. By this measure, the best C *rises*
    with the mismatch wherever the batch is large.
 2. Relax as KL rises, C = 1.2 (KL / 0.01)^0.4 within [1.2, 8]: 1.14, 1.05, 0.81. Right for large batches and wrong for
    small ones; and the same KL may lie in a few ratios of e^5 or in many of 1.5, which want different C.
 3. A constant clipped mass, 3%: 1.27, 1.16, 0.84. Sees the shape, not the size of the batch.
 4. PI control of the clipped mass: 0.90, 0.98, 1.17. Always a step late, in a signal that does not answer to C; and an
    integral has to be kept from winding up while there is nothing to clip.
 5. An ESS of 0.9 after truncation: 0.95, 1.04, 1.29. Counts variance only. A quantile of the ratios, 99%: 1.22, 1.09,
    0.80. Counts neither.
 6. Mixing weights with 1 by ESS (AIS, arXiv 2605.13907): 1.16, 1.60, 2.6; its weights are not truncated, and where the
    ESS is low it gives up the correction when the bias is largest. Masking to a second moment of 0.04 (M2PO,
    arXiv 2510.01161), relative to a mask of [0.5, 5]: 0.91, 1.17, 1.80; the law's mask: 0.81, 0.97, 0.82.
 7. Least squared error, estimated from the batch's own ratios and its noise: 0.83, 0.94, 0.83. Chosen. Its closed form
    is in controller/law.py: cut until the weight lost is C times the noise of the batch. The best C of every single
    step, known from the exact gradient, gives 0.80, 0.93, 0.78.

So C follows two things: the tail of the ratios (monotone: more mismatch, never a smaller C; bounded by what published
runs have used, up to 8), and the noise of the batch's gradient, which a trainer can measure (`noise_scale`), or tell
step by step (`Monitor.report_gradients`). A noise scale four times too low costs 8% at most, four times too high up to
24%: guess low. Unknown, the noise is taken as 3% for all batches: a few percent better than C = 2 on average, 5% worse
at worst. On two problems that nothing was tuned on (held_out.md) spikes give 0.81, 0.93, 0.89 and 0.79, 0.91, 0.97, and
7% worse is the worst with unknown noise.

What is around the law. Bounds: nearer to 1 than 1.05 a C only makes gradients shorter, and clips half of the tokens of
a batch without mismatch. A slew limit, the same both ways: relaxing slowly (1.15 per step) would be the cautious choice
and costs the whole gain in spikes at 1,024 sequences (1.06), tightening slowly a part of it at 16 (0.88). A dead band
of a tenth, against churn; the floor on kept tokens is subject to neither. Averaging over batches only as far as one has
too few tokens to speak for itself: a window in tokens cannot wind up. One token of any ratio moves no more than one
token (the law reads the share of tokens above each C, never their ratios). Figures that are not numbers move nothing.
Ratios whose mean is not 1 are not those of the policy that sampled (other temperature, wrong log-probs): the law does
not hold for them, so they never loosen a threshold. Alarms (robust KL, raw ESS, chi2, tails, that mean) go into the log
beside every decision; limits that the bounds cannot keep, and KL beyond repair, escalate.

What it does not do. It holds for token-level weights (Monitor refuses it for others). A C that rises to 8 where the
mismatch is worst is wide open where training is in danger. Small batches gain mostly by a
shorter gradient: by direction alone (1 - cosine^2) spikes give 0.97, 0.99, 0.83, and with plain gradient ascent at a
small rate a shorter gradient is a slower run; Adam, whose steps do not care for length, keeps most of the rest
(benchmarks/control/loop.py trains with both). The error of one step is not that of a run: noise averages over the steps
that an optimiser remembers, bias does not, so noise_tokens may be divided by their number. Metrics that come late
(lagging in the benchmark) are followed late.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf, log
from typing import TYPE_CHECKING

import numpy as np

from fp8plan.checks import is_number, whole
from fp8plan.errors import ConfigError
from fp8plan.runtime.controller import law
from fp8plan.runtime.controller.noise import measured
from fp8plan.runtime.controller.state import (
    Alarm,
    AlarmLimits,
    ControllerState,
    Decided,
    Decision,
    LeastErrorState,
    Update,
    alarms,
    beginning,
    check_limits,
    escalation,
    honest,
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


@dataclass(frozen=True, slots=True)
class LeastErrorThresholds:
    """Thresholds that follow the mismatch and the size of the batch, by the law of fp8plan.runtime.controller.law.

    tis, band:    initial thresholds on pi_train / pi_rollout; None: that one is not controlled. A plan's come first
    bounds:       (smallest, largest) C and upper end of the band
    noise_tokens: the gradient noise scale: tokens in a batch whose gradient has noise as large as itself (squared
                  norms; arXiv 1812.06162, appendix A, measures it from the gradient norms of two batch sizes).
                  None: as told by `Monitor.report_gradients`; until ten steps have been, `noise` for every batch
    noise:        the squared noise of a batch's gradient relative to its squared size, where its scale is not known
    max_clipped:  share of the weight; if more is cut away for `patience` steps, escalate (TIS)
    min_kept:     the band widens until it keeps this share of the tokens; if it cannot for `patience` steps, escalate
    slew:         (down, up): largest factors by which a threshold moves in one step
    dead_band:    a threshold stays where it is if it would move by less than this factor
    tail_tokens:  the tail is averaged over batches until it has so many tokens
    warm_up:      batches with the initial thresholds
    limit_kl:     k3 per token above which the KL alarm sounds, unless a plan predicts a range for the model
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
        Thresholds(self.tis, self.band)  # raises ConfigError for what cannot be a threshold
        check_limits(self.limit_kl, self.limits)
        for name in ("noise", "dead_band", "max_clipped", "min_kept", "tail_tokens"):
            if not is_number(getattr(self, name)):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed: a finite number")
        if self.noise_tokens is not None and not is_number(self.noise_tokens):
            raise ConfigError(f"noise_tokens is {self.noise_tokens!r}; allowed: a finite number above 0, or None")
        for name in ("bounds", "slew"):
            ends = getattr(self, name)
            if not (isinstance(ends, (tuple, list)) and len(ends) == 2 and all(map(is_number, ends))):
                raise ConfigError(f"{name} is {ends!r}; allowed: two numbers")
        lower, upper = self.bounds
        if not 1.0 <= lower < upper <= law.GRID[-1]:
            raise ConfigError(f"bounds are {self.bounds!r}; allowed: (low, high), 1 <= low < high <= {law.GRID[-1]:g}")
        for name, start in (("tis", self.tis), ("band", None if self.band is None else self.band[1])):
            if start is not None and not lower <= start <= upper:
                raise ConfigError(f"{name} begins at {start!r}; allowed: within bounds, {lower:g} to {upper:g}")
        noises = (self.noise, 1.0 if self.noise_tokens is None else self.noise_tokens)
        if not all(0 < noise < inf for noise in noises):
            raise ConfigError(f"noise is {self.noise!r}, noise_tokens {self.noise_tokens!r}; allowed: above 0")
        if not (min(self.slew) > 1 and self.dead_band >= 1):
            raise ConfigError(f"slew is {self.slew!r}, dead_band {self.dead_band!r}; allowed: slew > 1, dead_band >= 1")
        if not (0 < self.max_clipped <= 1 and 0 < self.min_kept < 1):
            raise ConfigError(
                f"max_clipped is {self.max_clipped!r}, min_kept {self.min_kept!r}; allowed: shares above 0, below 1"
            )
        if self.tail_tokens < 0:
            raise ConfigError(f"tail_tokens is {self.tail_tokens!r}; allowed: at least 0")
        whole("warm_up", self.warm_up, 0)
        whole("patience", self.patience)

    def initial(self, plan: Plan | None = None, choice: int | str | None = None) -> LeastErrorState:
        """The state before the first batch. A plan gives thresholds to start with, and the KL of `choice`."""
        tis, band = beginning(plan, "token", self.tis, self.band)
        low = None if band is None else band[0]
        limit = max(self.limit_kl, predicted_kl(plan, choice))
        return self._within(LeastErrorState(tis=tis, band=band, low=low, limit_kl=limit))

    def resume(self, saved: ControllerState, fresh: LeastErrorState) -> LeastErrorState:
        """A saved state within these bounds, with the limit and the band's lower end of `fresh`, which `initial` gave.

        From the state of another law it takes only the KL.

        Raises ConfigError if it controls other thresholds than these settings.
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
        found = alarms(mismatch, seen.kl or 0.0, seen.limit_kl, self.limits)
        warming = seen.steps <= self.warm_up
        new = seen if warming else self._moved(seen, mismatch)
        over = self._strain(new, mismatch)
        new = replace(new, strained=strain(new.strained, bool(over), Alarm.BROKEN in found, self.patience))
        decision, reason = Decision.WARM_UP, f"step {seen.steps} of {self.warm_up} with the initial thresholds"
        if not warming:
            decision, reason = self._said(seen, new, mismatch)
        if over:
            decision, reason = Decision.AT_BOUND, f"{over}; {reason}"
        return (
            Thresholds(new.tis, new.band),
            new,
            Decided(decision, reason, found, escalation(new.strained, self.patience)),
        )

    def _tailed(self, state: LeastErrorState, mismatch: Mismatch) -> LeastErrorState:
        """The state with this batch in its tail. Earlier batches count as far as this one falls short of `tail_tokens`:
        a large batch speaks for itself, and the past never outweighs it."""
        above = law.tail(mismatch)
        past = min(state.tail_tokens, max(self.tail_tokens - mismatch.tokens, 0.0))
        if past:
            above = (past * np.array(state.tail) + mismatch.tokens * above) / (past + mismatch.tokens)
        return replace(state, tail=tuple(above.tolist()), tail_tokens=float(past + mismatch.tokens))

    def _noise(self, state: LeastErrorState, mismatch: Mismatch) -> float:
        tokens = measured(state) if self.noise_tokens is None else self.noise_tokens
        return self.noise if tokens is None else tokens / mismatch.tokens

    def _moved(self, state: LeastErrorState, mismatch: Mismatch) -> LeastErrorState:
        """The state with the law's thresholds, as far as slew and dead band let them go."""
        above, noise, (lower, upper) = np.array(state.tail), self._noise(state, mismatch), self.bounds
        trusted = honest(mismatch, self.limits)

        def step(now: float, wanted: float) -> float:
            wanted = max(wanted, lower) if trusted else min(max(wanted, lower), now)
            if abs(log(wanted / now)) <= log(self.dead_band):
                return now
            return min(max(wanted, now / self.slew[0]), now * self.slew[1])

        tis = None if state.tis is None else step(state.tis, law.best_cap(above, noise, upper))
        band = state.band
        if band is not None:
            keeping = law.cap_of_share(above, 1.0 - self.min_kept, upper)  # a floor: no slew, no dead band
            high = max(step(band[1], law.best_mask(above, noise, upper)), keeping if trusted else 0.0)
            band = (law.low_end(mismatch, state.low or band[0], high, self.min_kept), high)
        return replace(state, tis=tis, band=band)

    def _strain(self, state: LeastErrorState, mismatch: Mismatch) -> str:
        """The limit that cannot be kept, as a sentence; empty if none."""
        cut = 0.0 if state.tis is None else law.cut_share(np.array(state.tail), state.tis)
        if cut > self.max_clipped:
            return f"{cut:.0%} of the weight is cut away, above {self.max_clipped:.0%}"
        kept = 1.0 if state.band is None else mismatch.kept_fraction(*state.band)
        return f"{kept:.1%} of the tokens are kept, below {self.min_kept:.1%}" if kept < self.min_kept else ""

    def _said(self, old: LeastErrorState, new: LeastErrorState, mismatch: Mismatch) -> tuple[Decision, str]:
        """The decision and a sentence with the figures behind it."""
        moves = [(a, b) for a, b in zip(uppers(old), uppers(new), strict=True) if a != b]
        facts = f"KL {new.kl:.2g}, noise {self._noise(new, mismatch):.2g} of the gradient"
        if not moves:
            return Decision.HOLD, f"{' and '.join(f'{x:.3g}' for x in uppers(new)) or 'no threshold'} kept: {facts}"
        decision = Decision.TIGHTEN if moves[0][1] < moves[0][0] else Decision.RELAX
        return decision, f"{' and '.join(f'{a:.3g} -> {b:.3g}' for a, b in moves)}: {facts}"


def uppers(state: LeastErrorState) -> list[float]:
    """The controlled upper bounds: C, the band's upper end, or both."""
    return [x for x in (state.tis, None if state.band is None else state.band[1]) if x is not None]
