"""One run of a scenario: every method weighs the same samples, and its gradients are compared with the exact one.

The order within a step is Monitor's: measure the batch, decide the thresholds, weigh the batch with them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from benchmarks.control.observed import Observed
from benchmarks.control.problem import Floats, estimate, exact, make_problem, sample, training_path
from benchmarks.control.scenarios import PROBLEM_SEED, RATE, SAMPLE_SEED, SEEDS, STEPS, Scenario


@dataclass(frozen=True, slots=True)
class Mixed:
    """Weights between uncorrected and corrected, 1 - share + share x ratio, as AIS (arXiv 2605.13907) mixes."""

    share: float


# Upper bound of token TIS; (low, high) of token MIS; a mixture; None: all weights 1.
Bound = float | tuple[float, float] | Mixed | None
# (scenario, step, seed, what the controller sees) -> bound. One per run: it may keep state for each seed.
Method = Callable[[Scenario, int, int, Observed], Bound]


class Trace(NamedTuple):
    """Per step, means over seeds. Squares are absolute; divide their sums by sum(gradient2).

    mse:        E |estimate - exact|^2 = bias2 + variance
    along:      E <estimate, exact>
    length2:    E |estimate|^2
    bounds:     (STEPS, seeds) upper bound used
    lost:       share of the weight that TIS cut away, or of the tokens that MIS dropped
    """

    mse: Floats
    bias2: Floats
    variance: Floats
    along: Floats
    length2: Floats
    bounds: Floats
    lost: Floats


class Run(NamedTuple):
    """traces by method; gradient2: |exact|^2, kl: mean k3, both by step."""

    traces: dict[str, Trace]
    gradient2: Floats
    kl: Floats


def run(scenario: Scenario, sequences: int, methods: Mapping[str, Callable[[], Method]]) -> Run:
    """methods: name -> a factory of methods, called once."""
    problem = make_problem(PROBLEM_SEED)
    path = training_path(problem, STEPS, RATE)
    chosen = {name: make() for name, make in methods.items()}
    rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in chosen}
    seeds, seen, gradient2, kl = SEEDS[sequences], [], [], []
    for step, logits in enumerate(path):
        rng = np.random.default_rng([SAMPLE_SEED, zlib.crc32(scenario.name.encode()), sequences, step])
        batch = sample(problem, logits, scenario.noise(step), seeds, sequences, rng)
        gradient = exact(problem, logits)[1]
        ratio = np.exp(batch.log_ratio)
        seen.append([Observed(one) for one in batch.log_ratio])
        shown = seen[max(step - scenario.lag, 0)]
        for name, method in chosen.items():
            bounds = [method(scenario, step, seed, shown[seed]) for seed in range(seeds)]
            weights = weigh(ratio, bounds)
            estimates = estimate(logits, batch, weights)
            rows[name].append((*_errors(estimates, gradient), [_upper(b) for b in bounds], _lost(ratio, weights)))
        gradient2.append(np.sum(gradient**2))
        kl.append(np.mean([one.k3 for one in seen[-1]]))
    traces = {name: Trace(*map(np.array, zip(*found, strict=True))) for name, found in rows.items()}
    return Run(traces, np.array(gradient2), np.array(kl))


def weigh(ratio: Floats, bounds: Sequence[Bound]) -> Floats:
    """Weights (seeds, sequences, TOKENS) of ratios of that shape: token TIS, token MIS or none, by seed."""
    if bounds[0] is None:
        return np.ones_like(ratio)
    shaped = (-1, 1, 1)
    if isinstance(bounds[0], Mixed):
        share = np.reshape([bound.share for bound in bounds], shaped)  # type: ignore[union-attr]
        return 1.0 - share + share * ratio
    if isinstance(bounds[0], tuple):
        low, high = (np.reshape(side, shaped) for side in zip(*bounds, strict=True))  # type: ignore[arg-type]
        return np.where((ratio >= low) & (ratio <= high), ratio, 0.0)
    return np.minimum(ratio, np.reshape(bounds, shaped))


def _upper(bound: Bound) -> float:
    if isinstance(bound, tuple):
        return bound[1]
    return bound if isinstance(bound, float) else np.nan


def _lost(ratio: Floats, weights: Floats) -> float:
    dropped = np.mean(weights == 0.0)
    return float(dropped or max(1.0 - weights.sum() / ratio.sum(), 0.0))


def _errors(estimates: Floats, gradient: Floats) -> tuple[float, float, float, float, float]:
    """(mse, bias^2, variance, along, length^2). estimates: (seeds, STATES, ACTIONS)."""
    count = len(estimates)
    mse = np.mean(np.sum((estimates - gradient) ** 2, (1, 2)))
    variance = np.sum(np.var(estimates, axis=0, ddof=1))
    bias2 = np.sum((estimates.mean(0) - gradient) ** 2) - variance / count  # unbiased, so it may fall below zero
    along = np.mean(np.sum(estimates * gradient, (1, 2)))
    return float(mse), float(bias2), float(mse - bias2), float(along), float(np.mean(np.sum(estimates**2, (1, 2))))
