"""The prediction for the very work that ran: its lengths, in the pool that was measured, under the limits the engine
really has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fp8plan.errors import CapacityError, ConfigError
from fp8plan.model.precision import PRESETS, Precision
from fp8plan.model.profile.profile import Profile
from fp8plan.model.rollout import Rollout, step_batch
from fp8plan.model.schedule.scheduler import Schedule
from fp8plan.model.setup import EngineSetup
from fp8plan.model.simulate import Simulated, simulate
from fp8plan.runtime.guard.observation import EngineFacts, Observation


@dataclass(frozen=True, slots=True)
class Prediction:
    """The cost model's prediction for the work that ran. Speeds are in response tokens per second, low and high a 90%
    interval.

    setup:   the engine that ran, in the pool that it had
    ran:     the whole prediction for it
    instead: preset name -> rollout of the same work in a precision with less FP8, in the pool which that one gets; left
             out where it does not fit
    """

    setup: EngineSetup
    ran: Simulated
    instead: dict[str, Rollout]

    @property
    def rollout(self) -> Rollout:
        """The predicted rollout: its makespan, preemptions, parts and tail."""
        return self.ran.rollout

    @property
    def makespan_s(self) -> float:
        return self.rollout.makespan_s

    @property
    def tokens_per_s(self) -> float:
        return self.rollout.output_tokens_per_s

    @property
    def low_tokens_per_s(self) -> float:
        return self.rollout.output_tokens / self.rollout.makespan_high_s

    @property
    def high_tokens_per_s(self) -> float:
        return self.rollout.output_tokens / self.rollout.makespan_low_s

    @property
    def mean_batch(self) -> float:
        """Responses that decode together, averaged over the steps."""
        return self.rollout.output_tokens / self.rollout.num_steps / len(self.ran.schedules)

    @property
    def kv_cache_tokens(self) -> int:
        """The KV pool that the prediction is made for, in tokens."""
        return self.ran.memory.kv_cache_tokens

    def longest_step_s(self) -> float:
        """The longest predicted step, in seconds."""
        return max(float(self.ran.model.seconds(step_batch(plan)).max()) for plan in self.ran.schedules)


def predict(facts: EngineFacts, observation: Observation, profile: Profile) -> Prediction:
    """Predict what ran, and the same work with less FP8. Raises as the parts of the cost model do."""
    pool, setup = observation.kv_cache_tokens, facts.setup
    if pool is not None:  # less vLLM's null block
        setup = with_blocks(setup, setup.blocks_in(pool) - 1)
    ran = again(setup, observation, profile)
    instead = {}
    for preset in fallbacks(facts.setup.precision):
        try:
            other = again(replace(facts.setup, precision=preset), observation, profile, ran.schedules)
        except CapacityError:
            continue
        instead[preset.name] = other.rollout
    return Prediction(setup, ran, instead)


def again(
    setup: EngineSetup, observation: Observation, profile: Profile, known: Sequence[Schedule] | None = None
) -> Simulated:
    """Predict the observed work on an engine. known: schedules of the same work, to be taken over where they hold"""
    if reason := setup.gpu.why_not(setup.precision):
        raise ConfigError(f"{setup.precision.name} cannot be predicted on {setup.gpu.name}: {reason}")
    return simulate(setup.holding(observation.batch.longest), observation.batch, profile, known=known)


def with_blocks(setup: EngineSetup, blocks: int) -> EngineSetup:
    """The same engine with a pool of so many blocks that the scheduler can use."""
    return replace(setup, limits=replace(setup.limits, num_gpu_blocks=blocks))


def fallbacks(preset: Precision) -> list[Precision]:
    """The presets with a BF16 KV cache that have less FP8 than `preset`, fewest steps down first."""
    less = [p for p in PRESETS.values() if p != preset and p.kv == "bf16" and p.weights in ("bf16", preset.weights)]
    return sorted(less if preset.uses_fp8 else [], key=lambda p: p.weights != preset.weights)
