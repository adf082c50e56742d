"""The lines of a step's breakdown: costs at distinct token counts, gathered into steps only where that is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fp8plan.model.cost.base import Array, Cost


class Component(NamedTuple):
    """One line of the breakdown: a `cost` at distinct token counts, and the count that each step takes."""

    name: str
    cost: Cost
    inverse: Array | None  # None: `cost` is per step already

    def seconds(self) -> Array:
        return self.gathered(self.cost.seconds)

    def gathered(self, values: Array) -> Array:
        """`values` of the distinct counts, for each step."""
        return values if self.inverse is None else values[self.inverse]

    def per_step(self) -> Cost:
        return self.cost if self.inverse is None else self.cost.rows(self.inverse)

    def rows(self, rows: slice) -> Component:
        """The component at the steps selected by `rows`."""
        if self.inverse is None:
            return self._replace(cost=self.cost.rows(rows))
        return self._replace(inverse=self.inverse[rows])

    def gradient(self, weights: Array) -> dict[str, float]:
        """Sum over steps of weights x partials, per coefficient."""
        if self.inverse is not None:
            weights = np.bincount(self.inverse, weights=weights, minlength=self.cost.seconds.size)
        # Not weights @ values: BLAS wakes its threads for that, and waits for them where others have the cores.
        return {name: float((weights * values).sum()) for name, values in self.cost.partials.items()}


def where_busy(name: str, cost: Cost, counts: Array, inverse: Array) -> Component:
    """The cost at `counts`, with nothing where the count is 0."""
    return Component(name, cost.scaled(np.where(counts > 0, 1.0, 0.0)), inverse)


def gradient_of(components: Sequence[Component], weights: Array) -> dict[str, float]:
    """The derivatives d sum(weights * seconds) / d log(coefficient), for every coefficient that `components` use."""
    gradient: dict[str, float] = {}
    for component in components:
        for name, value in component.gradient(weights).items():
            gradient[name] = gradient.get(name, 0.0) + value
    return gradient


def total_of(components: Sequence[Component]) -> Array:
    """Seconds of each step in all components together, shape (steps,)."""
    total = components[0].seconds()
    for component in components[1:]:
        total = total + component.seconds()
    return total
