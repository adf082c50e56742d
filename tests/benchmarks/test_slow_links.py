"""The benchmark of syncs over slow links counts what it says it counts."""

from __future__ import annotations

from math import log2

import pytest
import torch

from benchmarks.slow_links import tables
from benchmarks.slow_links.steps import Encoding, entropy_bits, fp8_names, worth
from fp8plan.model.rl_step import COMPARED_SECONDS, PATCH_BYTE_SECONDS, PATCHED_SECONDS


def test_entropy_is_that_of_places_and_differences() -> None:
    held = torch.zeros(1024, dtype=torch.uint8)
    new = held.clone()
    new[7] = 3
    alone = 10 - 1023 * log2(1023 / 1024)
    assert entropy_bits(held, new) == pytest.approx(alone)
    new[9] = 5  # two differences that are equally frequent take a bit each
    share = 2 / 1024
    assert entropy_bits(held, new) == pytest.approx(-2 * log2(share) - 1022 * log2(1 - share) + 2)
    assert entropy_bits(held, held) == 0


def test_bytes_are_counted_apart_for_linears_and_other_tensors() -> None:
    tensors = {
        "model.layers.0.a.weight": torch.randn(128, 256).bfloat16(),
        "model.norm.weight": torch.ones(256).bfloat16(),
    }
    assert fp8_names(tensors) == {"model.layers.0.a.weight"}
    encoding = Encoding(tensors)
    nothing = encoding.step(tensors)
    assert nothing["fp8_bytes"] == nothing["bf16_bytes"] == 0
    moved = tensors | {"model.norm.weight": tensors["model.norm.weight"] + 1}
    row = encoding.step(moved)
    assert (row["fp8_bytes"], row["bf16_changed"]) == (0, 256)
    moved["model.layers.0.a.weight"] = -tensors["model.layers.0.a.weight"]
    row = encoding.step(moved)
    assert row["bf16_bytes"] == 0 < row["fp8_changed"]


def test_a_response_is_worth_more_the_nearer_its_number_is() -> None:
    assert [worth(text, 30) for text in ("30 and 7", "29", "is", "0")] == [1.0, 0.5, 0.0, 1 / 31]


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
