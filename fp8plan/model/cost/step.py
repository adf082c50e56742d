"""Seconds of engine steps: kernels of every layer, lm_head, sampling, and the host.

A step's linear layers depend on its padded token count only, so they are evaluated once per distinct count. Attention
and sampling are evaluated per step. No loop runs over steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fp8plan.model.architecture.parts import Experts, LayerInput
from fp8plan.model.cost.base import (
    Array,
    Component,
    Cost,
    Engine,
    StepBatch,
    following,
    gradient_of,
    p_norm,
    paced,
    tokens_of,
    where_busy,
    whole,
    zero,
)
from fp8plan.model.cost.collective import all_reduce_cost, with_network
from fp8plan.model.cost.front import OWN, front_kernels
from fp8plan.model.cost.gemm import gemm_cost, overlapped, quantise_cost, shared_cost
from fp8plan.model.cost.grounds import Excess, excesses, rests_on
from fp8plan.model.cost.host import (
    GROUPS,
    host_cost,
    host_kernels,
    launch_cost,
    launches,
    layer_cost,
    sampling_cost,
)
from fp8plan.model.cost.mixers import SCHEDULE, caches_cost, kernels_of, mixer_costs, unscheduled_layers
from fp8plan.model.cost.moe import moe_cost
from fp8plan.model.cost.power import (
    Load,
    PowerLimit,
    bytes_bound,
    flops_bound,
    kind_of,
    knows_power,
    load_of,
    power_limit,
    sustained,
    with_sustained,
)
from fp8plan.model.cost.routes import ON_GPU, ON_HOST, route_gpu_cost, route_host_cost
from fp8plan.model.limits import cudagraph_capture_sizes, model_runner
from fp8plan.model.precision import BF16_BYTES
from fp8plan.model.profile.library import rare_parts, with_kernels
from fp8plan.model.profile.profile import GPU_PACE, Profile, layout_pace, precision_pace
from fp8plan.version import DEFAULT_VERSION

PREFILL = ("prefill_tokens", "prefill_requests", "prefill_kv_tokens", "prefill_pairs")  # fields of a StepBatch
NEXT = " of next"  # suffix of the derivatives of the next step's seconds


@dataclass(frozen=True, slots=True)
class StepModel(Engine):
    """The cost model of one replica.

    layout_error: that of the profile for this cut
    cache_groups: groups of layers with their own block table (fp8plan.model.memory.kv_plan)
    drafts:       tokens that a draft head drafts for each request after a step: a layer like the last, and lm_head
    experts_hit:  distinct experts of a layer that a step's tokens go to; None: as under even routing
    inside:       the program that calls the engine, one of fp8plan.model.cost.front.INSIDE
    engine_version: version of vLLM
    """

    experts_hit: int | None = None
    cache_groups: int = 1
    inside: str = OWN
    engine_version: str = DEFAULT_VERSION
    drafts: int = 0
    layout_error: float = field(init=False, repr=False, compare=False)
    _sustained: Profile = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super(StepModel, self).__post_init__()
        object.__setattr__(self, "layout_error", self.profile.layout_error(*self.cut))
        parts = rare_parts(self.gpu)
        rare = {kernel for kernel in self._kernels() if f"{kernel}.".startswith(parts)}
        if unscheduled_layers(self.shape, self.precision, self.profile):
            rare.add(SCHEDULE)
        if self.cache_groups > 1:
            rare.add(GROUPS)
        rare |= set(host_kernels(self.shape))
        if self.inside != OWN:
            rare |= front_kernels(self.inside)
        if self.limits.enable_return_routed_experts:
            rare |= {ON_GPU, ON_HOST}
        object.__setattr__(self, "profile", with_kernels(self.profile, self.gpu, rare))
        if self.limits.tensor_parallel_size > self.gpu.gpus_per_node:
            object.__setattr__(self, "profile", with_network(self.profile))
        object.__setattr__(self, "_sustained", sustained(self.profile))

    def timed(self, batch: StepBatch) -> TimedSteps:
        """The steps with the cost of each part, for several evaluations."""
        components = self._gpu_components(batch)
        scheduling, launching = self._host(batch)
        limit = self._power_limit(batch, components)
        return TimedSteps(self, components, scheduling, launching, limit, self._led(batch, launching))

    def seconds(self, batch: StepBatch) -> Array:
        """Seconds of each step, shape (steps,)."""
        return self.timed(batch).seconds()

    def cost(self, batch: StepBatch) -> Cost:
        """Seconds of each step and their derivatives by the log of every coefficient, each of shape (steps,)."""
        components = self._gpu_components(batch)
        limit = self._power_limit(batch, components)
        gpu = zero(batch.decode_requests)
        for component in components:
            cost = component.per_step()
            gpu = gpu + (limit.cost(cost, kind_of(component.name, self.precision)) if limit else cost)
        gpu = paced(gpu.plus_partials(limit.watts if limit else {}), GPU_PACE, self.profile)
        scheduling, launching = self._host(batch)
        ahead = lead(gpu, scheduling + launching, self._led(batch, launching))
        return self.joined(gpu, scheduling, launching, ahead)

    def load(self, batch: StepBatch) -> Load:
        """The load of each step on the GPU, without a power limit."""
        return load_of(self._gpu_components(batch), self.precision)

    def joined(self, gpu: Cost, scheduling: Cost, launching: Cost, ahead: Cost) -> Cost:
        """The cost of steps in which GPU and host work at the same time.

        ahead: the result of `lead`

        Overlapped, a step lasts as long as the slower of the two, and up to 9% longer if both are equally slow. The
        host has `ahead` more time, because it begins while the GPU still runs the step before. Without async scheduling
        the GPU waits for the schedule, but not for the launches of its next kernels. A CPU does all in turn.
        """
        if self.limits.async_scheduling:
            return p_norm(8, ahead + gpu, scheduling + launching) + ahead.scaled(-1.0)
        return scheduling + (gpu + launching if self.gpu.is_cpu else p_norm(8, gpu, launching))

    def least_seconds(self, batch: StepBatch) -> Array:
        """Seconds of each step at the datasheet's bandwidth and peak, shape (steps,)."""
        return np.maximum(bytes_bound(self, batch), flops_bound(self, batch))

    def excesses(self, batch: StepBatch) -> list[Excess]:
        """The quantities of these steps that leave the profile's hull."""
        return list(excesses(self, batch, self.padded(batch)))

    def outside_hull(self, batch: StepBatch) -> list[str]:
        """The reasons why these steps are outside of the profile's measurements; empty if they are inside.

        `Profile.layout_error` covers the layout.
        """
        if self.profile.hull is None:
            return [f"nothing was measured on {self.gpu.name}: {self.profile.kind} profile"]
        reasons = [str(excess) for excess in self.excesses(batch)]
        assumed = [kernel for kernel in sorted(self._kernels()) if self.profile.assumes(kernel)]
        reasons += [f"{kernel}: not measured on {self.gpu.name}" for kernel in assumed]
        if self.limits.expert_ranks > 1:
            reasons.append(f"moe: whole experts shared out over {self.limits.expert_ranks} GPUs, not measured")
        return reasons

    def padded(self, batch: StepBatch) -> Array:
        """The tokens that the engine runs in each step, rounded up to a captured CUDA graph if there is one."""
        tokens = tokens_of(batch)
        sizes = np.array((0, *self._graphs(batch.queries)), dtype=np.int64)
        largest = sizes[-1]
        rounded = sizes[np.searchsorted(sizes, np.arange(largest + 1))]  # for every count with a graph
        return np.where(tokens <= largest, rounded[np.minimum(tokens, largest)], tokens)

    def _kernels(self) -> set[str]:
        """The kernels of mixers and linears, as prefixes of coefficients."""
        return kernels_of(self.shape, self.precision) | {f"gemm.{self.precision.gemm_dtype}"}

    @property
    def paces(self) -> list[str]:
        """The factors on all seconds that observed rollouts gave: of the precision, and of the layout."""
        names = precision_pace(self.precision.name), layout_pace(*self.cut)
        return [name for name in names if name in self.profile.coefficients]

    @property
    def pace(self) -> float:
        """The product of `paces`."""
        return math.prod(map(self.profile.coefficient, self.paces))

    def _graphs(self, queries: int) -> list[int]:
        """The tokens of each CUDA graph: whole requests (adjust_cudagraph_sizes_for_spec_decode in compilation.py)."""
        sizes = cudagraph_capture_sizes(self.shape, self.gpu, self.limits, self.engine_version)
        return sorted({size for x in sizes if (size := -(-x // queries) * queries) <= sizes[-1]})

    def _host(self, batch: StepBatch) -> tuple[Cost, Cost]:
        """Seconds that the host needs for scheduling and launching."""
        graphed = tokens_of(batch) <= max(self._graphs(batch.queries), default=0)
        launched = launches(graphed, batch.prefill_tokens > 0, self.shape, self.layers, self.precision)
        scheduling = host_cost(batch, self.cache_groups, self.profile)
        launching = launch_cost(launched, self.profile)
        if self.limits.enable_return_routed_experts:
            filing, copies = route_host_cost(batch, graphed, self.shape, self.profile)
            scheduling, launching = scheduling + filing, launching + copies
        return scheduling, launching

    def _led(self, batch: StepBatch, launching: Cost) -> Array:
        """True for each step that the host launches in parts, beginning while the GPU runs the step before, (steps,).

        Models with recurrent layers have no such step. For Mamba 2, vLLM 0.26 asks the GPU if prompts have a state
        already (mamba2_attn.py), and waits for the answer; 0.30 does not ask. For gated delta nets the fit is better
        without a lead.
        """
        ahead = self.limits.async_scheduling and not self.shape.recurrent
        return following(batch) & (launching.seconds > 0) & ahead

    def _power_limit(self, batch: StepBatch, components: Sequence[Component]) -> PowerLimit | None:
        """The effect of the power limit. The load is computed only for a profile with data on power."""
        known = knows_power(self.profile)
        return power_limit(self, batch, load_of(components, self.precision), self.profile) if known else None

    def _gpu_components(self, batch: StepBatch) -> list[Component]:
        tp, profile = self.limits.tensor_parallel_size, self._sustained
        mixed = mixer_costs(batch, self.shape, self.precision, tp, self.gpu, profile)
        parts = [Component(name, cost, None) for name, cost in mixed.items()]
        counts, inverse = _distinct(self.padded(batch))
        for name, cost in self._token_costs(counts, profile).items():
            parts.append(where_busy(name, cost, counts, inverse))
        rows, inverse = _distinct(whole(batch.sampled_requests))
        head = gemm_cost(rows, [self.head], self.precision, self.gpu, profile)
        parts.append(where_busy("lm_head", head, rows, inverse))
        runner = model_runner(self.shape, self.gpu, self.engine_version)
        parts.append(Component("sampling", sampling_cost(batch, self.shape, self.gpu, runner, profile), None))
        if self.limits.enable_return_routed_experts:
            parts.append(Component("routes", route_gpu_cost(batch.decode_requests, self.shape, profile), None))
        parts = [part._replace(cost=with_sustained(part.cost, profile)) for part in parts]
        return [*parts, Component("draft", self._draft_cost(batch), None)] if self.drafts else parts

    def _draft_cost(self, batch: StepBatch) -> Cost:
        """Seconds of the draft head in each step: once over the step's tokens, then token by token."""
        head = replace(self, shape=replace(self.shape, layers=self.shape.layers[-1:]), drafts=0)
        rows = batch.sampled_requests - (batch.queries - 1) * batch.decode_requests  # requests that go on
        none = np.zeros_like(batch.prefill_tokens)
        prefill: dict[str, Any] = dict.fromkeys(PREFILL, none)
        first = replace(batch, sampled_requests=rows)
        further = replace(first, queries=1, **prefill)
        once, again = (sum((part.per_step() for part in head._gpu_components(x)), zero(none)) for x in (first, further))
        return once + again.scaled(self.drafts - 1)

    def _token_costs(self, m: Array, profile: Profile) -> dict[str, Cost]:
        """Components that depend on the padded token count `m` alone."""
        tp = self.limits.tensor_parallel_size
        kinds = [experts for experts, _ in self.shape.parts_of(Experts)]
        shared = overlapped(self.layers, self.gpu, kinds)
        layers = [x for x in self.layers if x not in shared]
        costs = {
            "gemm": gemm_cost(m, layers, self.precision, self.gpu, profile),
            "overhead": layer_cost(m, self.shape, tp, self.gpu, profile),
            "kv_write": caches_cost(m, self.shape, self.precision, tp, self.gpu, profile),
        }
        # The padded count, because rows of padding hold tokens of earlier steps, which are routed too.
        for experts, number in self.shape.parts_of(Experts):
            hit = None if self.experts_hit is None else np.full(m.shape, float(self.experts_hit))
            ranks = self.limits.expert_ranks
            layer = moe_cost(m, experts, self.shape.hidden_size, self.precision, tp, self.gpu, profile, hit, ranks)
            costs["moe"] = costs.get("moe", zero(m)) + layer.scaled(number)
        if shared:
            costs["moe"] = costs["moe"] + shared_cost(m, shared, self.precision, self.gpu, profile)
        if self.precision.weights != "bf16":
            costs["quantise"] = quantise_cost(m, layers, self.precision, self.gpu, profile)
        if tp > 1:
            reduced = 1 + sum(x.layers for x in self.layers if x.all_reduce)  # 1: the vocabulary-parallel embedding
            reduced += sum(number for _, number in self.shape.parts_of(Experts))
            message = m * float(self.shape.hidden_size * BF16_BYTES)
            costs["collective"] = all_reduce_cost(message, tp, self.gpu, profile).scaled(reduced)
            for part, _ in self.shape.parts_of(LayerInput):
                if part.all_widths:  # the table's rows are all-reduced; projections are gathered, with half the traffic
                    message = m * float(part.all_widths * BF16_BYTES)
                    inputs = all_reduce_cost(message, tp, self.gpu, profile).scaled(1.5)
                    costs["collective"] = costs["collective"] + inputs
        return costs


@dataclass(frozen=True, slots=True)
class TimedSteps:
    """The steps of one batch, evaluated once."""

    model: StepModel
    components: list[Component]  # of the GPU, without a power limit
    scheduling: Cost
    launching: Cost
    limit: PowerLimit | None
    led: Array  # True for each step that the host begins while the GPU runs the step before
    on_gpu: Array = field(init=False)  # seconds of each step in all components, with the power limit

    def __post_init__(self) -> None:
        object.__setattr__(self, "on_gpu", sum(map(self._limited, self.components), np.zeros(1)))

    def rows(self, rows: slice) -> TimedSteps:
        """The steps selected by `rows`. The first of them follows none."""
        components = [component.rows(rows) for component in self.components]
        scheduling, launching = self.scheduling.rows(rows), self.launching.rows(rows)
        led = self.led[rows].copy()
        led[:1] = False
        return TimedSteps(self.model, components, scheduling, launching, self.limit and self.limit.rows(rows), led)

    def seconds(self) -> Array:
        return self._joined(1.0, 1.0)

    def breakdown(self) -> dict[str, Array]:
        """Component -> seconds of each step, which add up to `seconds`. "host": seconds for which the GPU waits."""
        parts = {component.name: self._limited(component) for component in self.components}
        parts["host"] = self.seconds() - sum(parts.values(), np.zeros(1))
        return parts

    def rests_on(
        self, batch: StepBatch, seconds: Mapping[str, Array], start: Cost, front: Cost
    ) -> dict[str, dict[str, Any]]:
        """The grounds of all steps, `start` and `front`, as in `grounds.rests_on`.

        batch:   the work of these steps
        seconds: component -> seconds of each step, the result of `breakdown`, times the number of times that it runs
        """
        host = Component("host", self.scheduling + self.launching, None)
        parts = [(part, seconds[part.name]) for part in (*self.components, host)]
        return rests_on(parts, start, front, self.model, self.model.excesses(batch))

    def interval(self, weights: Array, z: float) -> tuple[float, float]:
        """(low, high) of sum(weights * seconds), z standard deviations of its log to either side.

        GPU and host have separate errors, and a step lasts about as long as the slower of them. So each moves to its
        own end before they are joined: a fast GPU cannot hide an uncertain host.

        weights: the number of times that each step runs, shape (steps,)
        """
        host = Component("host", self.scheduling + self.launching, None)
        gpu_total = float((weights * self.on_gpu).sum())
        gpu_sigma = self._sigma(self._gpu_gradient(weights), gpu_total)
        host_sigma = self._sigma(gradient_of([host], weights), float((weights * host.seconds()).sum()))
        low, high = (self._joined(np.exp(side * gpu_sigma), np.exp(side * host_sigma)) for side in (-z, z))
        return float((weights * low).sum()), float((weights * high).sum())

    def gradient(self, weights: Array) -> dict[str, float]:
        """The derivatives d sum(weights * seconds) / d log(coefficient), for every coefficient that the steps use.

        weights: the number of times that each step runs, shape (steps,)
        """
        scheduling, launching = Component("", self.scheduling, None), Component("", self.launching, None)
        groups = {"gpu": self.components, "scheduling": [scheduling], "launching": [launching]}
        totals = {"gpu": self.on_gpu, "scheduling": self.scheduling.seconds, "launching": self.launching.seconds}
        own, ahead_of = (
            [Cost(seconds, {name + whose: seconds}) for name, seconds in totals.items()] for whose in ("", NEXT)
        )
        ahead = lead(ahead_of[0], ahead_of[1] + ahead_of[2], self.led)
        joined = self.model.joined(own[0], own[1], own[2], ahead)
        gradient: dict[str, float] = {}
        for name, parts in groups.items():
            moved = weights * joined.partials[name]  # d all steps / d log(seconds of each step)
            if name + NEXT in joined.partials:  # seconds of a step are time for the next one's launches
                moved[:-1] += (weights * joined.partials[name + NEXT])[1:]
            slope = moved / np.where(totals[name] > 0, totals[name], 1.0)
            partials = self._gpu_gradient(slope) if name == "gpu" else gradient_of(parts, slope)
            for coefficient, value in partials.items():
                gradient[coefficient] = gradient.get(coefficient, 0.0) + value
        return gradient

    def _gpu_gradient(self, weights: Array) -> dict[str, float]:
        """d sum(weights * seconds of the GPU) / d log(coefficient)"""
        pace = {GPU_PACE: float((weights * self.on_gpu).sum())}
        weights = weights * self.model.profile.coefficient(GPU_PACE)
        if self.limit is None:
            return gradient_of(self.components, weights) | pace
        gradient = pace | {name: float((weights * x).sum()) for name, x in self.limit.watts.items()}
        for component in self.components:
            kind = kind_of(component.name, self.model.precision)
            for name, value in self.limit.gradient(component, kind, weights).items():
                gradient[name] = gradient.get(name, 0.0) + value
        return gradient

    def _limited(self, component: Component) -> Array:
        """Seconds of a component in each step, with the power limit and at the GPU's pace."""
        stretch = 1.0 if self.limit is None else self.limit.stretch
        return component.seconds() * (stretch * self.model.profile.coefficient(GPU_PACE))

    def _joined(self, gpu: float, host: float) -> Array:
        """Seconds of each step if GPU and host took `gpu` and `host` times as long, shape (steps,)."""
        parts = (self.on_gpu * gpu, self.scheduling.seconds * host, self.launching.seconds * host)
        on_gpu, scheduling, launching = (Cost(seconds, {}) for seconds in parts)
        ahead = lead(on_gpu, scheduling + launching, self.led)
        return self.model.joined(on_gpu, scheduling, launching, ahead).seconds

    def _sigma(self, gradient: dict[str, float], total: float) -> float:
        """Standard deviation of log(total), from covariance, model error, and the error of an unmeasured layout."""
        gradient = gradient | dict.fromkeys(self.model.paces, total)
        profile, g = self.model.profile, np.array(list(gradient.values())) / total
        variance = float(g @ profile.covariance(list(gradient)) @ g)
        return float(np.sqrt(variance + profile.model_error**2 + self.model.layout_error**2))


def lead(gpu: Cost, host: Cost, led: Array) -> Cost:
    """Seconds that the GPU still needs for the step before when the host is done with that step; 0 if not `led`.

    gpu, host: costs of all steps in order
    led:       bool, the result of StepModel._led

    vLLM schedules and launches a step as soon as the one before it runs. So a host that needs long for a step can also
    use the spare time of the step before.
    """
    spare = p_norm(8, gpu, host) + host.scaled(-1.0)
    return spare.rows(np.arange(led.size) - 1).scaled(np.where(led, 1.0, 0.0))


def _distinct(values: Array) -> tuple[Array, Array]:
    """np.unique with the inverse, for small non-negative integers and without a sort."""
    seen = np.zeros(int(values.max(initial=0)) + 1, dtype=bool)
    seen[values] = True
    return np.flatnonzero(seen), (np.cumsum(seen) - 1)[values]
