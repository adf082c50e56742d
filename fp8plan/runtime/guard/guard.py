"""The guard of an engine: it compares each rollout with its prediction, names causes, and advises a step down.

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

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fp8plan.errors import ConfigError, Fp8PlanError
from fp8plan.model.hardware import find_gpu
from fp8plan.model.precision import precision as find_precision
from fp8plan.model.profile.library import load_profile
from fp8plan.model.profile.profile import Profile
from fp8plan.runtime.controller.state import Escalation
from fp8plan.runtime.guard.causes import Case, Cause, Found, causes
from fp8plan.runtime.guard.fallback import (
    DEPTH,
    Action,
    GuardSettings,
    GuardState,
    Symptoms,
    answered,
    decide,
    ladder,
    stepped_down,
)
from fp8plan.runtime.guard.observation import EngineFacts, Observation, Prediction, predict


@dataclass(frozen=True, slots=True)
class Verdict:
    """The guard's verdict on one rollout. Speeds are in response tokens per second, low and high a 90% interval.

    ratio:   achieved / predicted speed
    as_fast: it was no slower than low / (1 + GuardSettings.slack)
    causes:  the likely ones: those of a gap first, each by cost
    action:  the advice
    reason:  the reason for the action, or for none
    cold:    it was the engine's first rollout, and slower than predicted, which is no sign of anything
    """

    tokens_per_s: float
    predicted_tokens_per_s: float
    low_tokens_per_s: float
    high_tokens_per_s: float
    ratio: float
    as_fast: bool
    causes: tuple[Found, ...]
    action: Action
    reason: str
    cold: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a log."""
        named = [{"cause": each.cause.value, "sentence": each.sentence, "lost_s": each.lost_s} for each in self.causes]
        return asdict(self) | {"causes": named, "action": self.action.value}


class Guard:
    """The guard of one engine: it compares rollouts with the prediction, and advises.

    facts:    those of the engine
    settings: None: the defaults
    profile:  measurements to predict from; None: the best for the engine's GPU and vLLM's version
    warnings: remarks on the profile, for the user

    Raises ProfileError, ConfigError or CapacityError at once if the cost model cannot predict this engine.
    """

    def __init__(
        self, facts: EngineFacts, settings: GuardSettings | None = None, profile: Profile | None = None
    ) -> None:
        self.profile, self.warnings = (
            (profile, profile.remarks) if profile else load_profile(find_gpu(facts.gpu), facts.engine_version)
        )
        self.settings, self.state = settings or GuardSettings(), GuardState()
        if self.settings.anchor is not None:
            self.profile = self.settings.anchor.applied(self.profile)
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

    def after_rollout(self, observation: Observation) -> Verdict:
        """Judge a rollout. Call it once for each, in order. Raises as the cost model does."""
        self.state, verdict = update(self.state, observation, self.facts, self.profile, self.settings, self._first)
        self._first = False
        return verdict

    def answer(self, escalation: Escalation) -> Action:
        """The action for an escalation of the controller: a new rung, or NONE.

        Call `took` once it is done. A rung that failed is then asked for again.
        """
        return answered(self.state, self.facts.precision, escalation)[1]

    def took(self, action: Action) -> None:
        """Note an action that was done; it is not asked for again."""
        if DEPTH[action] > DEPTH[self.state.rung]:
            self.state = GuardState(rung=action)

    def precision_for(self, planned: str) -> str:
        """The preset to start an engine with, also after a restart from a saved state. planned: the plan's preset"""
        return stepped_down(planned, self.state.rung)

    def state_dict(self) -> dict[str, Any]:
        """The state to save with a checkpoint, as plain data for JSON."""
        return self.state.to_dict()

    def load_state_dict(self, data: Mapping[str, Any]) -> None:
        """Go on from a saved state. Raises ConfigError for anything but a result of `state_dict`."""
        self.state = GuardState.from_dict(data)


def answer(guard: Guard | None, precision: str, escalation: Escalation) -> Action:
    """The action of an engine for an escalation: its guard's answer, or the first rung without a guard.

    precision: preset of the engine. Raises ConfigError for another name, without a guard.
    """
    return answered(GuardState(), precision, escalation)[1] if guard is None else guard.answer(escalation)


def update(
    state: GuardState,
    observation: Observation,
    facts: EngineFacts,
    profile: Profile,
    settings: GuardSettings,
    first: bool = False,
) -> tuple[GuardState, Verdict]:
    """The state and the verdict after one rollout; pure. Raises as the cost model does.

    first: it is the first rollout of a started engine
    """
    prediction = predict(facts, observation, profile)
    achieved = observation.tokens_per_s
    as_fast = achieved >= prediction.low_tokens_per_s / (1 + settings.slack)
    cold = first and not as_fast
    likely = causes(Case(facts, observation, prediction, profile, settings, as_fast or cold))
    gaps = () if as_fast else tuple(each for each in likely if each.gap)
    symptoms = Symptoms(
        precision=facts.precision,
        tokens_per_s=achieved,
        as_fast=as_fast,
        compiled=bool(observation.compiled_files) or any(each.cause == Cause.COMPILING for each in likely),
        expected=_expected(facts, prediction, achieved / prediction.tokens_per_s, gaps, settings),
        kl_k3=observation.kl_k3,
        cold=cold,
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
        reason=f"{speed}{'' if as_fast or cold else ': too slow'}; {why}",
        cold=cold,
    )


def _expected(
    facts: EngineFacts, prediction: Prediction, ratio: float, gaps: tuple[Found, ...], settings: GuardSettings
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
        assumed = gone if settings.unknown_is_fp8 else set()
        blamed = [assumed if gap.cause == Cause.UNKNOWN else set(gap.of_fp8) for gap in gaps]
        cured = bool(gaps) and all(parts & gone for parts in blamed)
        expected[action] = prediction.instead[preset.name].output_tokens_per_s * (1.0 if cured else ratio)
    return expected
