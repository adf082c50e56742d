"""Run every scenario at every batch size: `python -m benchmarks.control.run`.

Writes results.json, table.md and control.png.

About two minutes on two cores. The seeds are fixed: the same numbers come out each time on the same numpy.
"""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.control.baselines import GRID
from benchmarks.control.methods import constant, methods
from benchmarks.control.problem import TOKENS
from benchmarks.control.scenarios import SCENARIOS, SEQUENCES, SPIKES, STEPS
from benchmarks.control.simulate import Run, Trace, run
from fp8plan.runtime.controller.laws import noise_scale

FOLDER = Path(__file__).parent
SETTLED = 12
LAWS = ("adaptive", "least error")
KEPT_TRACES = ("C=2", "adaptive", "least error")


def measured_noise_tokens() -> float:
    """The gradient noise scale before the run, from squared gradient norms at two batch sizes without mismatch."""
    none = next(scenario for scenario in SCENARIOS if scenario.name == "none")
    norms = {}
    for sequences in (SEQUENCES[0], SEQUENCES[-1]):
        traces = run(none, sequences, {"C=2": constant(2.0)}).traces
        norms[sequences * TOKENS] = float(traces["C=2"].length2.mean())
    (small, norm_small), (large, norm_large) = norms.items()
    return noise_scale(norm_small, small, norm_large, large)


def evaluate(number: int, sequences: int, noise_tokens: float) -> dict[str, Any]:
    """Scenario `number` with every method: one line of results.json."""
    scenario = SCENARIOS[number]
    found = run(scenario, sequences, methods(noise_tokens))
    gradient2 = found.gradient2.sum()
    fixed = {c: found.traces[f"fixed {c:g}"] for c in GRID}
    best = min(GRID, key=lambda c: fixed[c].mse.sum())
    return {
        "scenario": scenario.name,
        "sequences": sequences,
        "noise_tokens": noise_tokens,
        "kl": [found.kl.min(), found.kl.mean(), found.kl.max()],
        "best_fixed": {"c": best, "mse": fixed[best].mse.sum() / gradient2},
        "best_each_step": {"mse": np.min([trace.mse for trace in fixed.values()], axis=0).sum() / gradient2},
        "methods": {n: summary(t, gradient2) for n, t in found.traces.items() if not n.startswith("fixed")},
        "lag": {name: lag(found, name) for name in LAWS} if scenario.name == "step" else None,
        "by_step": {"kl": found.kl.tolist(), "gradient2": found.gradient2.tolist()}
        | {name: {"mse": found.traces[name].mse.tolist(), "bound": found.traces[name].bounds.mean(1).tolist()}
           for name in KEPT_TRACES},
    }  # fmt: skip


def summary(trace: Trace, gradient2: float) -> dict[str, float]:
    """Relative to the squared gradients of the run. direction: what is left of the error after one best factor for the
    whole run, 1 - cosine^2: blind to a gradient that is only too short or too long.
    moves: share of steps in which the bound moved; churn: mean |change of log bound| per step."""
    steps = np.abs(np.diff(np.log(trace.bounds), axis=0))
    return {
        "mse": trace.mse.sum() / gradient2,
        "bias2": trace.bias2.sum() / gradient2,
        "variance": trace.variance.sum() / gradient2,
        "direction": 1.0 - trace.along.sum() ** 2 / (trace.length2.sum() * gradient2),
        "lost": float(trace.lost.mean()),
        "moves": float(np.mean(steps > 0)),
        "churn": float(np.mean(steps)) if np.isfinite(steps).all() else 0.0,
    }


def lag(found: Run, name: str) -> float:
    """Steps after the step change until a law's bound is within 10% of its mean over SETTLED steps; mean over
    seeds. (Later it moves on, with the policy.)"""
    bounds = np.log(found.traces[name].bounds[STEPS // 2 :][:SETTLED])
    near = np.abs(bounds - bounds.mean(0)) <= np.log(1.1)
    return float(np.mean(np.argmax(near, axis=0)))


def main() -> None:
    noise_tokens = measured_noise_tokens()
    tasks = list(product(range(len(SCENARIOS)), SEQUENCES))
    with ProcessPoolExecutor(2) as pool:
        jobs = [pool.submit(evaluate, number, sequences, noise_tokens) for number, sequences in tasks]
        results = [job.result() for job in jobs]
    spikes = sorted(SPIKES)
    text = json.dumps({"steps": STEPS, "spikes": spikes, "results": rounded(results)}, indent=None)
    (FOLDER / "results.json").write_text(text.replace('{"scenario"', '\n{"scenario"') + "\n", encoding="utf-8")
    from benchmarks.control.report import write

    print(write(FOLDER))


def rounded(value: Any) -> Any:
    """Floats to five digits, so that the file stays small and differences in it mean something."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
