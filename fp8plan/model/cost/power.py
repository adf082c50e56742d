"""The limits of a step: datasheet peaks, sustained clock and memory, and the GPU's power limit.

With the power limit, a step lasts at least as long as its energy takes at the limit:

    joules  = sum of watts * seconds over what the step uses
    least   = joules / (LIMIT_SHARE * limit - idle)
    seconds = (seconds^16 + least^16)^(1/16)

Each use has a coefficient. Uses are seconds of running kernels (GEMMs and small kernels, attention over each KV dtype,
experts of each dtype, layers with a state), bytes of weights and caches, and FLOPs of each dtype, in seconds at the
datasheet's peak. Launches draw only `idle`.

The limit has two parts (kernels/power.jsonl and clock_course.jsonl of profiles/h200_sxm; profiles/README.md). One holds
within the first 2 ms, so timings of single kernels include it. The other holds the mean power, after 30 ms to a second,
and is modelled here. Energy replaces the clock, because a kernel at a lower clock draws less power for longer. The
coefficients have no covariance; their error is a part of the profile's model error. A sibling of the measured card has
coefficients for its own limit (fp8plan.model.profile.sibling).
Without these coefficients a profile has one factor for all steps, `clock.sustained_efficiency`. It slows the work
that SMs bound, but not launches, nor the fixed part of a GEMM's wave.
Steps of engines get `memory.sustained_efficiency` of the bandwidth of single kernels. Hot memory refreshes more often,
and cards of one model differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cache, reduce
from typing import NamedTuple

import numpy as np

from fp8plan.model.architecture.parts import Attention, Experts, LatentAttention
from fp8plan.model.cost.base import Array, Component, Cost, Engine, StepBatch, tokens_of, weighted
from fp8plan.model.cost.gemm import linear_dtype, peak_flops
from fp8plan.model.cost.mixers import bytes_read, flops
from fp8plan.model.cost.moe import distinct_experts, expert_flops
from fp8plan.model.precision import BF16_BYTES, Precision
from fp8plan.model.profile.profile import Profile
from fp8plan.model.profile.sibling import IDLE, LIMIT, LIMIT_SHARE, MEMORY_WATTS


def bytes_bound(model: Engine, batch: StepBatch) -> Array:
    """Seconds of reading weights and caches once at the datasheet's bandwidth, shape (steps,)."""
    tp, precision, shape = model.limits.tensor_parallel_size, model.precision, model.shape
    tokens = tokens_of(batch)
    weights = sum(precision.linear_bytes(x.n, x.k, x.quantised) * x.layers for x in model.layers)
    read = np.where(tokens > 0, float(weights), 0.0)
    read = read + np.where(batch.sampled_requests > 0, model.head.n * model.head.k * float(BF16_BYTES), 0.0)
    for mixer, number in shape.mixers:
        read = read + bytes_read(batch, mixer, precision, tp) * number
    for experts, number in shape.parts_of(Experts):
        each = experts.stored_bytes(shape.hidden_size, precision, model.limits.expert_slices) * number
        read = read + distinct_experts(tokens, experts) * (each / model.limits.expert_ranks)
    return np.asarray(read / model.gpu.memory_bandwidth)


def flops_bound(model: Engine, batch: StepBatch) -> Array:
    """Seconds of the FLOPs at the datasheet's peak of each dtype, shape (steps,)."""
    return np.asarray(sum(flops_by_kind(model, batch).values()))


def flops_by_kind(model: Engine, batch: StepBatch) -> dict[str, Array]:
    """Seconds of the FLOPs at the datasheet's peak by dtype, shape (steps,). Routed experts are apart, unpadded.

    The keys are "bf16", "fp8", "bf16_experts" and "fp8_experts".
    """
    tp, precision, shape, gpu = model.limits.tensor_parallel_size, model.precision, model.shape, model.gpu
    tokens = tokens_of(batch)
    per_token = dict.fromkeys(("bf16", "fp8", "bf16_experts", "fp8_experts"), 0.0)
    for x in model.layers:
        dtype = linear_dtype(x, precision)
        per_token[dtype.partition("_")[0]] += 2 * x.n * x.k * x.layers / peak_flops(gpu, dtype)
    for experts, number in shape.parts_of(Experts):
        each = expert_flops(experts, shape.hidden_size, model.limits.expert_slices)
        routed = experts.experts_per_token * number * each
        dtype = experts.run_in(precision).gemm_dtype
        peak = peak_flops(gpu, dtype) * model.limits.expert_ranks
        per_token[f"{dtype.partition('_')[0]}_experts"] += routed / peak
    seconds = {kind: tokens * each for kind, each in per_token.items()}
    seconds["bf16"] = seconds["bf16"] + batch.sampled_requests * (2 * model.head.n * model.head.k / gpu.bf16_flops)
    for mixer, number in shape.mixers:
        widened = gpu.stores_fp8_only or not isinstance(mixer, Attention | LatentAttention)
        dtype = "bf16" if widened else precision.kv
        seconds[dtype] = seconds[dtype] + flops(batch, mixer, tp) * number / peak_flops(gpu, dtype)
    return seconds


CLOCK, MEMORY = "clock.sustained_efficiency", "memory.sustained_efficiency"
POWER = "power.running.kernel_watts"  # a profile with it has all coefficients of the power limit
SM_RATES = ("compute_efficiency", "sm_bandwidth")
SM_TIMES = ("decode_tile_seconds", "decode_token_seconds", "prefill_tile_seconds", "prefill_pair_seconds")


def sustained(profile: Profile, only: str | None = None) -> Profile:
    """A copy of `profile` with the coefficients of an engine that has run for a while, without the covariance.

    only: the single factor to apply, for kernels outside of an engine
    """
    factors = _factors(profile, only)
    if not factors:  # a CPU
        return profile
    scaled = dict(profile.coefficients)
    for factor, power in factors.items():
        scaled = {name: value * profile.coefficients[factor] ** power(name) for name, value in scaled.items()}
    changed = copy(profile)  # not dataclasses.replace, which would check thousands of equal values again
    object.__setattr__(changed, "coefficients", scaled)
    object.__setattr__(changed, "log_covariance", {})
    return changed


def with_sustained(cost: Cost, profile: Profile, only: str | None = None) -> Cost:
    """A cost by the `sustained` profile, with its derivatives by the logs of clock and memory."""
    partials = {}
    for factor, power in _factors(profile, only).items():
        moved = [power(name) * partial for name, partial in cost.partials.items() if power(name)]
        if moved:
            partials[factor] = reduce(np.add, moved)
    return cost.plus_partials(partials)


def _factors(profile: Profile, only: str | None) -> dict[str, Callable[[str], int]]:
    """The profile's factors -> a function from a coefficient's name to the power of the factor in it."""
    powers = {CLOCK: _of_clock, MEMORY: _of_memory}
    if only is None and knows_power(profile):  # the power limit of each step replaces the clock
        del powers[CLOCK]
    return {name: power for name, power in powers.items() if name in profile.coefficients and only in (None, name)}


def knows_power(profile: Profile) -> bool:
    return POWER in profile.coefficients


@cache
def _of_clock(name: str) -> int:
    """The power of the clock in a coefficient: 1 for work per second of an SM, -1 for seconds of its work."""
    return int(name.endswith(SM_RATES)) - int(name.endswith(SM_TIMES))


@cache
def _of_memory(name: str) -> int:
    """The power of the memory in a coefficient: 1 for a share of the bandwidth, -1 for a number of reads."""
    bandwidth = name.endswith("bandwidth_efficiency") and not name.startswith("collective")
    return int(bandwidth) - int(name.endswith(".passes"))


# The sixteenth power is chosen by hand: a step near the limit is slower than either bound, as the power of its kernels
# varies. If `least` is below the share NEAR of the seconds, the effect is less than a thousandth.
NEAR = 0.7

MATH = {"bf16": "power.bf16_watts", "fp8": "power.fp8_watts"}
EXPERTS = {"bf16_experts": "power.bf16_expert_watts", "fp8_experts": "power.fp8_expert_watts"}
RUNNING = {
    "kernels": POWER,
    "attention_bf16": "power.running.attention_bf16_watts",
    "attention_fp8": "power.running.attention_fp8_watts",
    "experts_bf16": "power.running.experts_bf16_watts",
    "experts_fp8": "power.running.experts_fp8_watts",
    "recurrent": "power.running.recurrent_watts",
}
# Coefficients in place of those that a profile lacks.
INSTEAD = {name: MATH[kind.removesuffix("_experts")] for kind, name in EXPERTS.items()}
INSTEAD |= dict.fromkeys(RUNNING.values(), RUNNING["kernels"])
LAUNCHES = ("launch_seconds", "layer_seconds", "step_seconds")  # ends of the coefficients of launches


class Load(NamedTuple):
    """Seconds of steps on the GPU without a limit, each of shape (steps,).

    seconds: all kernels
    running: kind of RUNNING -> its kernels without their launches
    """

    seconds: Array
    running: dict[str, Array]


class PowerLimit(NamedTuple):
    """The effect of the power limit on steps. Arrays have shape (steps,).

    stretch: seconds with the limit over seconds without it, at least 1
    free:    d seconds / d seconds without it, for launches
    bound:   d seconds / d seconds that the energy takes at the limit
    joules:  power coefficient -> energy of a step by it; IDLE: by the power that an idle GPU draws
    left:    watts at the limit, less those of an idle GPU
    running: kind of RUNNING -> watts of its kernels
    """

    stretch: Array
    free: Array
    bound: Array
    joules: dict[str, Array]
    left: float
    running: dict[str, float]

    def slope(self, kind: str) -> Array:
        """d seconds / d seconds without the limit, for the kernels of that kind without launches, shape (steps,)."""
        return self.free + self.bound * (self.running[kind] / self.left)

    @property
    def watts(self) -> dict[str, Array]:
        """Power coefficient -> d seconds / d log(coefficient), each of shape (steps,)."""
        return {name: self.bound * joules / self.left for name, joules in self.joules.items()}

    def cost(self, cost: Cost, kind: str) -> Cost:
        """The cost of kernels of this kind per step, with the limit."""
        slopes = {True: self.free, False: self.slope(kind)}
        partials = {name: partial * slopes[of_launches(name)] for name, partial in cost.partials.items()}
        return Cost(cost.seconds * self.stretch, partials)

    def gradient(self, component: Component, kind: str, weights: Array) -> dict[str, float]:
        """d sum(weights * seconds) / d log(coefficient) of a component with the limit."""
        slopes = {True: self.free, False: self.slope(kind)}
        moved = {launches: component.collected(weights * slope) for launches, slope in slopes.items()}
        return {name: weighted(x, moved[of_launches(name)]) for name, x in component.cost.partials.items()}

    def rows(self, rows: slice) -> PowerLimit:
        joules = {name: x[rows] for name, x in self.joules.items()}
        stretch, free, bound = self.stretch[rows], self.free[rows], self.bound[rows]
        return self._replace(stretch=stretch, free=free, bound=bound, joules=joules)


def of_launches(name: str) -> bool:
    return name.endswith(LAUNCHES)


def kind_of(component: str, precision: Precision) -> str:
    """The kind of RUNNING of a component."""
    if component == "attention":
        return f"attention_{precision.kv}"
    if component == "moe":
        return f"experts_{precision.gemm_dtype.partition('_')[0]}"
    return component if component in RUNNING else "kernels"


def running_seconds(cost: Cost) -> Array:
    """Seconds of a cost without those of launches."""
    launches = [partial for name, partial in cost.partials.items() if of_launches(name)]
    return np.asarray(cost.seconds - sum(launches, np.zeros(1)))


def load_of(components: Sequence[Component], precision: Precision) -> Load:
    running: dict[str, Array] = {}
    for component in components:
        kind, seconds = kind_of(component.name, precision), component.gathered(running_seconds(component.cost))
        running[kind] = running[kind] + seconds if kind in running else seconds
    return Load(sum((component.seconds() for component in components), np.zeros(1)), running)


def uses(engine: Engine, batch: StepBatch, load: Load) -> dict[str, Array]:
    """Coefficient of watts -> the seconds that it is multiplied by, shape (steps,)."""
    math = {(MATH | EXPERTS)[kind]: seconds for kind, seconds in flops_by_kind(engine, batch).items()}
    return {MEMORY_WATTS: bytes_bound(engine, batch)} | math | {RUNNING[kind]: x for kind, x in load.running.items()}


def power_limit(
    engine: Engine, batch: StepBatch, load: Load, profile: Profile, near: float = NEAR
) -> PowerLimit | None:
    """The effect of the power limit on steps with this load.

    None if no step comes as `near` to the limit, or GPU or profile have no data on power.
    """
    limit = engine.gpu.power_limit_watts or profile.coefficients.get(LIMIT)
    if limit is None or not knows_power(profile):
        return None
    idle = profile.coefficient(IDLE)
    left = max(LIMIT_SHARE * limit - idle, 1.0)
    used = joules_by_coefficient(uses(engine, batch, load), profile)
    least = np.asarray(sum(used.values())) / left
    ratio = least / np.where(load.seconds > 0, load.seconds, 1.0)
    if (ratio < near).all():
        return None
    second = ratio * ratio  # numpy's power is many times slower
    fourth = second * second
    eighth = fourth * fourth
    raised = 1 + eighth * eighth
    stretch = np.sqrt(np.sqrt(np.sqrt(np.sqrt(raised))))
    free = stretch / raised  # d seconds / d those without
    bound = ratio * second * fourth * eighth * free  # d seconds / d least
    running = {kind: _watts(name, profile)[1] for kind, name in RUNNING.items()}
    return PowerLimit(stretch, free, bound, used | {IDLE: least * idle}, left, running)


def joules_by_coefficient(used: Mapping[str, Array], profile: Profile) -> dict[str, Array]:
    """The energy of these uses beyond that of an idle GPU, by coefficient."""
    joules: dict[str, Array] = {}
    for use, seconds in used.items():
        name, watts = _watts(use, profile)
        if name is not None:
            joules[name] = joules[name] + watts * seconds if name in joules else watts * seconds
    return joules


def _watts(use: str, profile: Profile) -> tuple[str | None, float]:
    """The coefficient for a use, and its value; (None, 0) if the profile has none."""
    name = use if use in profile.coefficients else INSTEAD.get(use, use)
    return (name, profile.coefficient(name)) if name in profile.coefficients else (None, 0.0)
