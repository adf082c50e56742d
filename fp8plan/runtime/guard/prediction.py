"""What the cost model expects of the very work that ran.

Nothing of the cost model is repeated here: memory, schedule and rollout are fp8plan.model's, given the lengths that
were generated, the pool that was measured and the limits the engine really has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fp8plan.errors import CapacityError, ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.cost.step import StepModel
from fp8plan.model.hardware import gpu as find_gpu
from fp8plan.model.memory import memory_plan
from fp8plan.model.precision import PRESETS, Precision
from fp8plan.model.profile.profile import Profile
from fp8plan.model.rollout import Rollout, rollout, schedules, step_batch
from fp8plan.model.schedule.scheduler import Schedule
from fp8plan.runtime.guard.observation import EngineFacts, Observation


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the cost model says of the work that ran. Speeds in response tokens per second, low and high: 90% interval.

    rollout:    the whole prediction; preemptions, parts and tail are in there
    mean_batch: responses that decode together, averaged over the steps
    kv_cache_tokens: pool it was made for
    instead:    preset name -> tokens per second of the same work in a precision with less FP8, in the pool which that
                one gets; left out where it does not fit
    schedules:  of the replicas, for further predictions of the same work
    """

    tokens_per_s: float
    low_tokens_per_s: float
    high_tokens_per_s: float
    makespan_s: float
    rollout: Rollout
    mean_batch: float
    kv_cache_tokens: int
    instead: dict[str, float]
    schedules: tuple[Schedule, ...]


def predict(facts: EngineFacts, observation: Observation, profile: Profile) -> Prediction:
    """The prediction for what ran, and for the same work with less FP8. Raises as the parts of the cost model do."""
    ran = simulate(facts, observation, profile)
    instead = {}
    for preset in fallbacks(facts.preset):
        try:
            other = simulate(facts, observation, profile, preset, None, known=ran.schedules)
        except CapacityError:
            continue
        instead[preset.name] = other.timed.output_tokens_per_s
    timed = ran.timed
    return Prediction(
        tokens_per_s=timed.output_tokens_per_s,
        low_tokens_per_s=timed.output_tokens / timed.makespan_high_s,
        high_tokens_per_s=timed.output_tokens / timed.makespan_low_s,
        makespan_s=timed.makespan_s,
        rollout=timed,
        mean_batch=timed.output_tokens / timed.num_steps / len(ran.schedules),
        kv_cache_tokens=ran.kv_cache_tokens,
        instead=instead,
        schedules=ran.schedules,
    )


def fallbacks(preset: Precision) -> list[Precision]:
    """The presets with a BF16 KV cache that have less FP8 than `preset`, fewest steps down first."""
    less = [p for p in PRESETS.values() if p != preset and p.kv == "bf16" and p.weights in ("bf16", preset.weights)]
    return sorted(less if preset.uses_fp8 else [], key=lambda p: p.weights != preset.weights)


@dataclass(frozen=True, slots=True)
class Simulated:
    model: StepModel
    timed: Rollout
    schedules: tuple[Schedule, ...]
    kv_cache_tokens: int

    def longest_step_s(self) -> float:
        return max(float(self.model.seconds(step_batch(plan)).max()) for plan in self.schedules)


MEASURED = -1  # the pool that the observation names


def simulate(
    facts: EngineFacts,
    observation: Observation,
    profile: Profile,
    preset: Precision | None = None,
    blocks: int | None = MEASURED,
    eager: bool | None = None,
    known: Sequence[Schedule] | None = None,
) -> Simulated:
    """The observed work, with what the arguments change about the engine.

    preset: another precision
    blocks: KV blocks the scheduler can use; MEASURED: those of the observation; None: what such an engine would get
    eager:  without CUDA graphs; None: as it runs
    known:  schedules of the same work, taken over where they hold
    """
    shape, card, batch = ModelShape.from_hf(facts.model), find_gpu(facts.gpu), observation.batch
    if blocks == MEASURED:
        pool = observation.kv_cache_tokens
        blocks = None if pool is None else pool // facts.limits.block_size - 1  # less vLLM's null block
    preset, eager = preset or facts.preset, facts.eager if eager is None else eager
    if reason := card.why_not(preset):
        raise ConfigError(f"{preset.name} cannot be predicted on {card.name}: {reason}")
    own = facts.limits.num_gpu_blocks if blocks is None else blocks
    limits = replace(facts.limits, num_gpu_blocks=own, enforce_eager=eager).holding(batch.longest).on(card)
    memory = memory_plan(shape, preset, card, limits)
    model = StepModel(shape, card, preset, limits, profile)
    plans = schedules(batch.split(limits.data_parallel_size), memory.usable_blocks, limits, known)
    return Simulated(model, rollout(plans, model), tuple(plans), memory.kv_cache_tokens)
