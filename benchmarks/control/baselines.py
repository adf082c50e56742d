"""Today's practice: the same threshold in every step, or one that follows the age of the samples."""

from __future__ import annotations

from benchmarks.control.scenarios import Scenario

INFINITE = 1e9

# Upper bound of the weight; None: all weights are 1 (the mismatch is ignored).
CONSTANTS: dict[str, float | None] = {
    "C=1.5": 1.5, "C=2": 2.0, "C=5": 5.0, "untruncated": INFINITE, "uncorrected": None,
}  # fmt: skip

# Candidates for the best constant in hindsight, and in each step.
GRID = (1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0, 15.0, 20.0)

MOST_STALE = 3


def by_staleness(scenario: Scenario, step: int) -> float:
    """2.0 for fresh samples down to 1.0 for those three versions old, as hermes_agentic_rl's StalenessAdaptiveTIS."""
    return 2.0 - min(scenario.staleness(step), MOST_STALE) / MOST_STALE
