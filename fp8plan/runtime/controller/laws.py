"""Thresholds of the correction, decided anew for every batch from its own mismatch.

    controller = ConstantThresholds()                             frozen settings
    state = controller.initial(plan)                              explicit state, saved with the checkpoint
    thresholds, state, decided = controller.update(state, mismatch)           pure; thresholds for this very batch
    state = controller.resume(ControllerState.from_dict(saved), controller.initial(plan))        from state.to_dict()

Three laws share this protocol. docs/evidence/thresholds.md compares them in training runs. No judged law held.

ConstantThresholds  the default
AdaptiveThresholds  tighter while the KL is news, that is above its own recent past
LevelThresholds     tighter as the KL rises above a fixed target, for as long as it stays there

C does not change this step's mismatch, which comes from outside: there is no loop to close, and no law integrates.
Figures that are not numbers move nothing. Alarms go into the log beside every decision. Beyond the thresholds' means, a
decision escalates: first to a recalibration of the KV scales, then to the guard's step down
(`engine.apply(step.verdict, step.decided.escalate)`).

The law of AdaptiveThresholds. KL is the smaller of this batch's robust k3 per token and the smoothed one. The baseline
is the median of the last `memory` batches, and never below what is expected. News is their ratio:

    news  = KL / max(median of the last batches, target_kl)
    reach = (quiet / news) ^ gain      within [narrowest, 1]; 1 up to `quiet`

A spike, a bad sync and a growing KL are news. A level that stays for half of `memory` batches is the baseline, so that
the thresholds return to where they began. Early in a run without a plan or target, fewer batches suffice. Above
`limit_kl` they do not relax: each step counts towards an escalation.

The law of LevelThresholds. With the smoothed KL:

    reach = (target_kl / KL) ^ gain     within [narrowest, 1]; 1 up to the target

controller/reach.py has the meaning of `reach`, and the bounds within which both laws move.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Final

import numpy as np

from fp8plan.checks import Range, in_range, whole
from fp8plan.errors import ConfigError
from fp8plan.model.risk.expected import RiskBudget
from fp8plan.runtime.controller.alarms import Alarm
from fp8plan.runtime.controller.reach import Demand, State, Tightening, at_reach, check_start
from fp8plan.runtime.controller.state import (
    AdaptiveState,
    AlarmLimits,
    ControllerState,
    Decided,
    Decision,
    Escalation,
    LevelState,
    Update,
    alarms,
    beginning,
    check_law,
    escalation,
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

PATIENCE: Final = 3  # batches that an escalation of ConstantThresholds has to help, before the next one
EXPECTED: Final = RiskBudget().low_kl  # nats per token, where nothing else is expected
QUIET: Final[dict[str, Range]] = {"quiet": (lambda x: 1 <= x < np.inf, "a finite factor of 1 or more")}


@dataclass(frozen=True, slots=True)
class AdaptiveThresholds(Tightening):
    """Thresholds that tighten while the observed KL is news, and return once its level has stayed.

    The docstring of fp8plan.runtime.controller.laws has the law. KL is the robust k3 in nats per token.

    tis, band:   initial thresholds on pi_train / pi_rollout; None: not controlled. A plan's come first
    level:       the ratios that they bound: "token", "sequence" or "geometric"; Monitor passes that of its settings
    target_kl:   KL that is no news, and the baseline before there are batches; None: thrice a plan's expectation, and
                 at least 0.01, the KL of a low risk
    gain:        exponent of the law: log thresholds go with news ^ -gain
    narrowest:   smallest share of their initial log distance from 1
    max_clipped: largest share of the weight that tightening may cut away (TIS)
    min_kept:    smallest share of the tokens that a tightened band may keep
    slew:        (tighten, relax): largest factors by which the log distance changes in one step
    dead_band:   smaller factors change nothing, unless they lead back to the beginning
    warm_up:     number of batches that get the initial thresholds
    patience:    steps at a bound, or above limit_kl, before each escalation
    limit_kl:    KL above which the thresholds do not relax and the KL alarm sounds, unless a plan predicts more
    limits:      levels of the other alarms
    memory:      batches whose median is the baseline; a level becomes the baseline after half of them
    quiet:       news up to which the thresholds keep their initial values

    Raises ConfigError, when made, for values that are out of range.
    """

    gain: float = 0.5
    slew: tuple[float, float] = (2.0, 1.1)
    memory: int = 40
    quiet: float = 1.5

    def __post_init__(self) -> None:
        Tightening.__post_init__(self)
        in_range(self, QUIET)
        whole("memory", self.memory)

    def initial(self, plan: Plan | None = None, choice: int | str | None = None) -> AdaptiveState:
        """The state before the first batch. A plan gives initial thresholds and the expected KL.

        choice: the plan's choice that runs; None: the one it chose

        The baseline begins at `target_kl` or the plan's KL; with neither, at the first batch's.
        Raises ConfigError for a plan with thresholds that cannot tighten, or without such a choice.
        """
        state = _begun(self, AdaptiveState(), plan, choice)
        predicted = predicted_kl(plan, choice)
        target = self.target_kl or max(predicted, EXPECTED)
        recent = (target,) * self.memory if self.target_kl or predicted else ()
        return replace(state, target_kl=target, recent=recent)

    def resume(self, saved: ControllerState, fresh: AdaptiveState) -> AdaptiveState:
        """A saved state with the beginning, the target and the bounds of `fresh`, a new state of `initial`.

        Only the KL of another law's state counts; the thresholds are the initial ones then.

        Raises ConfigError if the state controls other thresholds than these settings, and for one of LevelThresholds.
        """
        if isinstance(saved, LevelState):
            raise ConfigError(
                "the saved state is of LevelThresholds, which were AdaptiveThresholds when it was saved; allowed: "
                "Monitor(controller=LevelThresholds(...)) to go on with it, or a new state"
            )
        state = _resumed(self, saved, fresh)
        return replace(state, recent=saved.recent[-self.memory :]) if isinstance(saved, AdaptiveState) else state

    def update(self, state: AdaptiveState, mismatch: Mismatch) -> Update:
        """Thresholds for this very batch, the next state, and the decision with its reason."""
        thresholds, new, decided = Tightening.update(self, state, mismatch)
        if isinstance(new, AdaptiveState) and decided.decision is not Decision.NO_DATA:
            new = replace(new, recent=(*state.recent, mismatch.k3_robust)[-self.memory :])
        return thresholds, new, decided

    def _demand(self, state: AdaptiveState, mismatch: Mismatch) -> Demand:
        """The reach for the news of this batch. The baseline is of the batches before."""
        kl = min(mismatch.k3_robust, state.kl or 0.0)
        baseline = max(median(state.recent or (kl,)), state.target_kl)
        news, beyond = kl / baseline, kl > state.limit_kl
        reach = sure = 1.0 if news <= self.quiet else float((self.quiet / news) ** self.gain)
        fact = f"KL {kl:.2g} is {news:,.1f} times its baseline of {baseline:.2g}"
        if beyond:
            reach, fact = min(reach, state.reach), f"{fact} and above its limit of {state.limit_kl:.2g}"
        return Demand(reach, sure, fact, beyond, {"baseline": baseline, "news": news})


@dataclass(frozen=True, slots=True)
class LevelThresholds(Tightening):
    """Thresholds that are the tighter, the further the observed KL lies above its target, for as long as it does.

    The docstring of fp8plan.runtime.controller.laws has the law. It had the name AdaptiveThresholds before. It has the
    settings of AdaptiveThresholds except `memory` and `quiet`. These differ:

    target_kl:   KL up to which the thresholds keep their initial values; None: up to thrice a plan's expectation, or
                 0.01 without a plan
    gain:        exponent of the law: log thresholds go with KL ^ -gain. At 30 times the target, 0.2 halves them
    patience:    steps at a bound before each escalation
    limit_kl:    KL above which the KL alarm sounds, unless a plan predicts more

    Raises ConfigError, when made, for values that are out of range.
    """

    def initial(self, plan: Plan | None = None, choice: int | str | None = None) -> LevelState:
        """The state before the first batch. A plan gives initial thresholds and the expected KL.

        choice: the plan's choice that runs; None: the one it chose

        Raises ConfigError for a plan with thresholds that cannot tighten, or without such a choice.
        """
        state = _begun(self, LevelState(), plan, choice)
        return replace(state, target_kl=self.target_kl or predicted_kl(plan, choice) or EXPECTED)

    def resume(self, saved: ControllerState, fresh: LevelState) -> LevelState:
        """A saved state with the beginning, the target and the bounds of `fresh`, a new state of `initial`.

        Only the KL of another law's state counts; the thresholds are the initial ones then.

        Raises ConfigError if the state controls other thresholds than these settings.
        """
        return _resumed(self, saved, fresh)

    def _demand(self, state: LevelState, mismatch: Mismatch) -> Demand:
        """The reach for the smoothed KL; a bound counts if this batch's KL is above the target, too."""
        kl, target = state.kl or 0.0, state.target_kl
        relation = f"{kl / target:,.1f} times" if kl > target else "within"
        fact = f"KL {kl:.2g} is {relation} its target of {target:.2g}"
        return Demand(self._law(kl, target), self._law(min(mismatch.k3_robust, kl), target), fact)

    def _law(self, kl: float, target: float) -> float:
        return 1.0 if kl <= target else float((target / kl) ** self.gain)


def _begun(law: Tightening, state: State, plan: Plan | None, choice: int | str | None) -> State:
    """`state` at the beginning of a law: its thresholds or the plan's, and the limit of the KL."""
    tis, band = beginning(plan, law.level, law.tis, law.band)
    check_start(tis, band)
    limit = max(law.limit_kl, predicted_kl(plan, choice))
    return replace(state, tis=tis, band=band, start_tis=tis, start_band=band, limit_kl=limit)


def _resumed(law: Tightening, saved: ControllerState, fresh: State) -> State:
    """`fresh` with what counts of a saved state, and its reach if it is of the same law."""
    state = resumed(saved, fresh)
    reach = saved.reach if isinstance(saved, type(fresh)) else 1.0
    return at_reach(state, min(max(reach, law.narrowest), 1.0))


@dataclass(frozen=True, slots=True)
class ConstantThresholds:
    """The same thresholds in every step. The alarms still sound, and a KL beyond repair escalates.

    tis, band: bounds on pi_train / pi_rollout, as in Thresholds
    limit_kl:  k3 per token above which the KL alarm sounds, unless a plan predicts a range for the model
    limits:    levels of the other alarms

    Raises ConfigError, when made, for values that are out of range.
    """

    tis: float | None = 2.0
    band: tuple[float, float] | None = None
    limit_kl: float = 0.03
    limits: AlarmLimits = field(default_factory=AlarmLimits)

    def __post_init__(self) -> None:
        check_law(self)

    def initial(self, plan: Plan | None = None, choice: int | str | None = None) -> ControllerState:
        """The state before the first batch. A plan raises limit_kl to the KL that it predicts for `choice`."""
        limit = max(self.limit_kl, predicted_kl(plan, choice))
        return ControllerState(tis=self.tis, band=self.band, limit_kl=limit)

    def resume(self, saved: ControllerState, fresh: ControllerState) -> ControllerState:
        """A saved state with the thresholds and the limit of `fresh`, a new state of `initial`."""
        return resumed(replace(saved, tis=fresh.tis, band=fresh.band), fresh)

    def update(self, state: ControllerState, mismatch: Mismatch) -> Update:
        """Thresholds for this very batch, the next state, and the decision with its reason."""
        thresholds = Thresholds(state.tis, state.band)
        if not usable(mismatch):
            return thresholds, state, no_data(mismatch, self.limits)
        seen = observed(state, mismatch)
        sounding = alarms(mismatch, seen.kl or 0.0, seen.limit_kl, self.limits)
        seen = replace(seen, strained=strain(seen.strained, False, Alarm.BROKEN in sounding, PATIENCE))
        return (
            thresholds,
            seen,
            Decided(Decision.HOLD, "constant thresholds", sounding, escalation(seen.strained, PATIENCE)),
        )


Controller = AdaptiveThresholds | LevelThresholds | ConstantThresholds

__all__ = [
    "AdaptiveThresholds",
    "Alarm",
    "AlarmLimits",
    "ConstantThresholds",
    "Controller",
    "ControllerState",
    "Decided",
    "Decision",
    "Escalation",
    "LevelThresholds",
]
