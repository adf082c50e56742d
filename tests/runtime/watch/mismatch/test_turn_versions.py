"""Trajectories of turns that span syncs: the mismatch of each weight version, in figures and in the record."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fp8plan.errors import ConfigError
from fp8plan.runtime.watch.mismatch.measure import measure, pack
from fp8plan.runtime.watch.mismatch.turn_versions import turn_versions
from fp8plan.runtime.watch.monitor.monitor import Monitor
from fp8plan.runtime.watch.monitor.sinks import Callback

ANSWERS = [[40, 30, 20], [50, 25], [60]]
TOOLS = [[10, 5, 0], [8, 0], [0]]
VERSIONS = [[6, 7, 8], [7, 7], [8]]
SPANS = [[a + t for a, t in zip(*rows, strict=True)] for rows in zip(ANSWERS, TOOLS, strict=True)]
LENGTH = 110


def log_probs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Padded [3, LENGTH]: the log ratio of a token is that of its weights, 0.3 for each version behind 8."""
    mask, ratio = torch.zeros(3, LENGTH), torch.full((3, LENGTH), 9.0)  # a tool's tokens would be far off
    for row, (answers, tools, versions) in enumerate(zip(ANSWERS, TOOLS, VERSIONS, strict=True)):
        first = 0
        for answer, tool, version in zip(answers, tools, versions, strict=True):
            mask[row, first : first + answer] = 1
            ratio[row, first : first + answer] = 0.3 * (8 - version)
            first += answer + tool
    rollout = torch.full((3, LENGTH), -20.0)
    return rollout + ratio, rollout, mask


def test_each_turn_counts_under_the_weights_that_generated_it() -> None:
    rows: list[Any] = []
    monitor = Monitor(sinks=[Callback(rows.append)])
    step = monitor.step(*log_probs(), versions=turn_versions(VERSIONS, SPANS, LENGTH))
    spans = step.mismatch.versions
    assert {version: span.tokens for version, span in spans.items()} == {6: 40, 7: 30 + 50 + 25, 8: 20 + 60}
    for version, span in spans.items():
        assert span.k1 == pytest.approx(-0.3 * (8 - version), abs=1e-6)
    assert {version: part["tokens"] for version, part in rows[0]["versions"].items()} == {"6": 40, "7": 105, "8": 80}
    stale = (40 * (np.expm1(0.6) - 0.6) + 105 * (np.expm1(0.3) - 0.3)) / 225
    (part,) = [part for part in step.attribution if part.causes == ("staleness",)]
    assert (part.low, part.how) == (pytest.approx(stale, rel=1e-5), "bounded")


def test_packed_turns_have_the_same_figures_as_padded_ones() -> None:
    padded = log_probs()
    lengths = [sum(spans) for spans in SPANS]
    packed = [torch.cat([row[:length] for row, length in zip(each, lengths, strict=True)]) for each in padded]
    one = measure(pack(*padded), turn_versions(VERSIONS, SPANS, LENGTH)).metrics().versions
    other = measure(pack(*packed, lengths=lengths), turn_versions(VERSIONS, SPANS)).metrics().versions
    assert {version: (span.tokens, round(span.k3, 6)) for version, span in one.items()} == {
        version: (span.tokens, round(span.k3, 6)) for version, span in other.items()
    }


def test_turns_that_do_not_fit_are_refused() -> None:
    for versions, tokens in (([[1, 2]], [[5]]), ([[1]], [[5], [6]])):
        with pytest.raises(ConfigError, match="versions and tokens differ in their numbers of turns; allowed"):
            turn_versions(versions, tokens)
    for number in (-1, 1.5):
        with pytest.raises(ConfigError, match=f"have {number}; allowed: whole numbers of at least 0"):
            turn_versions([[1, 2]], [[5, number]])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="trajectory 1 has 12 tokens; allowed: 10, the row's length"):
        turn_versions([[1], [1, 2]], [[5], [6, 6]], 10)
