"""The scenarios, batch sizes and seeds. Committed before any controller was tuned; not to be changed for one.

Where the strengths come from (KL is k3 per token): BF16 against BF16 about 1e-4, dense FP8 1e-3 to 1e-2, FP8 MoE 1e-3
to 1e-1 and growing with training; 0.002 -> 0.025 in a thousand steps with ratios up to 1e5 (QuRL, arXiv 2602.13953);
0.047, 25 times BF16's, when expert weights were silently not reloaded (verl#7986); spikes past 1, up to 5, before an
FP8 MoE run collapsed (FP8-RL, arXiv 2601.18150v2). results.json has the KL that each scenario really showed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.control.problem import Mismatched

STEPS = 96
PROBLEM_SEED, SAMPLE_SEED = 20261122, 5
RATE = 0.02  # of the exact ascent that every method follows
# Sequences per batch. At 16 the gradient's noise is about as large as the gradient (the "gradient noise scale" of
# arXiv 1812.06162, where batches are usually chosen); at 128 and 1,024 it is an eighth and a 64th, so bias counts.
SEQUENCES = (16, 128, 1024)
SEEDS = {16: 64, 128: 24, 1024: 8}  # independent repetitions


@dataclass(frozen=True, slots=True)
class Scenario:
    """noise: by step; lag: the controller sees the metrics of so many steps ago; staleness: weight versions that the
    rollout is behind, by step, for the schedule that looks at nothing else."""

    name: str
    noise: Callable[[int], Mismatched]
    lag: int = 0
    staleness: Callable[[int], int] = lambda step: step % 4


def _none(step: int) -> Mismatched:
    return Mismatched(0.02)


def _drift(step: int) -> Mismatched:
    return Mismatched(0.1 * 6.0 ** (step / (STEPS - 1)))


def _step(step: int) -> Mismatched:
    return Mismatched(0.12 if step < STEPS // 2 else 0.8)


def _spike_steps() -> dict[int, float]:
    """Eight spikes of one to four steps, each of one strength."""
    rng = np.random.default_rng(17)
    found: dict[int, float] = {}
    for start in 6 + 11 * np.arange(8) + rng.integers(0, 6, 8):
        strength = float(rng.uniform(1.2, 3.0))
        found |= {int(start) + k: strength for k in range(int(rng.integers(1, 5)))}
    return found


SPIKES = _spike_steps()


def _spikes(step: int) -> Mismatched:
    return Mismatched(SPIKES.get(step, 0.25))


def _heavy_tails(step: int) -> Mismatched:
    return Mismatched(0.4, student=True)


def _outliers(step: int) -> Mismatched:
    return Mismatched(0.2, 0.03, 5.0)


def _moe_growth(step: int) -> Mismatched:
    grown = step / (STEPS - 1)
    return Mismatched(0.2 + 0.3 * grown, 0.003 * 20.0**grown, 3.0)


def _lagging(step: int) -> Mismatched:
    return Mismatched(1.2 if step // 16 % 2 else 0.2)


SCENARIOS = (
    Scenario("none", _none),
    Scenario("drift", _drift),
    Scenario("step", _step),
    Scenario("spikes", _spikes),
    Scenario("heavy_tails", _heavy_tails),
    Scenario("outliers", _outliers),
    Scenario("moe_growth", _moe_growth),
    Scenario("lagging", _lagging, lag=5),
)
