"""The guard's decision: the rung of the ladder after a run of bad rollouts (watch.guard.guard has the reasons)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from typing import Any, Final

import msgspec

from fp8plan.checks import Range, in_range, whole
from fp8plan.model.plan.anchor import Anchor
from fp8plan.model.precision import PRESETS, Precision, find_precision
from fp8plan.model.risk.expected import RiskBudget
from fp8plan.runtime.watch.controller.state import Count, Escalation, restored


class Action(StrEnum):
    """The rungs of the ladder, from nothing to the deepest."""

    NONE = "none"
    RECALIBRATE_KV = "recalibrate_kv"
    KV_TO_BF16 = "kv_to_bf16"
    ALL_BF16 = "all_bf16"


DEPTH: Final = {action: depth for depth, action in enumerate(Action)}


def ladder(preset: Precision, kv_fixed: bool = False) -> tuple[Action, ...]:
    """The rungs that a precision has: scales and KV only with an FP8 KV cache, weights only with FP8 weights.

    kv_fixed: the engine keeps its KV scales, so that there is nothing to recalibrate
    """
    rungs: list[Action] = []
    if preset.kv == "fp8":
        rungs += [Action.KV_TO_BF16] if kv_fixed else [Action.RECALIBRATE_KV, Action.KV_TO_BF16]
    if preset.weights != "bf16":
        rungs.append(Action.ALL_BF16)
    return tuple(rungs)


def stepped_down(precision: str, action: Action) -> str:
    """The preset that remains of `precision` after `action` and all rungs above it."""
    preset = find_precision(precision)
    kv = "bf16" if DEPTH[action] >= DEPTH[Action.KV_TO_BF16] else preset.kv
    weights = "bf16" if action == Action.ALL_BF16 else preset.weights
    return next(p.name for p in PRESETS.values() if (p.weights, p.kv) == (weights, kv))


def answered(state: GuardState | None, precision: str, escalation: Escalation, kv_fixed: bool = False) -> Action:
    """The rung for a controller's escalation; pure. Once it is done, call `Guard.took`.

    The rung is a recalibration or, if there was one already, the next rung that changes the precision. It is NONE if
    no rung fits.

    state:    that of the engine's guard; None: it has none
    kv_fixed: as in `ladder`
    """
    recalibrate = escalation == Escalation.RECALIBRATE_KV
    rungs = _below(state or GuardState(), precision, kv_fixed)
    return next((rung for rung in rungs if (rung == Action.RECALIBRATE_KV) == recalibrate), Action.NONE)


def _below(state: GuardState, precision: str, kv_fixed: bool) -> list[Action]:
    return [rung for rung in ladder(find_precision(precision), kv_fixed) if DEPTH[rung] > DEPTH[state.rung]]


AT_LEAST_0: Final[Range] = (lambda x: x >= 0, "a number of at least 0")
RANGES: Final[dict[str, Range]] = {
    **dict.fromkeys(("slack", "margin"), AT_LEAST_0),
    "kl_limit": (lambda x: 0 < x <= inf, "a number above 0, or None"),
    "kl_release": (lambda x: 0 < x <= 1, "above 0, at most 1"),
}


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """Settings of the guard: the speed that is too slow, and the patience before a step down.

    slack:      a rollout is fast enough down to the lower end of the 90% interval / (1 + slack): cards of one kind
                differ by 2 to 6%, which the interval does not cover
    patience:   rollouts in a row with a symptom before a step down; None: verdicts never advise one, but a
                controller's escalation still gets its answer
    margin:     least gain in speed of a step down, a fraction
    kl_limit:   mean k3 per token above which there is a mismatch, a plan's limit of high risk; None: ignore it
    kl_release: share of the limit at which the mismatch is over
    anchor:     corrects the profile by rollouts that were measured on this machine; None: the run's first ones do

    Raises ConfigError for values out of range.
    """

    slack: float = 0.05
    patience: int | None = 3
    margin: float = 0.05
    kl_limit: float | None = RiskBudget().moderate_kl
    kl_release: float = 0.8
    anchor: Anchor | None = None

    def __post_init__(self) -> None:
        in_range(self, RANGES)
        if self.patience is not None:
            whole("patience", self.patience, otherwise=", or None")

    def lost_patience(self, rollouts: int) -> bool:
        """True if so many rollouts in a row are enough to act."""
        return self.patience is not None and rollouts >= self.patience


@dataclass(frozen=True, slots=True)
class GuardState:
    """The guard's memory, saved with a checkpoint.

    rung:       the deepest action that was advised
    taken:      the deepest one that was done
    slow:       slow rollouts in a row
    mismatched: rollouts in a row with KL over its limit, or K or V clipped by fixed scales
    """

    rung: Action = Action.NONE
    taken: Action = Action.NONE
    slow: Count = 0
    mismatched: Count = 0

    @property
    def pending(self) -> Action:
        """The advice that stands: it was given, and is not done."""
        return self.rung if DEPTH[self.rung] > DEPTH[self.taken] else Action.NONE

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        saved: dict[str, Any] = msgspec.to_builtins(self)
        return saved

    @staticmethod
    def from_dict(saved: Mapping[str, Any]) -> GuardState:
        """Read the result of `to_dict`. Raises ConfigError for anything else."""
        state: GuardState = restored(saved, GuardState, "the guard's state")
        return state


@dataclass(frozen=True, slots=True)
class Symptoms:
    """The grounds of a decision, from one rollout.

    precision:    preset that ran
    tokens_per_s: achieved response tokens per second
    as_fast:      it was as fast as predicted, or faster; None: slower, and not judged
    compiled:     a kernel was compiled: the speed says nothing
    expected:     rung -> expected tokens per second after it; only rungs that can help speed
    kl_k3:        mean k3 per token between trainer and rollout; None: not known
    cold:         it was the engine's first, and slow: the speed says nothing
    kv_fixed:     the engine keeps its KV scales
    kv_clipped:   layers whose K or V these clip
    """

    precision: str
    tokens_per_s: float
    as_fast: bool | None
    compiled: bool
    expected: Mapping[Action, float]
    kl_k3: float | None
    cold: bool = False
    kv_fixed: bool = False
    kv_clipped: Sequence[str] = ()

    @property
    def excused(self) -> bool:
        return self.compiled or self.cold


def decide(state: GuardState, symptoms: Symptoms, settings: GuardSettings) -> tuple[GuardState, Action, str]:
    """The next state, the action, and its reason; pure."""
    rungs = _below(state, symptoms.precision, symptoms.kv_fixed)
    gains = {rung: symptoms.expected[rung] / symptoms.tokens_per_s for rung in rungs if rung in symptoms.expected}
    best, least = max(gains.values(), default=0.0), 1 + settings.margin
    if not symptoms.excused:
        state = replace(state, slow=_counted(state.slow, best, least, 1.0))
    mismatch, state = _mismatch(symptoms, settings, state)
    wanted, waiting = {}, []
    if best > least and not symptoms.excused:
        faster = next(rung for rung, gain in gains.items() if gain > least)
        what = f"{symptoms.expected[faster]:,.0f} tokens/s are expected after {faster}"
        if settings.lost_patience(state.slow):
            wanted[faster] = f"{what}, in {state.slow} rollouts"
        else:
            waiting.append(f"{what}: {_waits(state.slow, 'it is taken', settings)}")
    if mismatch is not None:
        what = mismatch
        if not rungs:
            waiting.append(f"{what}, and there is nothing left to step down to from {symptoms.precision}")
        elif settings.lost_patience(state.mismatched):
            wanted[rungs[0]] = f"{what}, in {state.mismatched} rollouts"
        else:
            waiting.append(f"{what}: {_waits(state.mismatched, rungs[0], settings)}")
    if wanted:
        action = max(wanted, key=DEPTH.__getitem__)
        return GuardState(rung=action, taken=state.taken), action, f"{action}, because {' and '.join(wanted.values())}"
    return state, Action.NONE, "; ".join(waiting) or _nothing_to_do(symptoms, gains)


def _mismatch(symptoms: Symptoms, settings: GuardSettings, state: GuardState) -> tuple[str | None, GuardState]:
    """The sign of a mismatch in words, None without one; and the state with the count of such rollouts."""
    if symptoms.kv_clipped:
        layers = ", ".join(symptoms.kv_clipped[:3])
        what = f"fixed KV scales clip {len(symptoms.kv_clipped)} layer(s) ({layers})"
        return what, replace(state, mismatched=state.mismatched + 1)
    kl, limit = symptoms.kl_k3, settings.kl_limit
    if kl is None or limit is None:
        return None, replace(state, mismatched=0) if symptoms.kv_fixed else state  # no layer clips any more
    state = replace(state, mismatched=_counted(state.mismatched, kl, limit, limit * settings.kl_release))
    return (f"KL {kl:.3g} is over its limit {limit:g}" if kl > limit else None), state


def _counted(count: int, value: float, limit: float, release: float) -> int:
    if value > limit:
        return count + 1
    return 0 if value <= release else count


def _nothing_to_do(symptoms: Symptoms, gains: Mapping[Action, float]) -> str:
    if symptoms.compiled:
        return "a kernel was compiled, so this rollout is not counted"
    if symptoms.cold:
        return "the engine's first rollout is a cold start, so it is not counted"
    if symptoms.as_fast is None:
        return "it is not judged: no rollouts of this machine have corrected the prediction so far"
    if symptoms.as_fast:
        return "nothing to do"
    if not gains:
        return f"there is nothing faster to step down to from {symptoms.precision}"
    listed = ", ".join(f"{symptoms.expected[rung]:,.0f} tokens/s after {rung}" for rung in gains)
    return f"no step down, because none is expected to be much faster ({listed})"


def _waits(rollouts: int, what: str, settings: GuardSettings) -> str:
    """The rest of the guard's patience before an action, in words."""
    if settings.patience is None:
        return "this guard only judges (patience is None)"
    return f"such rollout {rollouts} of {settings.patience} before {what}"
