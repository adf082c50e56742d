"""The time that a GPU's power limit leaves a step: at least as long as its energy takes at the limit.

    joules  = sum of watts * seconds over what the step uses
    least   = joules / (LIMIT_SHARE * limit - idle)
    seconds = (seconds^16 + least^16)^(1/16)

Uses, with a coefficient each: the seconds in which kernels run, for GEMMs and small kernels together, attention over
each KV dtype, experts of each dtype, and layers that keep a state; the bytes of weights and caches, and the FLOPs of
GEMMs and attention and of experts in each dtype, in seconds at the datasheet's peak (fp8plan.model.cost.bounds). What a
kernel is launched for draws nothing beside `idle`.

Why: of 41 kernels that ran alone for seconds on an H200 (profiles/h200_sxm/vllm-0.26.0/kernels/power.jsonl), 31 reached
the limit, GEMMs of 64 rows, which read weights, as well as those of 16,384. Kernels of a few microseconds, quantisation
and FP8 attention over short contexts draw 450 to 640 W. Decode attention of 512 requests over 256 tokens draws 692 W
with a BF16 cache and 521 W with an FP8 one, in the same time; over 2,048 tokens both reach the limit. The limit has two
parts (clock_course.jsonl beside it). One holds within the first 2 ms: GEMMs of 512 rows and more then run at 1,500 to
1,650 MHz, small kernels at 1,980. So timings of single kernels include it. The other holds the mean power, after 30 ms
to a second: those GEMMs then take 1.17 to 1.19 times as long. That is the one modelled here. Energy decides and not the
clock, as at a lower clock a kernel draws less for longer. The form before (7283815) had watts of bytes and FLOPs alone,
and math that slows with the clock that NVML reads. It missed readings near the limit that no fit had seen by 39 W
(RMS), this one misses them by 26 W (tests/model/cost/test_power.py).
The coefficients have no covariance; what they miss is a part of the profile's model error.
A profile without these coefficients has one clock for all steps: fp8plan.model.cost.sustained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fp8plan.model.cost.base import Array, Cost, StepBatch
from fp8plan.model.cost.bounds import Engine, bytes_bound, flops_by_kind
from fp8plan.model.cost.components import Component
from fp8plan.model.cost.sustained import POWER, knows_power
from fp8plan.model.precision import Precision
from fp8plan.model.profile.profile import Profile

LIMIT_SHARE = 0.99  # single kernels at the limit of 700 W read 690 to 699 W
# The sixteenth power is chosen by hand: a step near the limit is slower than either, as its kernels draw now more, now
# less. Below this share of the limit's seconds it makes less than a thousandth.
NEAR = 0.7

IDLE, MEMORY = "power.idle_watts", "power.memory_watts"
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
# What counts for a coefficient that a profile does not have.
INSTEAD = {name: MATH[kind.removesuffix("_experts")] for kind, name in EXPERTS.items()}
INSTEAD |= dict.fromkeys(RUNNING.values(), RUNNING["kernels"])
LAUNCHES = ("launch_seconds", "layer_seconds", "step_seconds")  # coefficients of launches end so


class Load(NamedTuple):
    """Seconds of steps on the GPU without a limit, each of shape (steps,).

    seconds: of all kernels
    running: kind of RUNNING -> of those, without their launches
    """

    seconds: Array
    running: dict[str, Array]


class PowerLimit(NamedTuple):
    """The effect of the power limit on steps, each of shape (steps,).

    stretch: seconds with the limit over seconds without it, at least 1
    free:    d seconds / d seconds without it, of launches
    slopes:  kind of RUNNING -> the same of what those kernels run
    watts:   power coefficient -> d seconds / d log(coefficient)
    """

    stretch: Array
    free: Array
    slopes: dict[str, Array]
    watts: dict[str, Array]

    def cost(self, cost: Cost, kind: str) -> Cost:
        """What a cost of kernels of this kind, per step, comes to."""
        slopes = {True: self.free, False: self.slopes[kind]}
        partials = {name: partial * slopes[of_launches(name)] for name, partial in cost.partials.items()}
        return Cost(cost.seconds * self.stretch, partials)

    def gradient(self, component: Component, kind: str, weights: Array) -> dict[str, float]:
        """d sum(weights * seconds) / d log(coefficient), of what `component` takes."""
        launches, others = (component.gradient(weights * slope) for slope in (self.free, self.slopes[kind]))
        return {name: (launches if of_launches(name) else others)[name] for name in others}

    def rows(self, rows: slice) -> PowerLimit:
        cut = ({name: x[rows] for name, x in found.items()} for found in (self.slopes, self.watts))
        return PowerLimit(self.stretch[rows], self.free[rows], *cut)


def of_launches(name: str) -> bool:
    """Tell whether a coefficient is the seconds of launches."""
    return name.endswith(LAUNCHES)


def kind_of(component: str, precision: Precision) -> str:
    """The kind of RUNNING of a line of the breakdown."""
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
    """The load of steps with these lines of the breakdown."""
    running: dict[str, Array] = {}
    for component in components:
        kind, seconds = kind_of(component.name, precision), component.gathered(running_seconds(component.cost))
        running[kind] = running[kind] + seconds if kind in running else seconds
    return Load(sum((component.seconds() for component in components), np.zeros(1)), running)


def uses(engine: Engine, batch: StepBatch, load: Load) -> dict[str, Array]:
    """Coefficient -> seconds of what draws it, each of shape (steps,)."""
    math = {(MATH | EXPERTS)[kind]: seconds for kind, seconds in flops_by_kind(engine, batch).items()}
    return {MEMORY: bytes_bound(engine, batch)} | math | {RUNNING[kind]: x for kind, x in load.running.items()}


def power_limit(engine: Engine, batch: StepBatch, load: Load, profile: Profile) -> PowerLimit | None:
    """The effect of the power limit on steps with this load. None where no step comes near the limit, or where GPU or
    profile do not know the power.
    """
    limit = engine.gpu.power_limit_watts
    if limit is None or not knows_power(profile):
        return None
    idle = profile.coefficient(IDLE)
    left = max(LIMIT_SHARE * limit - idle, 1.0)
    used = joules_by_coefficient(uses(engine, batch, load), profile)
    least = np.asarray(sum(used.values())) / left
    ratio = least / np.where(load.seconds > 0, load.seconds, 1.0)
    if (ratio < NEAR).all():
        return None
    second = ratio * ratio  # numpy's power is many times slower
    fourth = second * second
    eighth = fourth * fourth
    raised = 1 + eighth * eighth
    stretch = np.sqrt(np.sqrt(np.sqrt(np.sqrt(raised))))
    free = stretch / raised  # d seconds / d those without
    bound = ratio * second * fourth * eighth * free  # d seconds / d least
    slopes = {kind: free + bound * (_watts(name, profile)[1] / left) for kind, name in RUNNING.items()}
    watts = {name: bound * joules / left for name, joules in used.items()} | {IDLE: bound * least * idle / left}
    return PowerLimit(stretch, free, slopes, watts)


def joules_by_coefficient(used: Mapping[str, Array], profile: Profile) -> dict[str, Array]:
    """The energy of these uses beside that of an idle GPU, by the coefficient that counts for each."""
    found: dict[str, Array] = {}
    for use, seconds in used.items():
        name, watts = _watts(use, profile)
        if name is not None:
            found[name] = found.get(name, np.zeros(1)) + watts * seconds
    return found


def _watts(use: str, profile: Profile) -> tuple[str | None, float]:
    """The coefficient that counts for a use, and its value; (None, 0) where the profile has none."""
    name = use if use in profile.coefficients else INSTEAD.get(use, use)
    return (name, profile.coefficient(name)) if name in profile.coefficients else (None, 0.0)
