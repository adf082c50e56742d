"""Measurements of routed experts: the points, and the experts to which the tokens of a call go."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from fp8plan.model.calibrate.profile_of import MOE, is_held_out
from fp8plan.runtime.measure.kernels import moe as grid


@pytest.mark.parametrize(("name", "least", "most"), [("quick", 50, 70), ("full", 280, 340)])
def test_points_are_unique_and_can_be_run(name: str, least: int, most: int) -> None:
    points = grid.points(name)
    assert least <= len(points) <= most
    assert len({(p.kernel, *p.shape.items()) for p in points}) == len(points)
    for point in points:
        tokens, experts, top_k = (point.shape[x] for x in ("tokens", "experts", "top_k"))
        assert tokens >= 1
        assert 1 <= top_k <= experts
        assert point.shape["skew"] in grid.SKEWS


def test_every_shape_is_measured_in_both_dtypes() -> None:
    layers = {grid.experts_of(model) for model in (*grid.MODELS, *grid.OTHER_MODELS)} | {grid.TINY, *grid.FEW_WIDE}
    for dtype in grid.DTYPES:
        points = [p.shape for p in grid.points("full") if p.kernel == f"moe.{dtype}"]
        assert {(p["experts"], p["top_k"], p["hidden"], p["inner"]) for p in points} == layers


def test_held_out_experts_are_measured_and_differ_from_those_to_fit() -> None:
    names = ["experts", "top_k", "hidden", "inner"]
    points = pd.DataFrame([p.shape for p in grid.points("full")])
    apart = points[is_held_out(points)][names].drop_duplicates()
    assert set(apart.itertuples(index=False, name=None)) == {grid.experts_of(model) for model in MOE}
    assert not is_held_out(pd.DataFrame([grid.TINY], columns=names)).any()


def test_the_shape_is_the_models() -> None:
    assert grid.experts_of("Qwen/Qwen3-30B-A3B") == (128, 8, 2048, 768)
    with pytest.raises(ValueError, match="no routed experts"):
        grid.experts_of("Qwen/Qwen3-8B")


@pytest.mark.parametrize("skew", grid.SKEWS)
def test_every_token_has_top_k_distinct_experts_that_torch_finds_again(skew: str) -> None:
    torch = pytest.importorskip("torch")
    chosen = grid.route(200, 64, 8, skew, seed=0)
    assert (chosen.sum(axis=1) == 8).all()
    logits = torch.from_numpy(chosen).to(torch.bfloat16)
    found = torch.zeros_like(logits).scatter_(1, logits.topk(8, dim=1).indices, 1.0)
    assert torch.equal(found, logits)


def test_even_routing_hits_as_many_experts_as_the_formula_says() -> None:
    """E (1 - (1 - k/E)^m), as in fp8plan.model.cost.moe; 40 draws bring the mean well within one expert."""
    hits = [grid.route(16, 128, 8, "even", seed).any(axis=0).sum() for seed in range(40)]
    assert np.mean(hits) == pytest.approx(128 * (1 - (1 - 8 / 128) ** 16), abs=1.0)


def test_skew_concentrates_the_load() -> None:
    few, busiest = (
        [grid.load([grid.route(tokens, 128, 8, skew, seed) for seed in range(10)])[column] for skew in grid.SKEWS]
        for tokens, column in ((32, "hit"), (512, "busiest"))
    )
    assert few == sorted(few, reverse=True)
    assert len(set(few)) == len(few)
    assert busiest == sorted(busiest)
    assert len(set(busiest)) == len(busiest)


def test_load_counts_experts_and_tokens() -> None:
    first = np.array([[True, True, False, False], [True, False, True, False], [True, False, False, True]])
    second = np.array([[True, True, False, False], [True, True, False, False], [False, True, True, False]])
    assert grid.load([first]) == {"hit": 4.0, "busiest": 3.0}
    assert grid.load([first, second]) == {"hit": 3.5, "busiest": 3.0}


def test_popularity_follows_the_power_law_asked_for() -> None:
    """A density of x^-A on [1, E] has a share (x^(1-A) - 1) / (E^(1-A) - 1) below x."""
    x = grid.popularity(1000, "power_law_1.2")
    assert (np.diff(x) > 0).all()
    for value in (2.0, 10.0, 100.0):
        share = (value**-0.2 - 1) / (1000**-0.2 - 1)
        assert np.mean(x < value) == pytest.approx(share, abs=0.002)
    assert grid.popularity(4, "even").tolist() == [1, 1, 1, 1]
    assert np.log(grid.popularity(1000, "lognormal_0.5")).std() == pytest.approx(0.5, rel=0.01)
