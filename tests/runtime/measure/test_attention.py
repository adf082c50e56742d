"""Measurements of attention: the points, and the lengths and KV blocks of one call. The timing needs a GPU."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pandas as pd
import pytest

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.calibrate import profile_of as held_out
from fp8plan.runtime.measure.kernels import attention as grid
from fp8plan.runtime.measure.kernels.sweep import Point

ATTENTION = ("attention_decode", "attention_prefill", "attention_mixed")


@pytest.mark.parametrize(("name", "least", "most"), [("quick", 120, 180), ("full", 800, 1300)])
def test_points_are_unique_and_can_be_run(name: str, least: int, most: int) -> None:
    points = grid.points(name)
    assert least <= len(points) <= most
    assert len({(p.kernel, *p.shape.items()) for p in points}) == len(points)
    for point in points:
        kernel, _, kv = point.kernel.partition(".")
        assert kv in grid.KV_DTYPES
        assert point.shape["heads"] % point.shape["kv_heads"] == 0
        if kernel not in ATTENTION:
            continue
        queries, kv_tokens = grid.lengths(point)
        assert (queries >= 1).all()
        assert (kv_tokens >= queries).all()
        assert kv_tokens.sum() * grid.kv_bytes(point.shape, grid.KV_DTYPES[kv]) <= grid.MAX_KV_BYTES
        assert point.shape["num_splits"] == (32 if queries.sum() <= 512 else 0)
        if kernel == "attention_prefill":
            assert queries.sum() <= grid.MAX_PREFILL_TOKENS


def test_full_holds_quick_and_every_kernel_of_it() -> None:
    quick, full = ({(p.kernel, *p.shape.items()) for p in grid.points(name)} for name in ("quick", "full"))
    assert quick < full
    kernels = {key[0] for key in full}
    assert kernels == {f"{k}.{kv}" for k in (*ATTENTION, "kv_write") for kv in grid.KV_DTYPES} | {"quantise_query.fp8"}


def test_held_out_heads_are_measured_and_differ_from_those_to_fit() -> None:
    models = (*grid.MODELS, *grid.WIDE_MODELS), held_out.ATTENTION
    fit, apart = (pd.DataFrame(map(grid.heads_of, some)) for some in models)
    assert not held_out.is_held_out(fit).any()
    assert held_out.is_held_out(apart).all()
    points = pd.DataFrame([p.shape for p in grid.points("full")])[list(apart)]
    assert set(points.itertuples(index=False, name=None)) == {
        *fit.itertuples(index=False, name=None),
        *apart.itertuples(index=False, name=None),
    }
    assert 0.1 < held_out.is_held_out(points).mean() < 0.4


def test_heads_are_those_of_the_model() -> None:
    qkv = next(x for x in ModelShape.from_hf("Qwen/Qwen3-8B").linears() if x.name == "qkv_proj")
    heads = grid.heads_of("Qwen/Qwen3-8B")
    assert qkv.parts == (heads["heads"] * heads["head_dim"], *2 * (heads["kv_heads"] * heads["head_dim"],))


def test_a_cut_leaves_even_coverage() -> None:
    """The first third has about a third of the points of every kernel: 4 sd of drawing without replacement."""
    points = grid.points("full")
    part = len(points) // 3
    cut, whole = (Counter(p.kernel for p in some) for some in (points[:part], points))
    for kernel, count in whole.items():
        expected = count * part / len(points)
        assert abs(cut[kernel] - expected) <= 4 * np.sqrt(expected * (1 - part / len(points)))


def decode(batch: int, context: int, skew: str) -> Point:
    return Point("attention_decode.bf16", {"batch": batch, "context": context, "skew": skew})


@pytest.mark.parametrize("skew", ["even", "lognormal"])
@pytest.mark.parametrize("batch", [8, 32, 512])
def test_contexts_have_the_mean_asked_for(batch: int, skew: str) -> None:
    queries, contexts = grid.lengths(decode(batch, 512, skew))
    assert contexts.sum() == batch * 512
    assert queries.tolist() == [1] * batch


def test_skewed_contexts_are_lognormal_and_repeatable() -> None:
    _, contexts = grid.lengths(decode(1024, 4096, "lognormal"))
    assert np.log(contexts).std() == pytest.approx(grid.SIGMA, rel=0.1)
    assert (contexts == grid.lengths(decode(1024, 4096, "lognormal"))[1]).all()


def test_prefill_and_mixed_lengths() -> None:
    queries, kv_tokens = grid.lengths(Point("attention_prefill.fp8", {"chunks": 2, "chunk": 64, "context": 100}))
    assert (queries.tolist(), kv_tokens.tolist()) == ([64, 64], [164, 164])
    shape = {"batch": 2, "context": 100, "chunks": 1, "chunk": 64}
    queries, kv_tokens = grid.lengths(Point("attention_mixed.bf16", shape))
    assert (queries.tolist(), kv_tokens.tolist()) == ([1, 1, 64], [100, 100, 64])


def test_block_tables_hold_every_token_once_and_in_no_order() -> None:
    kv_tokens = np.array([1, 16, 17, 1000])
    tables = grid.block_tables(kv_tokens, copies=3, blocks=250)
    assert tables.shape == (3, 4, grid.MAX_MODEL_LEN // 16)
    rows = [[row[:needed] for row, needed in zip(table, (1, 1, 2, 63), strict=True)] for table in tables]
    used = np.concatenate([np.concatenate(table) for table in rows])
    assert len(set(used.tolist())) == len(used) == 3 * 67
    assert used.min() >= 0
    assert used.max() < 250
    assert (np.diff(rows[0][3]) == 1).mean() < 0.1
    assert not tables[0, 0, 1:].any()


def test_block_tables_grow_with_the_longest_request() -> None:
    assert grid.block_tables(np.array([16385]), copies=1, blocks=2000).shape == (1, 1, 1025)


def test_too_few_blocks_are_an_error() -> None:
    with pytest.raises(ConfigError, match="need 126 KV blocks, the pool has 100"):
        grid.block_tables(np.array([1000]), copies=2, blocks=100)
