"""Thresholds of the correction, decided anew for every batch from its own mismatch.

    controller = ConstantThresholds()                             frozen settings
    state = controller.initial(plan)                              explicit state, saved with the checkpoint
    thresholds, state, decided = controller.update(state, mismatch)           pure; thresholds for this very batch
    decided = after_correction(decided, controller.limits, correction, ...)   alarms of the batch that they corrected
    state = controller.resume(ControllerState.from_dict(saved), controller.initial(plan))        from state.to_dict()

Two laws share this protocol. docs/evidence/thresholds.md compares them, and deleted ones, in training runs.

LevelThresholds     tighter as the KL rises above a fixed target, for as long as it stays there: the default
                    of token TIS (fp8plan.runtime.watch.controller.fit)
ConstantThresholds  the default of all else

C does not change the mismatch of its own step, so no law integrates. Figures that are not numbers move nothing. Alarms
go into the log beside every decision. Where thresholds cannot help, a decision escalates: to a recalibration of the KV
scales, and at a KL beyond repair to the guard's step down (`engine.apply(step.verdict, step.decided.escalate)`), as far
as the engine `can`.

Under both laws a decision says how much news the batch is:

    news = min(KL of this batch, smoothed KL) / max(median of the last 40 batches, expected KL)

KL is the robust k3 per token. A spike, a bad sync and a growing KL are news. A level that stays for 20 batches is the
baseline. The expected KL is a law's target, else the KL that a plan predicts, else 0.01.

The law of LevelThresholds. `reach` is the distance of the thresholds from 1, as a share of the initial distance:
log C = reach x log C0, and both ends of a band likewise. So one law serves C = 2, a band of [0.5, 5] and a geometric
band of [0.999, 1.001]. With the smoothed KL:

    reach = (target_kl / KL) ^ gain     within [narrowest, 1]; 1 up to the target

It moves within bounds:

- a dead band, and a slew limit: fast to tighten, slow to relax;
- two limits in each batch, at the level of the thresholds: at most `max_clipped` of the weight is cut away, and at
  least `min_kept` of the tokens stay. Tightening stops short of them.

If a batch still passes the limits, a band widens at once, just far enough to keep `min_kept`, and never beyond its
beginning. If even the initial band keeps less, band and C stay as they are. The worst mismatch must not get the widest
thresholds.

The decision is AT_BOUND if the KL asks for tighter thresholds than a limit or `narrowest` allows. After `patience` such
steps in a row the decision also asks for a recalibration.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from fp8plan.checks import Range, in_range, instance, is_number, whole
from fp8plan.errors import ConfigError
from fp8plan.model.risk.expected import TIS_START
from fp8plan.runtime.watch.controller.alarms import Alarm
from fp8plan.runtime.watch.controller.state import (
    AlarmLimits,
    Can,
    ControllerState,
    Decided,
    Decision,
    LevelState,
    Update,
    alarms,
    any_action,
    beginning,
    beside,
    escalation,
    expected_kl,
    no_data,
    observed,
    of_correction,
    predicted_kl,
    resumed,
    usable,
)
from fp8plan.runtime.watch.correction.settings import Thresholds

if TYPE_CHECKING:
    from fp8plan.model.plan.plan import Plan
    from fp8plan.runtime.watch.correction.correct import Correction
    from fp8plan.runtime.watch.mismatch.metrics import Mismatch, Ratios
    from fp8plan.runtime.watch.mismatch.sampling import Sampling

PATIENCE: Final = 3  # batches that an escalation of ConstantThresholds has to help, before the next one
LEVELS: Final = ("token", "sequence", "geometric")
STEPS: Final = 33  # values of reach, from the narrowest to 1, of which the limits choose one: coarser than one token
# Missing mass looks like base 10, and a kept set of one token has the log-prob 0.0.
GUESSES: Final = (Alarm.UNITS, Alarm.PLACEHOLDERS)
OUTLIERS: Final = 2  # tokens, or sequences, by which tightening stays away from the limits: one of them moves nothing
LIMIT: Final[dict[str, Range]] = {
    "limit_kl": (lambda x: x > 0, "nats per token, above 0, such as 0.03; inf for no limit"),
}
RANGES: Final[dict[str, Range]] = LIMIT | {
    "target_kl": (lambda x: 0 < x < np.inf, "a finite number above 0, or None"),
    "gain": (lambda x: 0 < x < np.inf, "a finite number above 0"),
    "narrowest": (lambda x: 0 < x <= 1, "a share above 0, 1 at most"),
    "max_clipped": (lambda x: 0 < x <= 1, "a share above 0, 1 at most"),
    "min_kept": (lambda x: 0 < x < 1, "a share above 0 and below 1"),
    "dead_band": (lambda x: 1 <= x < np.inf, "a factor of 1 or more"),
}


@dataclass(frozen=True, slots=True)
class LevelThresholds:
    """Thresholds that are the tighter, the further the observed KL lies above its target, for as long as it does.

    The docstring of fp8plan.runtime.watch.controller.laws has the law. KL is the robust k3 in nats per token.

    tis, band:   initial thresholds on pi_train / pi_rollout; None: not controlled. A plan's come first
    level:       the ratios that they bound: "token", "sequence" or "geometric"; Monitor passes that of its settings
    target_kl:   KL up to which the thresholds keep their initial values; None: up to thrice a plan's expectation, or
                 0.01 without a plan
    gain:        exponent of the law: log thresholds go with KL ^ -gain. At 30 times the target, 0.2 halves them
    narrowest:   smallest share of their initial log distance from 1
    max_clipped: largest share of the weight that tightening may cut away (TIS)
    min_kept:    smallest share of the tokens that a tightened band may keep
    slew:        (tighten, relax): largest factors by which the log distance changes in one step
    dead_band:   smaller factors change nothing, unless they lead back to the beginning
    warm_up:     number of batches that get the initial thresholds
    patience:    steps at a bound before an escalation, and steps between two at a KL beyond repair
    limit_kl:    KL above which the KL alarm sounds, unless a plan predicts more
    limits:      levels of the other alarms

    Raises ConfigError, when made, for values that are out of range.
    """

    tis: float | None = TIS_START
    band: tuple[float, float] | None = None
    level: Ratios = "token"
    target_kl: float | None = None
    gain: float = 0.2
    narrowest: float = 0.5
    max_clipped: float = 0.5
    min_kept: float = 0.5
    slew: tuple[float, float] = (2.0, 1.05)
    dead_band: float = 1.05
    warm_up: int = 1
    patience: int = 3
    limit_kl: float = 0.03
    limits: AlarmLimits = field(default_factory=AlarmLimits)

    def __post_init__(self) -> None:
        _check_start(Thresholds(self.tis, self.band))
        if self.tis is None and self.band is None:
            raise ConfigError("tis and band are None; allowed: one to control, or ConstantThresholds(None)")
        if self.level not in LEVELS:
            raise ConfigError(f"level is {self.level!r}; allowed: {', '.join(LEVELS)}")
        _check(self, RANGES)
        pair = isinstance(self.slew, (tuple, list)) and len(self.slew) == 2 and all(map(is_number, self.slew))
        if not (pair and min(self.slew) > 1):
            raise ConfigError(f"slew is {self.slew!r}; allowed: two finite factors above 1")
        whole("warm_up", self.warm_up, 0)
        whole("patience", self.patience)

    def initial(self, plan: Plan | None = None, choice: int | str | None = None) -> LevelState:
        """The state before the first batch. A plan gives initial thresholds and the expected KL.

        choice: the plan's choice that runs; None: the one it chose

        Raises ConfigError for a plan with thresholds that cannot tighten, or without such a choice.
        """
        start = beginning(plan, self.level, Thresholds(self.tis, self.band))
        _check_start(start)
        target = self.target_kl or expected_kl(plan, choice)
        limit = max(self.limit_kl, predicted_kl(plan, choice))
        return LevelState(thresholds=start, start=start, target_kl=target, limit_kl=limit)

    def resume(self, saved: ControllerState, fresh: LevelState) -> LevelState:
        """A saved state with the beginning, the target and the bounds of `fresh`, a new state of `initial`.

        Only the KLs of another law's state count; the thresholds are the initial ones then.

        Raises ConfigError if the state controls other thresholds than these settings.
        """
        reach = saved.reach if isinstance(saved, LevelState) else 1.0
        return _at_reach(resumed(saved, fresh), min(max(reach, self.narrowest), 1.0))

    def update(self, state: LevelState, mismatch: Mismatch, can: Can = any_action) -> Update:
        """Thresholds for this very batch, the next state, and the decision with its reason.

        can: the actions that the engine has
        """
        if not usable(mismatch):
            return state.thresholds, state, no_data(mismatch, self.limits)
        seen, news = observed(state, mismatch)
        kl, target, figures = seen.kl or 0.0, seen.target_kl, (news.baseline, news.ratio)
        sounding = alarms(mismatch, kl, seen.limit_kl, self.limits)
        if seen.steps <= self.warm_up:
            reason = f"step {seen.steps} of {self.warm_up} with the initial thresholds"
            warming = Decided(Decision.WARM_UP, reason, sounding, None, *figures)
            return seen.thresholds, seen, warming
        now, wanted = seen.reach, max(self._law(kl, target), self.narrowest)
        floor, why = self._least_reach(seen, mismatch, self._spared(mismatch))
        free = self._slewed(now, max(wanted, min(floor, now)))
        band_alone = replace(seen, start=Thresholds(None, seen.start.band))  # which loses tokens
        least, _ = self._least_reach(band_alone, mismatch)
        new = _at_reach(seen, max(free, least) if least <= 1.0 else free)
        passed = self._lost(new, mismatch, 0.0)
        limit = passed or (why if new.reach > self._slewed(now, wanted) else "")
        bound = self._bound(new, self._law(news.kl, target), limit)
        broken, patience = Alarm.BROKEN in sounding, self.patience
        decision, reason = _said(seen, new, beside(kl, target, "target"), bound)
        strained, due, advice = escalation(seen.strained, bool(bound), broken, patience, can)
        decided = Decided(decision, reason + advice, sounding, due, *figures)
        return new.thresholds, replace(new, strained=strained), decided

    def _law(self, kl: float, target: float) -> float:
        """The reach that a KL asks for; it may lie below `narrowest`."""
        return 1.0 if kl <= target else float((target / kl) ** self.gain)

    def _slewed(self, now: float, wanted: float) -> float:
        """The reach after one step from `now` towards `wanted`. It never falls as `wanted` rises."""
        if wanted < 1.0 and now / self.dead_band <= wanted <= now * self.dead_band:
            return now
        return min(max(wanted, now / self.slew[0]), now * self.slew[1])

    def _spared(self, mismatch: Mismatch) -> float:
        """The share by which tightening stays away from the limits: OUTLIERS, or half the way in a small batch."""
        few = OUTLIERS * mismatch.unit(self.level) / mismatch.tokens
        return min(few, (1 - self.min_kept) / 2, self.max_clipped / 2)

    def _least_reach(self, state: LevelState, mismatch: Mismatch, spared: float = 0.0) -> tuple[float, str]:
        """The smallest reach that keeps the limits in this batch, and the limit that one step tighter would pass.

        spared: share by which it stays away from the limits. The reach is infinite if no reach keeps them.
        """
        reaches = np.geomspace(self.narrowest, 1.0, STEPS)

        def kept(reach: float) -> bool:
            return not self._lost(_at_reach(state, reach), mismatch, spared)

        least = bisect_left(reaches, True, key=kept)
        why = self._lost(_at_reach(state, float(reaches[least - 1])), mismatch, spared) if least else ""
        return float(reaches[least]) if least < STEPS else np.inf, why

    def _lost(self, state: LevelState, mismatch: Mismatch, spared: float) -> str:
        """The limit that these thresholds pass in this batch, as a sentence; empty if none."""
        most, least = self.max_clipped - spared, self.min_kept + spared
        tis, band = state.thresholds.tis, state.thresholds.band
        if tis is not None and (cut := mismatch.cut_share(tis, self.level)) > most:
            return f"{cut:.1%} of the weight would be cut away, above {most:.1%}"
        if band is not None and (kept := mismatch.kept_fraction(*band, self.level)) < least:
            return f"{kept:.1%} of the tokens would be kept, below {least:.1%}"
        return ""

    def _bound(self, new: LevelState, sure: float, limit: str) -> str:
        """The reason why the thresholds do less than this batch's KL asks for; empty if they do enough.

        limit: the limit that stopped the law
        """
        if sure >= 1.0:
            return ""
        tightest = new.reach <= self.narrowest * self.dead_band and sure < self.narrowest
        return limit or ("it is as tight as it gets" if tightest else "")


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
        _check(self, LIMIT)

    def initial(self, plan: Plan | None = None, choice: int | str | None = None) -> ControllerState:
        """The state before the first batch. A plan raises limit_kl to the KL that it predicts for `choice`."""
        target, limit = expected_kl(plan, choice), max(self.limit_kl, predicted_kl(plan, choice))
        return ControllerState(thresholds=Thresholds(self.tis, self.band), target_kl=target, limit_kl=limit)

    def resume(self, saved: ControllerState, fresh: ControllerState) -> ControllerState:
        """A saved state with the thresholds and the limit of `fresh`, a new state of `initial`."""
        return resumed(replace(saved, thresholds=fresh.thresholds), fresh)

    def update(self, state: ControllerState, mismatch: Mismatch, can: Can = any_action) -> Update:
        """Thresholds for this very batch, the next state, and the decision with its reason.

        can: the actions that the engine has
        """
        if not usable(mismatch):
            return state.thresholds, state, no_data(mismatch, self.limits)
        seen, news = observed(state, mismatch)
        sounding = alarms(mismatch, seen.kl or 0.0, seen.limit_kl, self.limits)
        strained, due, advice = escalation(state.strained, False, Alarm.BROKEN in sounding, PATIENCE, can)
        reason = f"constant thresholds; {beside(*news, 'baseline')}{advice}"
        decided = Decided(Decision.HOLD, reason, sounding, due, news.baseline, news.ratio)
        return seen.thresholds, replace(seen, strained=strained), decided


def _check_start(start: Thresholds) -> None:
    tis, band = start.tis, start.band
    if tis is not None and not 1 < tis < np.inf:
        raise ConfigError(f"tis begins at {tis!r}; allowed: above 1, or ConstantThresholds({tis!r})")
    if band is not None and not 0 < band[0] < 1 < band[1] < np.inf:
        raise ConfigError(f"band begins at {band!r}; allowed: around 1, or ConstantThresholds(None, {band!r})")


def _at_reach(state: LevelState, reach: float) -> LevelState:
    """The state with its thresholds at a reach; at 1 they are the initial ones to the last bit."""
    thresholds = state.start
    if reach < 1.0:
        tis, band = thresholds.tis, thresholds.band
        tis = None if tis is None else float(tis**reach)
        band = None if band is None else (float(band[0] ** reach), float(band[1] ** reach))
        thresholds = Thresholds(tis, band)
    return replace(state, reach=reach, thresholds=thresholds)


def _said(old: LevelState, new: LevelState, fact: str, bound: str) -> tuple[Decision, str]:
    before, after = shown(old.thresholds), shown(new.thresholds)
    what = f"{before} -> {after}" if before != after else f"{after} kept"
    if bound:
        return Decision.AT_BOUND, f"{fact}: {what}, and no tighter: {bound}"
    if old.reach == new.reach:
        return Decision.HOLD, f"{fact}: {what}"
    return Decision.TIGHTEN if new.reach < old.reach else Decision.RELAX, f"{fact}: {what}"


def shown(thresholds: Thresholds) -> str:
    """Thresholds as words for a sentence."""
    words = [] if thresholds.tis is None else [f"C {thresholds.tis:.4g}"]
    if thresholds.band is not None:
        words.append("[{:.4g}, {:.4g}]".format(*thresholds.band))
    return " and ".join(words) or "none"


def _check(law: LevelThresholds | ConstantThresholds, ranges: Mapping[str, Range]) -> None:
    """Raise ConfigError for settings of a law that are out of range. ranges: those of its fields"""
    Thresholds(law.tis, law.band)  # raises ConfigError for values that cannot be thresholds
    in_range(law, ranges)
    instance("limits", law.limits, AlarmLimits, "AlarmLimits()")


Controller = LevelThresholds | ConstantThresholds


def after_correction(
    decided: Decided, limits: AlarmLimits, correction: Correction, kv_clipped: bool, sampling: Sampling | None
) -> Decided:
    """The decision with the alarms that the thresholds did not wait for, and with the bias of the sampling as a reason.

    With the alarm UNIT_MEAN, a sampling that may bias the ratios counts, too. A known bias replaces the alarms in
    GUESSES.

    correction: the batch's, with the sums of all ranks
    kv_clipped: the rollout's engine clipped K or V
    """
    sounding, reason = {*decided.alarms, *of_correction(correction, limits)}, decided.reason
    if kv_clipped:
        sounding.add(Alarm.KV_CLIP)
    if sampling is not None and (sampling.biased or Alarm.UNIT_MEAN in sounding):
        reason = "; ".join((reason, *sampling.remarks()))
        if sampling.biased:
            sounding.difference_update(GUESSES)
    return replace(decided, reason=reason, alarms=tuple(alarm for alarm in Alarm if alarm in sounding))
