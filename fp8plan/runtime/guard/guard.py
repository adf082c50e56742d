"""Is the predicted speed arriving? If not, why, and should the engine step down?

After every rollout its tokens per second are compared with the prediction for what actually ran: its lengths, pool,
limits and precision (prediction.py). Likely causes are named from facts (causes.py). Stepping down follows a
ladder (fallback.py),

    recalibrate KV -> KV to BF16 -> all BF16        less the rungs that the running precision does not have,

and two symptoms lead to it, each counted by itself:

- Mismatch: KL over its limit. All rungs apply, in order: stale or clipped K and V scales are the cheapest thing that
  can be wrong, then FP8 KV, then FP8 weights. In BF16 nothing is left to step down to: the precision is not the cause.
- Speed: scales cost no time, so recalibration is never an answer. The other two are, but only if less FP8 is faster
  than what was achieved, and that cannot be read off the prediction for BF16 alone: whatever halves the speed of FP8, a
  slow host say, may halve BF16's too. (Qwen3-1.7B, 512 responses, three times in a row on a disturbed H200 host: FP8
  weights were predicted 2.75 s and took 4.0 to 4.6; BF16 was predicted 2.82 and took 3.2 to 4.5.) So BF16 is expected
  to miss its prediction by the factor by which this rollout missed its own, unless every cause found for the gap goes
  with the FP8 that would go (a fallback kernel): then it is expected at its predicted speed. A gap without such a cause
  is reported and leads nowhere; batches at which BF16 is predicted ahead lead to BF16 without any gap.

A rung is taken when its symptom lasted `patience` rollouts in a row. A rollout in which a kernel was compiled says
nothing about speed and is not counted. Neither is the first of an engine, if it is slow: predictions are for warm
engines, whose caches are filled and whose buffers are there. Nor is one between a limit and its release (hysteresis).
A clean one starts the count again, as a step down does. The guard never steps up: a deeper rung stays taken, also in a
saved state, and each is asked for once. It only advises: who owns the engine acts, and says so with `engine_changed`.
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
    as_fast: it was as fast as predicted or faster: no slower than low / (1 + GuardSettings.slack)
    causes:  the likely ones: of a gap first, each by cost
    action:  what to do
    reason:  why that, or why nothing
    cold:    it was the engine's first rollout, and slower than predicted: this is no sign of anything
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
        """Return plain data for a log."""
        named = [{"cause": x.cause.value, "sentence": x.sentence, "lost_s": x.lost_s} for x in self.causes]
        return asdict(self) | {"causes": named, "action": self.action.value}


class Guard:
    """The guard of one engine: it compares rollouts with the prediction, and advises.

    facts:    what runs
    settings: None: the defaults
    profile:  measurements to predict from; None: the best for the engine's GPU and vLLM's version
    warnings: remarks on the profile, for the user

    Raises ProfileError, ConfigError or CapacityError at once if the cost model cannot predict this engine.
    """

    def __init__(
        self, facts: EngineFacts, settings: GuardSettings | None = None, profile: Profile | None = None
    ) -> None:
        found = (profile, profile.remarks) if profile else load_profile(find_gpu(facts.gpu), facts.engine_version)
        self.profile, self.warnings = found
        self.settings, self.state = settings or GuardSettings(), GuardState()
        self.engine_changed(facts)

    def engine_changed(self, facts: EngineFacts) -> None:
        """Guard an engine with these facts from now on, which has just been started. Raises as the constructor does."""
        if facts.not_predicted:
            raise ConfigError(f"the guard cannot predict this engine: {'; '.join(facts.not_predicted)}")
        try:
            predict(facts, Observation(seconds=1.0, prompt_lengths=[1], response_lengths=[1]), self.profile)
        except Fp8PlanError as error:
            raise type(error)(f"the guard cannot predict this engine: {error}") from None
        self.facts, self._first = facts, True

    def after_rollout(self, observation: Observation) -> Verdict:
        """Judge a rollout; to be called once for each, in order. Raises as the cost model does."""
        self.state, verdict = update(
            self.state, observation, self.facts, self.profile, self.settings, first=self._first
        )
        self._first = False
        return verdict

    def answer(self, escalation: Escalation) -> Action:
        """Choose what to do when the thresholds of the correction can do no more: a rung not taken yet, or nothing.

        Call `took` once it is done: what failed is to be asked for again.
        """
        return answered(self.state, self.facts.precision, escalation)[1]

    def took(self, action: Action) -> None:
        """Note that a rung was taken; it is not asked for again."""
        if DEPTH[action] > DEPTH[self.state.rung]:
            self.state = GuardState(rung=action)

    def precision_for(self, planned: str) -> str:
        """Return the preset to start an engine with, now and after a restart from a saved state.

        planned: preset name of the plan
        """
        return stepped_down(planned, self.state.rung)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data, to be saved with the checkpoint as JSON."""
        return self.state.to_dict()

    def load_state_dict(self, data: Mapping[str, Any]) -> None:
        """Go on from a saved state. Raises ConfigError for anything that `state_dict` does not give."""
        self.state = GuardState.from_dict(data)


def answer(guard: Guard | None, precision: str, escalation: Escalation) -> Action:
    """Choose what an engine is to do for an escalation: as its guard says; without one, as if no rung were taken yet.

    precision: preset of the engine. Raises ConfigError for another name, where there is no guard.
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
    """Return the state and the verdict after one rollout; pure. Raises as the cost model does.

    first: it is the first rollout of a started engine
    """
    prediction = predict(facts, observation, profile)
    achieved = observation.tokens_per_s
    as_fast = achieved >= prediction.low_tokens_per_s / (1 + settings.slack)
    cold = first and not as_fast
    found = causes(Case(facts, observation, prediction, profile, settings, as_fast or cold))
    gaps = () if as_fast else tuple(x for x in found if x.gap)
    symptoms = Symptoms(
        precision=facts.precision,
        tokens_per_s=achieved,
        as_fast=as_fast,
        compiled=bool(observation.compiled_files) or any(x.cause == Cause.COMPILING for x in found),
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
        causes=found,
        action=action,
        reason=f"{speed}{'' if as_fast or cold else ': too slow'}; {why}",
        cold=cold,
    )


def _expected(
    facts: EngineFacts, prediction: Prediction, ratio: float, gaps: tuple[Found, ...], settings: GuardSettings
) -> dict[Action, float]:
    """Map rungs to tokens per second after them, as the module's docstring says; without those that do not fit the GPU.

    ratio: achieved / predicted; gaps: the causes that were found for it
    """
    expected: dict[Action, float] = {}
    for action in ladder(facts.preset):
        preset = find_precision(stepped_down(facts.precision, action))
        if action == Action.RECALIBRATE_KV or preset.name not in prediction.instead:
            continue
        gone = {"kv", "weights"} if preset.weights == "bf16" else {"kv"}
        blamed = [gone if x.cause == Cause.UNKNOWN and settings.unknown_is_fp8 else set(x.of_fp8) for x in gaps]
        cured = bool(gaps) and all(parts & gone for parts in blamed)
        expected[action] = prediction.instead[preset.name].output_tokens_per_s * (1.0 if cured else ratio)
    return expected
