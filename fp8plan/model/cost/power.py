"""The SM clock that a GPU's power limit leaves in each step.

    watts   = idle * clock + (memory * seconds of its bytes + math * seconds of its FLOPs
              + recurrent * seconds of recurrent layers) / seconds
    seconds = other + sm / clock
    clock   = 1, or less where the watts would be above the limit: then such that they are the limit

clock: of the SMs, as a fraction of the highest. sm: seconds of the step that SMs decide at the highest clock; other:
those that memory or launches decide. Seconds of bytes and FLOPs are at the datasheet's peaks
(fp8plan.model.cost.bounds), so that a coefficient is the watts of its use at the peak. Bytes are those of weights and
caches, and those of activations that small kernels move between GEMMs: in FP8 prompts of Qwen3.5-35B-A3B these are
four fifths of all, and without them its 665 W could not be explained. Math is that of GEMMs and attention, and that of
routed experts, each in BF16 and FP8: vLLM's Triton kernels for experts take more energy for a FLOP. Prompts of gpt-oss
with BF16 experts run at 1,650 MHz on an H200, and not at 1,980. Recurrent layers draw for each second: their FLOPs are
far below the peak, but SMs are busy with vectors.

Why: what a step does beside its slowest part costs clock, too. On an H200, 512 requests of Qwen3-8B after prompts of
200 tokens run at 1,770 MHz with a BF16 KV cache and at 1,965 MHz with half its bytes. Attention takes equally long in
both, as SMs limit it, but steps are 6% shorter with FP8 KV (profiles/h200_sxm/vllm-0.26.0/power).
A profile without these coefficients has one clock for all steps: fp8plan.model.cost.sustained.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fp8plan.model.cost.base import Array, Cost, StepBatch
from fp8plan.model.cost.bounds import Engine, bytes_bound, flops_by_kind
from fp8plan.model.cost.components import Component
from fp8plan.model.cost.sustained import POWER, knows_power, of_clock
from fp8plan.model.profile.profile import Profile

IDLE, MEMORY, RECURRENT = POWER, "power.memory_watts", "power.recurrent_watts"
MATH = {"bf16": "power.bf16_watts", "fp8": "power.fp8_watts"}
EXPERTS = {"bf16_experts": "power.bf16_expert_watts", "fp8_experts": "power.fp8_expert_watts"}
AS_GEMMS = {name: MATH[kind.removesuffix("_experts")] for kind, name in EXPERTS.items()}
LEAST_CLOCK = 0.4  # no step comes near
SMALL = ("overhead.", "quantise", "kv_write.")  # coefficients of kernels that stream activations begin so


class Load(NamedTuple):
    """Seconds of steps at the highest clock, each of shape (steps,).

    seconds:   of all kernels
    sm:        of those, what SMs decide
    streamed:  what moving activations would take at the datasheet's bandwidth
    recurrent: of all, those of layers that keep a state
    """

    seconds: Array
    sm: Array
    streamed: Array
    recurrent: Array

    @classmethod
    def of(cls, component: Component, profile: Profile) -> Load:
        """The load of a component by `profile`."""
        name, cost, _ = component
        each = (cost.seconds, sm_seconds(cost), streamed_seconds(cost, profile), cost.seconds * (name == "recurrent"))
        return cls(*map(component.gathered, each))


class PowerLimit(NamedTuple):
    """The effect of the power limit on steps, each of shape (steps,).

    clock: of the SMs, as a fraction of the highest
    slope: d seconds / d seconds at the highest clock, of what does not depend on the clock
    watts: power coefficient -> d seconds / d log(coefficient)
    """

    clock: Array
    slope: Array
    watts: dict[str, Array]

    def of(self, seconds: Array, sm: Array) -> Array:
        """Seconds of parts of the steps that would take `seconds`, `sm` of them decided by SMs."""
        return np.asarray(seconds + sm * (1 / self.clock - 1))

    def slope_of(self, coefficient: str) -> Array:
        """d seconds / d seconds at the highest clock, of what `coefficient` decides."""
        return self.slope / self.clock if of_clock(coefficient) else self.slope

    def rows(self, rows: slice) -> PowerLimit:
        return PowerLimit(self.clock[rows], self.slope[rows], {name: x[rows] for name, x in self.watts.items()})


def sm_seconds(cost: Cost) -> Array:
    """Seconds of a cost that SMs decide: what it would gain with a clock without end."""
    total = np.zeros(cost.seconds.shape)
    for name, partial in cost.partials.items():
        if power := of_clock(name):
            total -= power * partial
    return total


def streamed_seconds(cost: Cost, profile: Profile) -> Array:
    """Seconds, at the datasheet's bandwidth, of the activations that small kernels move."""
    total = np.zeros(cost.seconds.shape)
    for name, partial in cost.partials.items():
        if name.endswith("passes"):  # over activations, as fast as memory
            total += partial
        elif name.startswith(SMALL) and name.endswith("bandwidth_efficiency"):
            total -= partial * profile.coefficient(name)
    return total


def uses(engine: Engine, batch: StepBatch, load: Load) -> dict[str, Array]:
    """Coefficient -> seconds of what draws it, those of bytes and FLOPs at the datasheet's peak, each of
    shape (steps,).
    """
    math = {(MATH | EXPERTS)[kind]: seconds for kind, seconds in flops_by_kind(engine, batch).items()}
    return {MEMORY: bytes_bound(engine, batch) + load.streamed, RECURRENT: load.recurrent} | math


def power_limit(engine: Engine, batch: StepBatch, load: Load, profile: Profile) -> PowerLimit | None:
    """The effect of the power limit on steps with this load. None where no step reaches the limit, or where GPU or
    profile do not know the power.
    """
    limit = engine.gpu.power_limit_watts
    if limit is None or not knows_power(profile):
        return None
    seconds, idle = load.seconds, profile.coefficient(IDLE)
    used = _joules(uses(engine, batch, load), profile)
    joules = np.asarray(sum(used.values()))
    over = idle * seconds + joules > limit * seconds
    if not over.any():
        return None
    # seconds * (limit - idle * clock) = joules is a quadratic equation of the clock.
    sm = np.clip(load.sm, 1e-3 * seconds, seconds)
    other = seconds - sm
    a, b, c = idle * other, idle * sm + joules - limit * other, -limit * sm
    root = 2 * c / (-b - np.sqrt(np.maximum(b * b - 4 * a * c, 0.0)))  # this form holds for a = 0, too
    clock = np.where(over, np.clip(root, LEAST_CLOCK, 1.0), 1.0)
    longer, left = other + sm / clock, limit - idle * clock
    slope = np.where(over, 1 / (1 + sm * left / (clock**2 * idle * longer)), 1.0)
    used[IDLE] = idle * clock * longer
    return PowerLimit(clock, slope, {name: x * (1 - slope) / left for name, x in used.items()})


def _joules(used: dict[str, Array], profile: Profile) -> dict[str, Array]:
    """Energy of these uses, by coefficient; without one for experts, theirs counts as that of GEMMs."""
    found: dict[str, Array] = {}
    for use, seconds in used.items():
        name = use if use in profile.coefficients else AS_GEMMS.get(use, use)
        if name in profile.coefficients:
            joules = profile.coefficient(name) * seconds
            found[name] = found[name] + joules if name in found else joules
    return found
