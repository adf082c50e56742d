"""Every way of choosing the bound that is compared: today's, fp8plan's, and the control laws that were considered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import exp, log

import numpy as np

from benchmarks.control.baselines import CONSTANTS, GRID, by_staleness
from benchmarks.control.observed import Observed
from benchmarks.control.scenarios import Scenario
from benchmarks.control.simulate import Bound, Method, Mixed
from fp8plan.runtime.controller.laws import ControllerState, LeastErrorThresholds, LevelThresholds

Factory = Callable[[], Method]
Rule = Callable[[Observed], Bound]

LOOSEST = 20.0
BAND = (0.5, 5.0)  # IcePop's in verl and NeMo-RL


def constant(bound: Bound) -> Factory:
    return lambda: lambda scenario, step, seed, seen: bound


def of_batch(rule: Rule) -> Factory:
    """A law that looks at the batch alone."""
    return lambda: lambda scenario, step, seed, seen: rule(seen)


def controlled(settings: LevelThresholds | LeastErrorThresholds) -> Factory:
    """One of fp8plan's controllers, one state for each seed."""

    def make() -> Method:
        states: dict[int, ControllerState] = {}

        def choose(scenario: Scenario, step: int, seed: int, seen: Observed) -> Bound:
            before = states.get(seed) or settings.initial()
            thresholds, states[seed], _ = settings.update(before, seen)  # type: ignore[arg-type]
            return thresholds.band or thresholds.tis

        return choose

    return make


def falling_root(function: Callable[[float], float], high: float = LOOSEST) -> float:
    """The zero of a falling function of C in [1, high]."""
    low = 1.0
    if function(low) <= 0 or function(high) >= 0:
        return low if function(low) <= 0 else high
    for _ in range(20):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return low


def pi_on_clipped_mass(target: float = 0.05) -> Method:
    """The next step's log C from this step's error in clipped mass, proportional and integral."""
    log_c: dict[int, float] = {}
    before: dict[int, float] = {}

    def choose(scenario: Scenario, step: int, seed: int, seen: Observed) -> Bound:
        used = log_c.get(seed, log(2.0))
        error = min(seen.clipped_mass(exp(used)) / target - 1.0, 2.0)
        moved = used + 0.1 * (error - before.get(seed, error)) + 0.1 * error
        log_c[seed], before[seed] = min(max(moved, 0.0), log(LOOSEST)), error
        return exp(used)

    return choose


def truncated_ess(seen: Observed, c: float) -> float:
    weights = np.minimum(seen.ratio, c)
    return float(weights.mean() ** 2 / np.mean(weights**2))


def second_moment_band(seen: Observed, most: float = 0.04) -> Bound:
    """M2PO (arXiv 2510.01161): the tokens farthest out are masked until the mean squared log ratio is `most`."""
    distance = np.sort(np.abs(seen.log_ratio))
    mean = np.cumsum(distance**2) / np.arange(1, distance.size + 1)
    high = exp(distance[max(int(np.searchsorted(mean, most)) - 1, 0)])
    return (1.0 / high, high)


def schedule(seen: Observed, at: float, power: float, bounds: tuple[float, float]) -> float:
    """C from robust KL, `at` for a KL of 0.01."""
    return float(np.clip(at * (seen.k3_robust / 0.01) ** power, *bounds))


def methods(noise_tokens: float) -> dict[str, Factory]:
    """noise_tokens: the problem's gradient noise scale, as a user would have measured it."""
    informed = LeastErrorThresholds(noise_tokens=noise_tokens)
    return {
        **{name: constant(bound) for name, bound in CONSTANTS.items()},
        "staleness": lambda: lambda scenario, step, seed, seen: by_staleness(scenario, step),
        "icepop [0.5, 5]": constant(BAND),
        "adaptive": controlled(LevelThresholds()),
        "adaptive band": controlled(LevelThresholds(tis=None, band=BAND)),
        "least error": controlled(informed),
        "least error, noise unknown": controlled(LeastErrorThresholds()),
        "least error, noise x4": controlled(replace(informed, noise_tokens=4 * noise_tokens)),
        "least error, noise /4": controlled(replace(informed, noise_tokens=noise_tokens / 4)),
        "least error band": controlled(replace(informed, tis=None, band=BAND)),
        "law: least error, slow to relax": controlled(replace(informed, slew=(4.0, 1.15))),
        "law: least error, slow to tighten": controlled(replace(informed, slew=(1.15, 4.0))),
        "law: adaptive at half the gain": controlled(LevelThresholds(gain=0.1)),
        "law: adaptive at twice the gain": controlled(LevelThresholds(gain=0.4)),
        "law: tighten with KL": of_batch(lambda seen: schedule(seen, 2.0, -0.2, (1.2, 2.0))),
        "law: relax with KL": of_batch(lambda seen: schedule(seen, 1.2, 0.4, (1.2, 8.0))),
        "law: 3% clipped": of_batch(lambda seen: falling_root(lambda c: seen.clipped_mass(c) - 0.03)),
        "law: PI on 5% clipped": pi_on_clipped_mass,
        "law: truncated ESS 0.9": of_batch(lambda seen: falling_root(lambda c: truncated_ess(seen, c) - 0.9)),
        "law: 99% quantile": of_batch(lambda seen: float(max(np.quantile(seen.ratio, 0.99), 1.0))),
        "law: mixing by ESS": of_batch(lambda seen: Mixed(seen.ess_raw)),
        "law: second moment 0.04": of_batch(second_moment_band),
        **{f"fixed {c:g}": constant(c) for c in GRID},
    }
