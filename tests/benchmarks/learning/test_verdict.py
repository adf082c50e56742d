"""The rule by which a law becomes the default."""

from __future__ import annotations

from itertools import product

import pytest

from benchmarks.learning.arms import EVERY
from benchmarks.learning.verdict import (
    CANDIDATES,
    LARGE,
    OVER_ALL,
    WORSE_IN_ONE,
    Clause,
    clauses,
    report,
    verdict,
)

CANDIDATE = CANDIDATES[0]
Rewards = dict[str, dict[int, float]]


def rewards(gain: float, seeds: range, mismatches: tuple[str, ...]) -> Rewards:
    """Arms whose candidate gains so much over C = 2 in the mean, with some spread."""
    arms: Rewards = {}
    for mismatch, (number, seed) in product(mismatches, enumerate(seeds)):
        arms.setdefault(f"{mismatch}-tis", {})[seed] = 0.5 + 0.01 * seed
        spread = 0.02 if number % 2 else -0.02
        arms.setdefault(f"{mismatch}-{CANDIDATE.arm}", {})[seed] = 0.5 + 0.01 * seed + gain + spread
    return arms


def judged(tiny: float = 0.0, large: float = 0.0) -> list[Clause]:
    cpu, gpu = rewards(tiny, CANDIDATE.cpu, EVERY), rewards(large, CANDIDATE.gpu, LARGE)
    return clauses(CANDIDATE, cpu, gpu)


def test_a_level_candidate_holds_and_one_far_behind_fails() -> None:
    assert verdict(judged()) is True
    assert verdict(judged(tiny=-0.06)) is False
    assert verdict(judged(large=-0.06)) is False


def test_a_small_loss_everywhere_fails_over_all_alone() -> None:
    failed = [clause.mismatch for clause in judged(tiny=-0.025) if clause.holds is False]
    assert failed == [OVER_ALL]


def test_the_lower_end_is_that_of_students_t() -> None:
    """t of 3 degrees of freedom is 1.638 at 0.9 (any table)."""
    clause = Clause("tiny", "lasting", (0.0, 0.02, 0.04, 0.06), WORSE_IN_ONE, 4)
    assert clause.lower_end == pytest.approx(0.03 - 1.638 * 0.02582 / 2, abs=1e-4)


def test_missing_seeds_leave_it_open_but_a_failed_clause_rejects() -> None:
    nothing: Rewards = {}
    assert verdict(clauses(CANDIDATE, rewards(0.0, CANDIDATE.cpu, EVERY), nothing)) is None
    assert verdict(clauses(CANDIDATE, nothing, rewards(-0.1, CANDIDATE.gpu, LARGE))) is False
    few = rewards(-0.1, range(CANDIDATE.gpu.start, CANDIDATE.gpu.stop - 1), LARGE)
    assert verdict(clauses(CANDIDATE, nothing, few)) is None
    assert "1 seeds are missing" in report(nothing, few)


def test_candidates_share_no_seed_with_each_other_or_with_earlier_runs() -> None:
    for seeds in ([set(candidate.cpu) for candidate in CANDIDATES], [set(candidate.gpu) for candidate in CANDIDATES]):
        assert not set.intersection(*seeds)
        assert min(set.union(*seeds)) >= 10  # earlier runs have 0 to 9
