"""The benchmark of syncs over slow links counts what it says it counts."""

from __future__ import annotations

import pytest

from benchmarks.tables import slow_links as tables
from fp8plan.model.rl_step import COMPARED_SECONDS, PATCH_BYTE_SECONDS, PATCHED_SECONDS


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "fp8plan/moe-7b"])
def test_a_plan_names_the_fastest_mode_on_each_link(model: str) -> None:
    """At seconds that an H200 took, and the link's."""
    links = tables.planned_links(model, 3e-7)
    assert all(modes.right for modes in links.values())
    assert len({min(modes.measured, key=modes.measured.__getitem__) for modes in links.values()}) > 1


def test_the_plans_constants_are_those_of_the_fit() -> None:
    planned = (COMPARED_SECONDS, PATCHED_SECONDS, PATCH_BYTE_SECONDS)
    assert tables.fitted() == pytest.approx(planned, rel=0.02)


def test_the_planned_seconds_of_both_sides_are_near_the_measured_ones() -> None:
    for model in ("Qwen/Qwen3-8B", "fp8plan/moe-7b"):
        for rate in (3e-8, 3e-7):
            modes = tables.planned_links(model, rate)["1Gb/s"]
            link_s = tables.gpu_syncs()[model, "cuda:0", "delta", rate]["bytes"] / 125e6
            assert modes.planned["delta"] - link_s == pytest.approx(modes.measured["delta"] - link_s, rel=0.15)
