"""The same comparison on problems and samples that nothing was tuned on: `python -m benchmarks.control.held_out`.

Two minutes on two cores; writes held_out.md. Squared error relative to token TIS at C=2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.control import simulate
from benchmarks.control.baselines import GRID
from benchmarks.control.methods import Factory, methods
from benchmarks.control.run import measured_noise_tokens
from benchmarks.control.scenarios import SCENARIOS, SEQUENCES, Scenario
from benchmarks.tables.markdown import table

PROBLEMS = (1, 2)
SHOWN = ("adaptive", "least error", "least error, noise unknown")
SAVED = Path(__file__).parent / "held_out.md"


def compare(seed: int, scenarios: Sequence[Scenario] = SCENARIOS, sizes: Sequence[int] = SEQUENCES) -> list[list[str]]:
    """Rows of the table for the problem of this seed, with samples of its own and its own noise scale."""
    before = simulate.PROBLEM_SEED, simulate.SAMPLE_SEED
    simulate.PROBLEM_SEED, simulate.SAMPLE_SEED = seed, 1_000 + seed
    try:
        offered = methods(measured_noise_tokens())
        return [row(seed, scenario, sequences, offered) for scenario in scenarios for sequences in sizes]
    finally:
        simulate.PROBLEM_SEED, simulate.SAMPLE_SEED = before


def row(seed: int, scenario: Scenario, sequences: int, offered: Mapping[str, Factory]) -> list[str]:
    fixed = [f"fixed {c:g}" for c in GRID]
    chosen = {name: offered[name] for name in ("C=2", *SHOWN, *fixed)}
    errors = {name: trace.mse for name, trace in simulate.run(scenario, sequences, chosen).traces.items()}
    best = np.min([errors[name] for name in fixed], axis=0)
    figures = [errors[name].sum() for name in SHOWN] + [best.sum()]
    cells = (f"{figure / errors['C=2'].sum():.3f}" for figure in figures)
    return [str(seed), scenario.name, f"{sequences:,}", *cells]


def main() -> None:
    with ProcessPoolExecutor(2) as pool:
        rows = [row for found in pool.map(compare, PROBLEMS) for row in found]
    made = table(("problem", "scenario", "sequences", *SHOWN, "best each step"), rows)
    text = f"# Problems that nothing was tuned on\n\n{made}\n"
    SAVED.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
