"""The guard of an engine: it compares each rollout with its prediction, names causes, and advises a step down.

A profile knows a GPU. It does not know this machine, or the trainer's load on it. The host's loop is timed when an
engine starts (runtime.apply.worker.facts). And measured rollouts correct the profile: the plan's anchor, or else FIRST
rollouts of this run. Until then no rollout is called slow because of the profile alone.

The prediction is for what the engine ran: lengths, pool, limits, precision (observation.py). Causes follow from facts
(causes.py). Stepping down follows a ladder (fallback.py),

    recalibrate KV -> KV to BF16 -> all BF16        less the rungs that the running precision does not have,

and two symptoms lead to it, each with its own count:

- Mismatch: KL over its limit. All rungs apply in order, the cheapest first: K and V scales, FP8 KV, FP8 weights. In
  BF16 there is no lower rung: the precision is not the cause.
- Speed: recalibration does not apply, because scales cost no time. The other rungs apply if less FP8 would be faster
  than this rollout. A slow host may slow BF16 as much as FP8, so BF16 is expected to miss its prediction by the factor
  by which this rollout missed its own. If every cause of the gap belongs to the FP8 that would go (a fallback kernel),
  BF16 is expected at its predicted speed. If BF16 is predicted to be faster, no gap is needed.

A rung is due once its symptom has lasted `patience` rollouts in a row. Not counted are rollouts that compiled a kernel,
a slow first rollout of an engine (predictions are for warm ones), and those between a limit and its release
(hysteresis). A clean rollout starts the count again, as a step down does. The guard never steps up, and asks for each
rung once, also from a saved state. It only advises: the owner of the engine acts, and reports it by `engine_changed`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Final, NamedTuple

from fp8plan.errors import ConfigError, Fp8PlanError, warn
from fp8plan.model.cost.front import front_kernels
from fp8plan.model.hardware import find_gpu
from fp8plan.model.plan.anchor import anchored, corrected
from fp8plan.model.precision import find_precision
from fp8plan.model.profile.library import load_profile, with_kernels
from fp8plan.model.profile.profile import PACES, Profile
from fp8plan.model.validate.records import record_of
from fp8plan.model.validate.validate import simulated
from fp8plan.runtime.watch.guard.causes import Case, Cause, LikelyCause, causes, machine
from fp8plan.runtime.watch.guard.fallback import (
    DEPTH,
    Action,
    GuardSettings,
    GuardState,
    Symptoms,
    decide,
    ladder,
    stepped_down,
)
from fp8plan.runtime.watch.guard.observation import (
    EngineFacts,
    Observation,
    Prediction,
    predict,
    with_pool,
)
from fp8plan.runtime.watch.guard.rollout_record import rollout_fields

FIRST: Final = 3  # rollouts of the run that correct the profile: one odd one does not move their median
# A front's coefficients that follow its machine. Those of server-http follow the host's pace.
PER_TOKEN: Final = r"front\.(?!server-http).*\.(token|thread)_seconds"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The guard's verdict on one rollout. Speeds are in response tokens per second, low and high a 90% interval.

    ratio:   achieved / predicted speed
    as_fast: it reached low / (1 + GuardSettings.slack). None: it did not, and nothing has corrected the profile yet
    causes:  the likely ones: those of a gap first, each by cost
    action:  the advice
    reason:  the reason for the action, or for none
    cold:    it was the engine's first rollout, and slower than predicted, which is no sign of anything
    anchored: measured rollouts had corrected the prediction
    """

    tokens_per_s: float
    predicted_tokens_per_s: float
    low_tokens_per_s: float
    high_tokens_per_s: float
    ratio: float
    as_fast: bool | None
    causes: tuple[LikelyCause, ...]
    action: Action
    reason: str
    cold: bool = False
    anchored: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a log."""
        named = [{"cause": each.cause, "sentence": each.sentence, "lost_s": each.lost_s} for each in self.causes]
        return asdict(self) | {"causes": named}


class Guard:
    """The guard of one engine: it compares rollouts with the prediction, and advises.

    facts:    those of the engine
    settings: None: the defaults
    profile:  measurements to predict from, before a correction; None: the best for the engine's GPU and vLLM's version
    warnings: remarks on the profile, for the user
    rollouts: rollout records of the run's first rollouts, which correct the profile; empty with an anchor in `settings`

    Raises ProfileError, ConfigError or CapacityError at once if the cost model cannot predict this engine.
    """

    def __init__(
        self, facts: EngineFacts, settings: GuardSettings | None = None, profile: Profile | None = None
    ) -> None:
        known, self.warnings = (
            (profile, profile.remarks) if profile else load_profile(find_gpu(facts.gpu), facts.engine_version)
        )
        self.settings, self.state = settings or GuardSettings(), GuardState()
        self._alone = known.on_host(facts.host_loop_s)
        self.profile = corrected(known, self.settings.anchor, facts.host_loop_s)
        self.rollouts: list[dict[str, Any]] = []
        self.engine_changed(facts)

    def engine_changed(self, facts: EngineFacts) -> None:
        """Guard a newly started engine with these facts from now on. Raises as the constructor does."""
        if facts.not_predicted:
            raise ConfigError(f"the guard cannot predict this engine: {'; '.join(facts.not_predicted)}")
        try:
            predict(facts, Observation(seconds=1.0, prompt_lengths=[1], response_lengths=[1]), self.profile)
        except Fp8PlanError as error:
            raise type(error)(f"the guard cannot predict this engine: {error}") from None
        self.facts, self._first = facts, True
        self.state = in_effect(self.state, facts.precision)

    def after_rollout(self, observation: Observation) -> Verdict:
        """Judge a rollout. Call it once for each, in order. Raises as the cost model does."""
        self.state, verdict = update(self.state, observation, self.facts, self.profile, self.settings, self._first)
        if self.settings.anchor is None and not self._first and teaches(observation, verdict):
            ran = with_pool(self.facts.setup, observation.kv_cache_tokens)
            self.rollouts.append(rollout_fields(observation, replace(self.facts, limits=ran.limits)))
            verdict = self._learnt(verdict)
        self._first = False
        return verdict

    def _learnt(self, verdict: Verdict) -> Verdict:
        """The verdict on the last of the first rollouts, with a finding if the profile is off by more than it says."""
        shares = self._correct(self.rollouts)
        if not shares:
            return verdict
        slack, predicted = 1 + self.settings.slack, verdict.predicted_tokens_per_s
        low, high = verdict.low_tokens_per_s / slack / predicted, verdict.high_tokens_per_s * slack / predicted
        finding = machine(self.facts, shares, low, high)
        if finding is None:
            return verdict
        warn(finding.sentence)
        return replace(verdict, causes=(*verdict.causes, finding), reason=f"{verdict.reason}; {finding.sentence}")

    def _correct(self, rows: list[dict[str, Any]]) -> list[float]:
        """Correct the profile by rollouts, if they are FIRST or more.

        Their median sets the pace of GPU, host and front alike, because nothing tells them apart. It may be far from
        the profile, and an anchor would take it for an outlier. The anchor then narrows the interval.

        Returns their achieved / predicted speeds by the profile alone, or an empty list. Raises ConfigError for
        impossible rows.
        """
        records = [record_of(row, number, f"the guard's rollout {number}") for number, row in enumerate(rows, start=1)]
        if len(records) < FIRST:
            anchor, paced, shares = None, self._alone, []
        else:
            shares = [simulated(record, self._alone).rollout.makespan_s / record.seconds for record in records]
            whole = with_kernels(self._alone, find_gpu(self.facts.gpu), front_kernels(self.facts.inside))
            known, share = whole.coefficients, median(shares)
            paced_names = [name for name in known if name in PACES or re.fullmatch(PER_TOKEN, name)]
            paced = replace(whole, coefficients=known | {name: known[name] / share for name in paced_names})
            anchor = anchored(paced, self.facts.setup.shape, self.facts.engine_version, records)
        self.rollouts, self.settings = rows, replace(self.settings, anchor=anchor)
        self.profile = anchor.applied(paced) if anchor else paced
        return shares

    def took(self, action: Action) -> None:
        """Note an action that was done; it is not asked for again."""
        if DEPTH[action] > DEPTH[self.state.rung]:
            self.state = GuardState(rung=action, taken=action)
        elif DEPTH[action] > DEPTH[self.state.taken]:
            self.state = replace(self.state, taken=action)

    def standing(self, verdict: Verdict) -> Verdict:
        """The verdict with the advice that stands: its own or that of an earlier one, until it is done."""
        pending = self.state.pending
        if DEPTH[verdict.action] > DEPTH[self.state.taken] or verdict.action == pending:
            return verdict
        reason = verdict.reason
        if pending != Action.NONE:
            reason = f"{reason}; {pending} was advised before, and is not done"
        return replace(verdict, action=pending, reason=reason)

    def precision_for(self, planned: str) -> str:
        """The preset to start an engine with, also after a restart from a saved state. planned: the plan's preset"""
        return stepped_down(planned, self.state.rung)

    def state_dict(self) -> dict[str, Any]:
        """The state to save with a checkpoint, as plain data for JSON."""
        return self.state.to_dict() | {"rollouts": list(self.rollouts)}

    def load_state_dict(self, data: Mapping[str, Any]) -> None:
        """Go on from a saved state. Raises ConfigError for anything but a result of `state_dict`.

        Saved rollouts of another GPU do not count, and none does if the settings have an anchor.
        """
        rows: Any = data.get("rollouts")
        state = GuardState.from_dict({name: value for name, value in data.items() if name != "rollouts"})
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ConfigError(f"rollouts of the guard's state are {rows!r:.60}; allowed: a list of rollout records")
        if self.settings.anchor is None or self.rollouts:
            same = {"model": self.facts.model}  # the folder may have moved
            self._correct([row | same for row in rows if row.get("gpu") == self.facts.gpu])
        self.state = in_effect(state, self.facts.precision)


class Judged(NamedTuple):
    """A rollout's observation, and the verdict on it. off: why one of the two is missing."""

    observation: Observation | None = None
    verdict: Verdict | None = None
    off: str | None = None


def judged(guard: Guard | None, observe: Callable[[], Observation | None]) -> Judged:
    """Let the guard judge an observation. An error goes into `off`, as it must not cost the rollout."""
    observation = None
    try:
        observation = observe()
        return Judged(observation, None if guard is None or observation is None else guard.after_rollout(observation))
    except Exception as error:
        return Judged(observation, None, f"the last rollout cannot be compared: {error}")


def teaches(observation: Observation, verdict: Verdict) -> bool:
    """True for a rollout that may correct the prediction: no disturbance and no other FP8 kernel explains its gap."""
    disturbed = any(each.gap and each.cause in (Cause.PREEMPTION, Cause.PREFIX) for each in verdict.causes)
    return verdict.as_fast is not False and not observation.compiled_files and not disturbed


def in_effect(state: GuardState, precision: str) -> GuardState:
    """The state with `taken` as the running precision shows it. A recalibration leaves no trace there.

    A step down that a saved state has taken is not in effect in an engine that was started anew. One that was only
    advised is in effect if somebody has started a safer engine.
    """
    steps = [Action.KV_TO_BF16, Action.ALL_BF16]
    if state.rung in steps and stepped_down(precision, state.rung) == precision:
        return replace(state, taken=state.rung)
    if state.taken in steps and stepped_down(precision, state.taken) != precision:
        return replace(state, taken=Action.NONE)
    return state


def update(
    state: GuardState,
    observation: Observation,
    facts: EngineFacts,
    profile: Profile,
    settings: GuardSettings,
    first: bool = False,
) -> tuple[GuardState, Verdict]:
    """The state and the verdict after one rollout; pure. Raises as the cost model does.

    profile: as corrected by the anchor of the settings, if they have one
    first:   it is the first rollout of a started engine

    Without an anchor a slow rollout is judged only if FP8 runs on another kernel than the profile was measured with.
    """
    prediction = predict(facts, observation, profile)
    achieved = observation.tokens_per_s
    fast = achieved >= prediction.low_tokens_per_s / (1 + settings.slack)
    cold = first and not fast
    likely = causes(Case(facts, observation, prediction, profile, settings.anchor is not None, fast or cold))
    gaps = () if fast else tuple(each for each in likely if each.gap)
    judged = fast or cold or settings.anchor is not None or any(each.of_fp8 for each in gaps)
    as_fast = fast if judged else None
    symptoms = Symptoms(
        precision=facts.precision,
        tokens_per_s=achieved,
        as_fast=as_fast,
        compiled=bool(observation.compiled_files),
        expected=_expected(facts, prediction, achieved / prediction.tokens_per_s, gaps),
        kl_k3=observation.kl_k3,
        cold=cold,
        kv_fixed=facts.kv_fixed,
        kv_clipped=observation.kv_clipped,
    )
    state, action, why = decide(state, symptoms, settings)
    speed = (
        f"{achieved:,.0f} tokens/s, predicted for what ran are {prediction.tokens_per_s:,.0f} "
        f"({prediction.low_tokens_per_s:,.0f} to {prediction.high_tokens_per_s:,.0f})"
    )
    return state, Verdict(
        tokens_per_s=achieved,
        predicted_tokens_per_s=prediction.tokens_per_s,
        low_tokens_per_s=prediction.low_tokens_per_s,
        high_tokens_per_s=prediction.high_tokens_per_s,
        ratio=achieved / prediction.tokens_per_s,
        as_fast=as_fast,
        causes=likely,
        action=action,
        reason=f"{speed}{': too slow' if judged and not (fast or cold) else ''}; {why}",
        cold=cold,
        anchored=settings.anchor is not None,
    )


def _expected(
    facts: EngineFacts, prediction: Prediction, ratio: float, gaps: tuple[LikelyCause, ...]
) -> dict[Action, float]:
    """Rungs -> tokens per second after them, as the module's docstring says; without those that do not fit the GPU.

    ratio: achieved / predicted; gaps: the causes of the gap
    """
    expected: dict[Action, float] = {}
    for action in ladder(facts.preset):
        preset = find_precision(stepped_down(facts.precision, action))
        if action == Action.RECALIBRATE_KV or preset.name not in prediction.instead:
            continue
        gone = {"kv", "weights"} if preset.weights == "bf16" else {"kv"}
        cured = bool(gaps) and all(gone.intersection(gap.of_fp8) for gap in gaps)
        expected[action] = prediction.instead[preset.name].output_tokens_per_s * (1.0 if cured else ratio)
    return expected
