"""The grounds of a predicted time: the shares of it that are measured, imported, extrapolated, or theory.

Each component of a step is split over its coefficients, in proportion to the derivatives by their logs. Coefficients
with the datasheet's value are theory, by the profile's notes. The others are measured or imported, as the profile is.
They count as extrapolated in a step that has a quantity outside of the range that was measured for the component's
kernels. Observed rollouts change paces and values, but not the grounds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fp8plan.model.cost.base import QUANTITIES, Array, Component, Cost, Engine, StepBatch
from fp8plan.model.profile.profile import FITTED

UNSEEN = ("extrapolated", "theory")
GROUNDS = ("measured", "imported", *UNSEEN)
# A time is called extrapolated if a larger share of it is extrapolated or theory. Of 71 rollouts that no fit has seen
# (families/held_out.jsonl of the H200's profile) 13 are. Their mean error is 4.4%, and that of the others 2.8%.
MOST_UNSEEN = 0.1
FACTORS = ("clock.", "memory.", "power.")  # starts of coefficients that slow a whole GPU, as paces do
OF_LAYERS = ("n", "k")  # quantities of linear layers, which count below their range too
WITH_RANGES = ("attention", "gemm", "sampling")  # components whose kernels have ranges; other ranges are of all


class Excess(NamedTuple):
    """A quantity that leaves the range which was measured for a kernel.

    values:  shape (steps,), or (linears,) for OF_LAYERS
    outside: True for each value outside of the range
    """

    kernel: str
    quantity: str
    values: Array
    low: float
    high: float
    outside: Array

    def concerns(self, component: str) -> bool:
        """True if the range is of this component's kernels."""
        name = re.split(r"[._]", self.kernel)[0]
        return name == component or name not in WITH_RANGES

    def __str__(self) -> str:
        used = self.values[self.values > 0]
        span = f"{used.min():g} to {used.max():g}"
        return f"{self.kernel}: {self.quantity} {span}, measured {self.low:g} to {self.high:g}"


def excesses(model: Engine, batch: StepBatch, padded: Array) -> Iterator[Excess]:
    """The quantities of these steps that leave the profile's hull.

    padded: tokens that the engine runs in each step, shape (steps,)

    Layers count if they are larger or smaller than all timed ones. Requests and tokens count only above the range: with
    fewer a step nears its fixed costs, which are known.
    """
    quantities: dict[str, Array] = {name: getattr(batch, name) for name in QUANTITIES}
    quantities |= {"m": padded}
    quantities |= {name: np.array([getattr(x, name) for x in model.main_linears]) for name in OF_LAYERS}
    for kernel, ranges in (model.profile.hull or {}).items():
        dtype, precision = kernel.partition(".")[2], model.precision
        if dtype and dtype != (precision.kv if kernel.startswith("attention") else precision.gemm_dtype):
            continue  # another precision's
        for quantity, (low, high) in ranges.items():
            values = quantities.get(quantity, np.zeros(0))
            beyond = (values < low) | (values > high) if quantity in OF_LAYERS else values > high
            outside = (values > 0) & beyond  # 0 means none in this step, not a small amount
            if outside.any():
                yield Excess(kernel, quantity, values, low, high, outside)


def rests_on(
    parts: Sequence[tuple[Component, Array]], start: Cost, front: Cost, model: Engine, outside: list[Excess]
) -> dict[str, dict[str, Any]]:
    """The shares of a time by their grounds: {"shares": ground -> share, "kernels": component -> ground -> share}.

    All shares are of the whole time, so both add up to 1. Shares of 0 are left out.

    parts:   the components of the steps, and the seconds that each step takes for them, shape (steps,)
    start:   the result of `start_cost`: seconds of the host before the steps
    front:   the cost of `front_of`, which was measured on other machines: imported
    outside: the result of `excesses` for these steps
    """
    imported_share = float(model.profile.kind == "imported")  # of what is known: a profile is imported as a whole
    spent: dict[str, dict[str, float]] = {}
    for part, taken in parts:
        theory = taken * part.gathered(_theory(part.cost, model))
        beyond = (taken - theory) * _outside(part.name, model, outside, taken.size)
        known = taken - theory - beyond
        imported = known * imported_share
        totals = [float(x.sum()) for x in (known - imported, imported, beyond, theory)]
        spent[part.name] = dict(zip(GROUNDS, totals, strict=True))
    theory = start.seconds * _theory(start, model)
    imported = (start.seconds - theory) * imported_share
    for ground, value in zip(
        ("measured", "imported", "theory"), (start.seconds - theory - imported, imported, theory), strict=True
    ):
        spent["host"][ground] += float(value[0])
    spent["front"] = {"imported": float(front.seconds.sum())}
    total = sum(sum(part.values()) for part in spent.values())
    kernels = {
        name: {ground: part[ground] / total for ground in GROUNDS if part.get(ground)} for name, part in spent.items()
    }
    shares = {ground: sum(part.get(ground, 0.0) for part in kernels.values()) for ground in GROUNDS}
    return {
        "shares": {ground: share for ground, share in shares.items() if share},
        "kernels": {name: part for name, part in sorted(kernels.items(), key=lambda x: -sum(x[1].values())) if part},
    }


def _theory(cost: Cost, model: Engine) -> Array:
    """The share of a cost that coefficients with the datasheet's value make up, of the shape of its seconds or ()."""
    if model.profile.hull is None:
        return np.ones(())
    parts = {name: np.abs(partial) for name, partial in cost.partials.items() if not _is_factor(name)}
    notes = {name: model.profile.notes.get(name, FITTED) for name in parts}
    lent = [name for name, note in notes.items() if not note.startswith(FITTED)]
    if not lent:
        return np.zeros(())
    total = sum(parts.values(), np.zeros_like(cost.seconds))
    return np.asarray(sum(parts[name] for name in lent) / np.where(total > 0, total, 1.0))


def _is_factor(name: str) -> bool:
    """True for a coefficient on all seconds of a GPU, host, precision or layout, which is no part of a time."""
    return name.startswith(FACTORS) or name.endswith(".pace")


def _outside(component: str, model: Engine, outside: list[Excess], steps: int) -> Array:
    """The share of a component in each step that is outside of what was measured, shape (steps,).

    A linear layer's share of a GEMM's seconds is taken as that of its weights. Without a measurement of the layout,
    all-reduces and the host are extrapolated, and experts that are shared out whole.
    """
    size, whole_experts = model.cut
    unmeasured = whole_experts or size not in model.profile.tensor_parallel
    if (component in ("collective", "host") and unmeasured) or (component == "moe" and whole_experts):
        return np.ones(steps)
    shares = np.zeros(steps)
    layers = np.zeros(len(model.main_linears), dtype=bool)
    for excess in outside:
        if excess.quantity in OF_LAYERS:
            layers |= excess.outside & excess.concerns(component)
        elif excess.concerns(component):
            shares = np.maximum(shares, excess.outside)
    if layers.any():
        sizes = [x.n * x.k * x.layers for x in model.main_linears]
        every = sum(x.n * x.k * x.layers for x in model.layers)
        shares = np.maximum(shares, float(np.array(sizes)[layers].sum()) / every)
    return shares
