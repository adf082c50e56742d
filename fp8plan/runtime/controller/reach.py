"""The mechanism of LevelThresholds and AdaptiveThresholds: thresholds that tighten towards 1, and relax again.

`reach` is the distance of the thresholds from 1, as a share of the initial distance: log C = reach x log C0, and both
ends of a band likewise. So one law serves C = 2, a band of [0.5, 5] and a geometric band of [0.999, 1.001]. A law asks
for a reach, which is followed within bounds:

- a dead band, and a slew limit: fast to tighten, slow to relax;
- two limits in each batch, at the level of the thresholds: at most `max_clipped` of the weight is cut away, and at
  least `min_kept` of the tokens stay. Tightening stops short of them.

If a batch still passes the limits, a band widens at once, just far enough to keep `min_kept`, and never beyond its
beginning. If even the initial band keeps less, band and C stay: they would otherwise be widest under the worst
mismatch.

The decision is AT_BOUND if the KL asks for more than a limit allows, or than the narrowest thresholds do. After
`patience` such steps in a row the decision also escalates.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np

from fp8plan.checks import Range
from fp8plan.errors import ConfigError
from fp8plan.runtime.controller.alarms import Alarm
from fp8plan.runtime.controller.state import (
    AlarmLimits,
    ControllerState,
    Decided,
    Decision,
    ReachState,
    Update,
    alarms,
    check_law,
    escalation,
    no_data,
    observed,
    strain,
    usable,
)
from fp8plan.runtime.correction.settings import Thresholds

if TYPE_CHECKING:
    from fp8plan.runtime.mismatch.metrics import Mismatch, Ratios

LEVELS: Final = ("token", "sequence", "geometric")
STEPS: Final = 33  # values of reach, from the narrowest to 1, of which the limits choose one: coarser than one token
OUTLIERS: Final = 2  # tokens, or sequences, by which tightening stays away from the limits: one of them moves nothing
RANGES: Final[dict[str, Range]] = {
    "target_kl": (lambda x: 0 < x < np.inf, "a finite number above 0, or None"),
    "gain": (lambda x: 0 < x < np.inf, "a finite number above 0"),
    "narrowest": (lambda x: 0 < x <= 1, "a share above 0, 1 at most"),
}


class Demand(NamedTuple):
    """A law's answer to a batch.

    reach:    the reach that the law asks for; it may lie below `narrowest`, and is 1 at most
    sure:     the same for this batch without the memory of those before; thresholds are at a bound only if both ask
    fact:     the figures behind it, as a clause
    beyond:   True if no threshold answers this KL: then steps count towards an escalation
    figures:  fields of Decided
    """

    reach: float
    sure: float
    fact: str
    beyond: bool = False
    figures: dict[str, Any] = {}  # noqa: RUF012


@dataclass(frozen=True, slots=True)
class Tightening:
    """The settings and the update of a law that asks for a reach; a law adds its `_demand`."""

    tis: float | None = 2.0
    band: tuple[float, float] | None = None
    level: Ratios = "token"
    target_kl: float | None = None
    gain: float = 0.2
    narrowest: float = 0.4
    max_clipped: float = 0.5
    min_kept: float = 0.5
    slew: tuple[float, float] = (2.0, 1.05)
    dead_band: float = 1.05
    warm_up: int = 1
    patience: int = 3
    limit_kl: float = 0.03
    limits: AlarmLimits = field(default_factory=AlarmLimits)

    def __post_init__(self) -> None:
        check_start(self.tis, self.band)
        if self.tis is None and self.band is None:
            raise ConfigError("tis and band are None; allowed: one to control, or ConstantThresholds(None)")
        if self.level not in LEVELS:
            raise ConfigError(f"level is {self.level!r}; allowed: {', '.join(LEVELS)}")
        check_law(self, RANGES)

    def _demand(self, state: Any, mismatch: Mismatch) -> Demand:
        """The law. state: with this batch in its smoothed KL"""
        raise NotImplementedError

    def update(self, state: Any, mismatch: Mismatch) -> Update:
        """Thresholds for this very batch, the next state, and the decision with its reason."""
        if not usable(mismatch):
            return Thresholds(state.tis, state.band), state, no_data(mismatch, self.limits)
        seen = observed(state, mismatch)
        sounding = alarms(mismatch, seen.kl or 0.0, seen.limit_kl, self.limits)
        demand = self._demand(seen, mismatch)
        if seen.steps <= self.warm_up:
            reason = f"step {seen.steps} of {self.warm_up} with the initial thresholds"
            warming = Decided(Decision.WARM_UP, reason, sounding, **demand.figures)
            return Thresholds(seen.tis, seen.band), seen, warming
        now, wanted = seen.reach, max(demand.reach, self.narrowest)
        floor, why = self._least_reach(seen, mismatch, self._spared(mismatch))
        free = self._slewed(now, max(wanted, min(floor, now)))
        least, _ = self._least_reach(replace(seen, start_tis=None), mismatch)  # of the band, which loses tokens
        new = at_reach(seen, max(free, least) if least <= 1.0 else free)
        passed = self._lost(new, mismatch, 0.0)
        bound = self._bound(new, demand.sure, passed or (why if new.reach > self._slewed(now, wanted) else ""))
        strained = strain(seen.strained, bool(bound) or demand.beyond, Alarm.BROKEN in sounding, self.patience)
        escalate = escalation(strained, self.patience)
        decided = Decided(*_said(seen, new, demand, bound), sounding, escalate, **demand.figures)
        return Thresholds(new.tis, new.band), replace(new, strained=strained), decided

    def _slewed(self, now: float, wanted: float) -> float:
        """The reach after one step from `now` towards `wanted`. It never falls as `wanted` rises."""
        if wanted < 1.0 and now / self.dead_band <= wanted <= now * self.dead_band:
            return now
        return min(max(wanted, now / self.slew[0]), now * self.slew[1])

    def _spared(self, mismatch: Mismatch) -> float:
        """The share by which tightening stays away from the limits: OUTLIERS, or half the way in a small batch."""
        few = OUTLIERS * mismatch.unit(self.level) / mismatch.tokens
        return min(few, (1 - self.min_kept) / 2, self.max_clipped / 2)

    def _least_reach(self, state: ReachState, mismatch: Mismatch, spared: float = 0.0) -> tuple[float, str]:
        """The smallest reach that keeps the limits in this batch, and the limit that one step tighter would pass.

        spared: share by which it stays away from the limits. The reach is infinite if no reach keeps them.
        """
        reaches = np.geomspace(self.narrowest, 1.0, STEPS)

        def kept(reach: float) -> bool:
            return not self._lost(at_reach(state, reach), mismatch, spared)

        least = bisect_left(reaches, True, key=kept)
        why = self._lost(at_reach(state, float(reaches[least - 1])), mismatch, spared) if least else ""
        return float(reaches[least]) if least < STEPS else np.inf, why

    def _lost(self, state: ReachState, mismatch: Mismatch, spared: float) -> str:
        """The limit that these thresholds pass in this batch, as a sentence; empty if none."""
        most, least = self.max_clipped - spared, self.min_kept + spared
        if state.tis is not None and (cut := mismatch.cut_share(state.tis, self.level)) > most:
            return f"{cut:.1%} of the weight would be cut away, above {most:.1%}"
        if state.band is not None and (kept := mismatch.kept_fraction(*state.band, self.level)) < least:
            return f"{kept:.1%} of the tokens would be kept, below {least:.1%}"
        return ""

    def _bound(self, new: ReachState, sure: float, limit: str) -> str:
        """The reason why the thresholds do less than this batch's KL asks for; empty if they do enough.

        limit: the limit that stopped the law
        """
        if sure >= 1.0:
            return ""
        tightest = new.reach <= self.narrowest * self.dead_band and sure < self.narrowest
        return limit or ("it is as tight as it gets" if tightest else "")


def check_start(tis: float | None, band: tuple[float, float] | None) -> None:
    """Raise ConfigError for thresholds that cannot tighten towards 1."""
    Thresholds(tis, band)  # raises ConfigError for values that cannot be thresholds
    if tis is not None and not 1 < tis < np.inf:
        raise ConfigError(f"tis begins at {tis!r}; allowed: above 1, or ConstantThresholds({tis!r})")
    if band is not None and not 0 < band[0] < 1 < band[1] < np.inf:
        raise ConfigError(f"band begins at {band!r}; allowed: around 1, or ConstantThresholds(None, {band!r})")


State = TypeVar("State", bound=ReachState)


def at_reach(state: State, reach: float) -> State:
    """The state with its thresholds at a reach; at 1 they are the initial ones to the last bit."""
    tis, band = state.start_tis, state.start_band
    if reach < 1.0:
        tis = None if tis is None else float(tis**reach)
        band = None if band is None else (float(band[0] ** reach), float(band[1] ** reach))
    return replace(state, reach=reach, tis=tis, band=band)


def _said(old: ReachState, new: ReachState, demand: Demand, bound: str) -> tuple[Decision, str]:
    """The decision and a sentence with the figures behind it."""
    before, after = shown(old), shown(new)
    what = f"{before} -> {after}" if before != after else f"{after} kept"
    if bound:
        return Decision.AT_BOUND, f"{demand.fact}: {what}, and no tighter: {bound}"
    if old.reach == new.reach:
        return Decision.AT_BOUND if demand.beyond else Decision.HOLD, f"{demand.fact}: {what}"
    return Decision.TIGHTEN if new.reach < old.reach else Decision.RELAX, f"{demand.fact}: {what}"


def shown(state: ControllerState) -> str:
    """The controlled thresholds as words for a sentence."""
    tis = [] if state.tis is None else [f"C {state.tis:.4g}"]
    return " and ".join(tis + ([] if state.band is None else [f"[{state.band[0]:.4g}, {state.band[1]:.4g}]"])) or "none"
