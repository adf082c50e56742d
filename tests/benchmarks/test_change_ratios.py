"""Predicted beside measured shares of changed values: what the page on them says."""

from __future__ import annotations

import pytest

from benchmarks.tables import change_ratios


@pytest.fixture(scope="module")
def compared() -> list[change_ratios.Compared]:
    return change_ratios.compared()


def test_layers_of_known_weights_are_nearly_all_within_the_factor(compared: list[change_ratios.Compared]) -> None:
    ratios = [x.ratio for x in compared if x.group == ("others", "known", "to 1e-4")]
    assert len(ratios) > 100
    assert sum(1 / 1.5 <= ratio <= 1.5 for ratio in ratios) / len(ratios) > 0.9


def test_a_summary_counts_every_comparison_once(compared: list[change_ratios.Compared]) -> None:
    lines = change_ratios.summary(compared).splitlines()[2:]
    counts = [line.split("|")[5].split(" of ") for line in lines]
    assert sum(int(total) for _, total in counts) == len(compared)
    assert sum(int(within) for within, _ in counts) == sum(1 / 1.5 <= x.ratio <= 1.5 for x in compared)


def test_an_observed_step_corrects_what_assumed_weights_foresee(compared: list[change_ratios.Compared]) -> None:
    assumed = [x for x in compared if x.group[:2] == ("others", "assumed")]
    assert len(assumed) == 17
    assert not any(1 / 1.5 <= x.ratio <= 1.5 for x in assumed)
    assert all(1 / 1.5 <= x.corrected <= 1.5 for x in assumed)
