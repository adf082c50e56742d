"""The same comparison on problems and samples that nothing was tuned on: `python -m benchmarks.control.held_out`.

Two minutes on two cores; writes held_out.md. Squared error relative to token TIS at C=2.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.control import simulate
from benchmarks.control.baselines import GRID
from benchmarks.control.methods import methods
from benchmarks.control.run import measured_noise_tokens
from benchmarks.control.scenarios import SCENARIOS, SEQUENCES

PROBLEMS = (1, 2)
SHOWN = ("adaptive", "adaptive, noise unknown")
SAVED = Path(__file__).parent / "held_out.md"


def compare(seed: int) -> list[str]:
    """Rows of the table for the problem of this seed, with samples of its own and its own noise scale."""
    simulate.PROBLEM_SEED, simulate.SAMPLE_SEED = seed, 1_000 + seed
    fixed = [f"fixed {c:g}" for c in GRID]
    offered = methods(measured_noise_tokens())
    chosen = {name: offered[name] for name in ("C=2", *SHOWN, *fixed)}
    rows = []
    for scenario in SCENARIOS:
        for sequences in SEQUENCES:
            errors = {name: trace.mse for name, trace in simulate.run(scenario, sequences, chosen).traces.items()}
            best = np.min([errors[name] for name in fixed], axis=0)
            figures = [errors[name].sum() for name in SHOWN] + [best.sum()]
            cells = " | ".join(f"{figure / errors['C=2'].sum():.3f}" for figure in figures)
            rows.append(f"| {seed} | {scenario.name} | {sequences:,} | {cells} |")
    return rows


def main() -> None:
    with ProcessPoolExecutor(2) as pool:
        rows = [row for found in pool.map(compare, PROBLEMS) for row in found]
    head = "| problem | scenario | sequences | " + " | ".join((*SHOWN, "best each step")) + " |"
    text = "\n".join(["# Problems that nothing was tuned on\n", head, "| --- " * 6 + "|", *rows]) + "\n"
    SAVED.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
