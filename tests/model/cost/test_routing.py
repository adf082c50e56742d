"""The busiest of the ranks that share out whole experts, against drawing the routing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.model.architecture import Experts
from fp8plan.model.cost.moe import busiest_experts, busiest_rows, distinct_experts, largest_normal
from fp8plan.model.precision import BF16

A3B, HIDDEN = Experts(128, 8, 768), 2048  # of Qwen3-30B-A3B


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("m", [4, 16, 64, 300])
def test_the_busiest_rank_agrees_with_drawing_the_routing(ranks: int, m: int) -> None:
    rng, e = np.random.default_rng(0), A3B
    draws = rng.random((300, m, e.num_experts)).argpartition(e.experts_per_token, axis=-1)[..., : e.experts_per_token]
    mine = e.num_experts // ranks
    loads = np.stack([np.bincount(draw.ravel(), minlength=e.num_experts) for draw in draws]).reshape(300, ranks, mine)
    rows, hit = loads.sum(axis=2).max(axis=1).mean(), (loads > 0).sum(axis=2).max(axis=1).mean()
    assert busiest_rows(np.array([m]), e, ranks).item() == pytest.approx(rows, rel=0.03)
    assert busiest_experts(np.array([m]), e, ranks).item() == pytest.approx(hit, rel=0.03)


@pytest.mark.parametrize(("count", "expected"), [(1, 0.0), (2, np.pi**-0.5), (3, 1.5 * np.pi**-0.5), (8, 1.42360)])
def test_the_largest_of_normal_variables_is_that_of_the_tables(count: int, expected: float) -> None:
    assert largest_normal(count) == pytest.approx(expected, abs=1e-4)


def test_a_known_number_of_hit_experts_falls_on_the_ranks_like_drawn_cards() -> None:
    rng = np.random.default_rng(0)
    drawn = np.mean([np.bincount(rng.permutation(128)[:40] // 16, minlength=8).max() for _ in range(2000)])
    assert busiest_experts(np.array([9]), A3B, 8, np.array([40.0])).item() == pytest.approx(drawn, rel=0.03)


@given(st.integers(2, 256), st.integers(2, 16), st.data())
def test_the_busiest_rank_has_its_share_at_least_and_all_of_its_own_at_most(
    num_experts: int, ranks: int, data: st.DataObject
) -> None:
    ranks = min(ranks, num_experts)
    e, m = Experts(num_experts, data.draw(st.integers(1, num_experts)), 768), np.array([1, 7, 100, 100_000])
    hit, rows = busiest_experts(m, e, ranks), busiest_rows(m, e, ranks)
    mine = e.most_on_a_rank(ranks)
    assert (hit >= np.minimum(mine, distinct_experts(m, e) / ranks) - 1e-9).all()
    assert (hit <= mine).all()
    assert (rows >= m * e.experts_per_token / ranks - 1e-9).all()
    assert (rows <= m * min(mine, e.experts_per_token)).all()
    assert hit[-1] == pytest.approx(mine)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_many_tokens_read_as_many_bytes_of_whole_experts_as_of_slices(ranks: int) -> None:
    m = np.array([100_000])
    whole = busiest_experts(m, A3B, ranks) * A3B.stored_bytes(HIDDEN, BF16, 1)
    sliced = distinct_experts(m, A3B) * A3B.stored_bytes(HIDDEN, BF16, ranks)
    np.testing.assert_allclose(whole, sliced)
    assert busiest_rows(m, A3B, ranks).item() == pytest.approx(8 * m.item() / ranks, rel=0.02)


@pytest.mark.parametrize(("num_experts", "ranks"), [(128, 8), (60, 8), (10, 4), (7, 7)])
def test_the_fullest_rank_has_as_many_experts_as_vllm_gives_it(num_experts: int, ranks: int) -> None:
    manager = pytest.importorskip("vllm.model_executor.layers.fused_moe.expert_map_manager")
    given_out = [manager.determine_expert_map(ranks, rank, num_experts)[0] for rank in range(ranks)]
    assert sum(given_out) == num_experts
    assert Experts(num_experts, 1, 768).most_on_a_rank(ranks) == max(given_out)
