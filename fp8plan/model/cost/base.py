"""The arguments and results of every cost function: engine steps, and seconds with their derivatives.

Derivatives by each coefficient come with the value, because they cost almost nothing there (each term is a product of
powers of coefficients). Finite differences would evaluate the whole model once per coefficient. Components hold costs
at distinct token counts, and gather them into steps only on request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fp8plan.model.architecture import Linear, ModelShape
from fp8plan.model.hardware import Gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.precision import Precision
from fp8plan.model.profile.profile import Profile

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]
Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Engine:
    """One replica: a model in a precision on tensor_parallel_size GPUs, with their profile.

    layers, head: the linears of one rank, and lm_head
    main_linears: the linears of the layers that the precision is about: the quantised ones, or all if there are none
    cut:          as in EngineLimits
    """

    shape: ModelShape
    gpu: Gpu
    precision: Precision
    limits: EngineLimits
    profile: Profile
    layers: list[Linear] = field(init=False, repr=False, compare=False)
    head: Linear = field(init=False, repr=False, compare=False)
    main_linears: list[Linear] = field(init=False, repr=False, compare=False)
    cut: tuple[int, bool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        linears = self.shape.linears(self.limits.tensor_parallel_size)
        object.__setattr__(self, "layers", [x for x in linears if x.name != "lm_head"])
        object.__setattr__(self, "head", next(x for x in linears if x.name == "lm_head"))
        object.__setattr__(self, "main_linears", [x for x in self.layers if x.quantised] or self.layers)
        object.__setattr__(self, "cut", self.limits.cut)


@dataclass(frozen=True, slots=True)
class WindowReads:
    """The reads of attention over one window; fields and shapes as in StepBatch.

    kind: "sliding": the last `window` tokens; "chunked": the current chunk of `window`
    """

    kind: str
    window: int
    decode_kv_tokens: Array
    prefill_kv_tokens: Array
    prefill_pairs: Array


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The work of engine steps. Every field but `windows` is a float64 or int64 array of shape (steps,).

    follows: bool, True for a step that comes right after the previous one in the arrays; None: all False
    queries: tokens that each decoding request computes in a step: its newest one, and drafts to verify
    """

    decode_requests: Array  # requests that decode
    decode_kv_tokens: Array  # KV tokens those requests read, summed over them
    prefill_tokens: Array  # prompt tokens, or recomputed ones, in this step
    prefill_requests: Array  # chunks they are cut into
    prefill_kv_tokens: Array  # KV tokens the chunks read (context before + own), summed over chunks
    prefill_pairs: Array  # query-key pairs the chunks attend to, summed (attention FLOPs)
    sampled_requests: Array  # rows through lm_head and the sampler
    windows: tuple[WindowReads, ...] = ()  # one for each window of the model's attention
    follows: Array | None = None
    queries: int = 1


QUANTITIES = tuple(x.name for x in fields(StepBatch) if x.name not in ("windows", "follows", "queries"))
READS = tuple(x.name for x in fields(WindowReads) if x.name not in ("kind", "window"))


def joined(batches: Sequence[StepBatch]) -> StepBatch:
    """The steps of several batches of one model, one after the other."""

    def concatenated(rows: Sequence[object], names: Sequence[str]) -> dict[str, Array]:
        return {name: np.concatenate([getattr(row, name) for row in rows]) for name in names}

    windows = tuple(
        WindowReads(same[0].kind, same[0].window, **concatenated(same, READS))
        for same in zip(*(batch.windows for batch in batches), strict=True)
    )
    follows = np.concatenate([following(batch) for batch in batches])
    (queries,) = {batch.queries for batch in batches}
    return StepBatch(**concatenated(batches, QUANTITIES), windows=windows, follows=follows, queries=queries)


def following(batch: StepBatch) -> Array:
    """True for each step that comes right after the previous one in the arrays, bool of shape (steps,)."""
    steps = np.arange(batch.decode_requests.size)
    return (steps > 0) & (False if batch.follows is None else batch.follows)


def tokens_of(batch: StepBatch) -> Array:
    """The tokens of each step, int64 of shape (steps,)."""
    return whole(batch.decode_requests * batch.queries + batch.prefill_tokens)


def whole(values: Array) -> Array:
    """The values as int64, rounded."""
    if values.dtype == np.int64:
        return values
    return np.asarray(np.rint(values), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one component for many steps.

    seconds:  shape (steps,)
    partials: coefficient name -> d seconds / d log(coefficient), shape (steps,)
    """

    seconds: Array
    partials: dict[str, Array]

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.partials).plus_partials(other.partials)

    def plus_partials(self, others: dict[str, Array]) -> Cost:
        partials = dict(self.partials)
        for name, value in others.items():
            partials[name] = partials[name] + value if name in partials else value
        return Cost(self.seconds, partials)

    def rows(self, at: slice | Array) -> Cost:
        return Cost(self.seconds[at], {name: values[at] for name, values in self.partials.items()})

    def scaled(self, factor: float | Array) -> Cost:
        return Cost(self.seconds * factor, {name: value * factor for name, value in self.partials.items()})


def zero(like: Array) -> Cost:
    return Cost(np.zeros(like.shape), {})


def constant(name: str, value: float, like: Array) -> Cost:
    """A cost of the coefficient `name`, `value` seconds, in every step."""
    return times(np.ones(like.shape), name, value)


def times(count: Array, name: str, value: float) -> Cost:
    """A cost of `count` times the coefficient `name` (seconds)."""
    seconds = count * value
    return Cost(seconds, {name: seconds})


def paced(cost: Cost, name: str, profile: Profile) -> Cost:
    """The cost of the whole GPU, or the whole host, times its pace, the coefficient `name`."""
    scaled = cost.scaled(profile.coefficient(name))
    return scaled.plus_partials({name: scaled.seconds})


def traffic(bytes_: Array, bandwidth: float, efficiency: tuple[str, float]) -> Cost:
    """The time to move `bytes_` at the fraction `efficiency` (name, value) of `bandwidth` bytes/s."""
    seconds = bytes_ / (bandwidth * efficiency[1])
    return Cost(seconds, {efficiency[0]: -seconds})


def p_norm(power: int, *terms: Cost) -> Cost:
    """The root of the sum of powers, for limits that overlap: the largest term, or more beside others as large.

    power: 2: up to 41% more; 4: up to 19%, for limits that overlap almost fully; 8: up to 9%
    """
    total = norm_seconds(power, [term.seconds for term in terms])
    if not any(term.partials for term in terms):
        return Cost(total, {})
    inverse = 1 / np.where(total > 0, total, 1.0)
    combined = Cost(total, {})
    for term in terms:
        if term.partials:
            slope = _power(term.seconds * inverse, power - 1)
            combined = combined.plus_partials({name: value * slope for name, value in term.partials.items()})
    return combined


def norm_seconds(power: int, terms: Sequence[Array]) -> Array:
    """The seconds of `p_norm`. power: 2, 4 or 8"""
    largest = reduce(np.maximum, terms)
    scale = np.where(largest > 0, largest, 1.0)  # an eighth power would overflow in a fit
    if len(terms) == 2:  # the larger one's part is 1
        total = 1 + _power(np.minimum(*terms) / scale, power)
    else:
        total = reduce(np.add, [_power(term / scale, power) for term in terms])
    for _ in range(power.bit_length() - 1):  # powers of two
        total = np.sqrt(total)
    return np.asarray(largest * total)


def _power(x: Array, exponent: int) -> Array:
    """x^exponent by multiplications; numpy's power is twenty times slower."""
    if exponent == 1:
        return x
    product = x * x
    for _ in range(exponent - 2):
        product *= x
    return product


def together(costs: Sequence[Cost]) -> Cost:
    """The rows of several costs one after the other, shape (all rows,)."""
    names = dict.fromkeys(name for cost in costs for name in cost.partials)
    partials = {
        name: np.concatenate([cost.partials.get(name, np.zeros_like(cost.seconds)) for cost in costs]) for name in names
    }
    return Cost(np.concatenate([cost.seconds for cost in costs]), partials)


class Component(NamedTuple):
    """One line of the breakdown: a `cost` at distinct token counts, and the count that each step takes."""

    name: str
    cost: Cost
    inverse: Array | None  # None: `cost` is per step already

    def seconds(self) -> Array:
        return self.gathered(self.cost.seconds)

    def gathered(self, values: Array) -> Array:
        """`values` of the distinct counts, for each step; one value for all stays as it is, shape ()."""
        return values if self.inverse is None or not values.ndim else values[self.inverse]

    def per_step(self) -> Cost:
        return self.cost if self.inverse is None else self.cost.rows(self.inverse)

    def rows(self, rows: slice) -> Component:
        if self.inverse is None:
            return self._replace(cost=self.cost.rows(rows))
        return self._replace(inverse=self.inverse[rows])

    def gradient(self, weights: Array) -> dict[str, float]:
        """Sum over steps of weights x partials, per coefficient."""
        collected = self.collected(weights)
        return {name: weighted(values, collected) for name, values in self.cost.partials.items()}

    def collected(self, weights: Array) -> Array:
        """The `weights` of steps, added up at each of the distinct counts."""
        if self.inverse is None:
            return weights
        return np.bincount(self.inverse, weights=weights, minlength=self.cost.seconds.size)


def weighted(values: Array, weights: Array) -> float:
    """The sum of weights x values. Not weights @ values: BLAS would wake its threads, and wait for them when busy."""
    return float((weights * values).sum())


def where_busy(name: str, cost: Cost, counts: Array, inverse: Array) -> Component:
    """The component of `cost` at `counts`, and 0 where the count is 0."""
    return Component(name, cost.scaled(np.where(counts > 0, 1.0, 0.0)), inverse)


def gradient_of(components: Sequence[Component], weights: Array) -> dict[str, float]:
    """d sum(weights * seconds) / d log(coefficient), for every coefficient that `components` use."""
    gradient: dict[str, float] = {}
    for component in components:
        for name, value in component.gradient(weights).items():
            gradient[name] = gradient.get(name, 0.0) + value
    return gradient


def streaming_cost(
    name: str, rows: Array, bytes_per_row: float, gpu: Gpu, profile: Profile, bandwidth: str = ""
) -> Cost:
    """Seconds of one call of a small kernel that streams `rows` rows, shape of `rows`; 0 without rows.

    name:      prefix of its coefficients
    bandwidth: prefix of its bandwidth_efficiency, if it has none of its own
    """
    efficiency = profile.named(f"{bandwidth or name}.bandwidth_efficiency")
    moved = traffic(rows * bytes_per_row, gpu.memory_bandwidth, efficiency)
    return moved + times(np.where(rows > 0, 1.0, 0.0), *profile.named(f"{name}.launch_seconds"))
