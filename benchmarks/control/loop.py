"""Training on estimated gradients: does a smaller error of each step's gradient make a better run?

    python -m benchmarks.control.loop           about two minutes: loop.json, and its table in table.md

Each method follows its own gradients, by Adam or by plain ascent, from the same start; what counts is the exact
expected return of the policy after STEPS steps, without mismatch. The best possible is about 22.
"""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.control.methods import methods
from benchmarks.control.observed import Observed
from benchmarks.control.problem import Floats, estimate, exact, make_problem, sample
from benchmarks.control.report import write
from benchmarks.control.run import measured_noise_tokens
from benchmarks.control.scenarios import PROBLEM_SEED, SAMPLE_SEED, SCENARIOS, SEEDS, SEQUENCES, STEPS
from benchmarks.control.simulate import weigh

SAVED = Path(__file__).parent / "loop.json"
SHOWN = ("none", "spikes", "heavy_tails")
COMPARED = ("C=1.5", "C=2", "C=5", "adaptive", "least error", "least error, noise unknown")
RATES = {"Adam": 0.02, "ascent": 0.01}


class Adam:
    """Bias-corrected, betas 0.9 and 0.99; maximises."""

    def __init__(self) -> None:
        self.steps, self.mean, self.square = 0, 0.0, 0.0

    def __call__(self, gradient: Floats) -> Floats:
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.99 * self.square + 0.01 * gradient**2
        scale = np.sqrt(self.square / (1 - 0.99**self.steps)) + 1e-8
        return self.mean / (1 - 0.9**self.steps) / scale


def train(name: str, sequences: int, compared: str, optimiser: str, noise_tokens: float) -> list[float]:
    """Exact expected returns at the end, by seed."""
    scenario = next(one for one in SCENARIOS if one.name == name)
    problem, seeds = make_problem(PROBLEM_SEED), SEEDS[sequences]
    logits = np.repeat(problem.start_logits[None], seeds, axis=0)
    method = methods(noise_tokens)[compared]()
    direction = Adam() if optimiser == "Adam" else lambda gradient: gradient
    for step in range(STEPS):
        rng = np.random.default_rng([SAMPLE_SEED, sequences, step])
        batch = sample(problem, logits, scenario.noise(step), seeds, sequences, rng)
        bounds = [method(scenario, step, seed, Observed(one)) for seed, one in enumerate(batch.log_ratio)]
        gradient = estimate(logits, batch, weigh(np.exp(batch.log_ratio), bounds))
        logits = logits + RATES[optimiser] * direction(gradient)
    return [exact(problem, one)[0] for one in logits]


def main() -> None:
    noise_tokens = measured_noise_tokens()
    tasks = list(product(SHOWN, SEQUENCES, COMPARED, RATES))
    with ProcessPoolExecutor(2) as pool:
        jobs = [pool.submit(train, *task, noise_tokens) for task in tasks]
        returns = [job.result() for job in jobs]
    rows = [
        {"scenario": task[0], "sequences": task[1], "method": task[2], "optimiser": task[3],
         "mean": round(float(np.mean(found)), 3), "standard_error": round(float(np.std(found) / len(found) ** 0.5), 3)}
        for task, found in zip(tasks, returns, strict=True)
    ]  # fmt: skip
    SAVED.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
    print(write())


if __name__ == "__main__":
    main()
