"""A sparse sync sends the changes that take most error away, stays within its bytes, and catches up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from block_weights import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CALIBRATION, started, weights

from fp8plan.errors import ConfigError, SyncError
from fp8plan.model.weight_changes import TopK
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.weight_sync.calls import Rpc
from fp8plan.runtime.apply.weight_sync.delta.base import Base, in_format
from fp8plan.runtime.apply.weight_sync.delta.follower import Follower
from fp8plan.runtime.apply.weight_sync.delta.patch import apply, unpacked
from fp8plan.runtime.apply.weight_sync.delta.store import Publisher
from fp8plan.runtime.apply.weight_sync.delta.top_k import Residual, for_each_matrix, thinned
from fp8plan.runtime.apply.weight_sync.manifest import SCALE_SUFFIX, entry_of
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings

Tensors = dict[str, torch.Tensor]
W, SCALES = "w", "w" + SCALE_SUFFIX


def drifted(weight: torch.Tensor, seed: int, rate: float = 0.01) -> torch.Tensor:
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    return (weight + rate * weight.float().std() * noise).to(weight.dtype)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def value(parts: Tensors) -> torch.Tensor:
    return dequantize(parts[W], parts[SCALES], torch.float32) if SCALES in parts else parts[W].float()


@pytest.mark.parametrize("fp8", [(), (W,)], ids=["bf16", "fp8"])
@pytest.mark.parametrize("shape", [(200, 300), (3, 130, 140)])
def test_the_best_changes_are_sent(shape: tuple[int, ...], fp8: tuple[str, ...]) -> None:
    """No other choice of as many changes leaves a smaller error: the squares add up, so the largest are best."""
    old = random(*shape)
    exact = drifted(old, 1, 0.001)
    held, new = in_format({W: old}, fp8)[W], in_format({W: exact}, fp8)[W]
    if fp8:
        new[SCALES] = held[SCALES].clone()  # scales that move are another test's
        new[W] = torch.where(new[W].view(torch.uint8) == 0, held[W].view(torch.uint8), new[W].view(torch.uint8)).view(
            held[W].dtype
        )
    residual = Residual()
    sent = thinned(new, held, exact, TopK(share=0.01), residual)
    errors = [(value(side) - exact.float()).square() for side in (held, new, new | {W: sent})]
    worth = (errors[0] - errors[1]).flatten()
    count = int((sent.view(torch.uint8) != held[W].view(torch.uint8)).view(*shape, -1).any(-1).sum())
    assert count == -(-old.numel() // 100)
    best = worth.sort(descending=True).values[:count].sum()
    assert (errors[0] - errors[2]).sum() == pytest.approx(float(best), rel=1e-4)
    left = (value(new) - value(new | {W: sent})).norm() / exact.float().norm()
    assert residual.relative == pytest.approx(float(left), rel=1e-4)


def test_a_block_with_a_new_scale_is_sent_whole() -> None:
    old = random(256, 256)
    exact = drifted(old, 1, 0.0005)
    exact[130, 5] = 3.0  # in the block of rows 128 on, columns to 127
    held, new = in_format({W: old}, (W,))[W], in_format({W: exact}, (W,))[W]
    moved = new[SCALES] != held[SCALES]
    assert moved[1, 0]
    sent = thinned(new, held, exact, TopK(share=1e-6), Residual())
    for row, column in moved.nonzero().tolist():
        block = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
        assert torch.equal(sent[block].view(torch.uint8), new[W][block].view(torch.uint8))
    assert float((value(new | {W: sent}) - exact.float()).norm() / exact.float().norm()) < 0.03


def test_all_changes_are_those_of_no_top_k() -> None:
    held, exact = in_format({W: random(128, 256)}, (W,))[W], drifted(random(128, 256), 3)
    new, residual = in_format({W: exact}, (W,))[W], Residual()
    sent = thinned(new, held, exact, TopK(share=1.0), residual)
    assert torch.equal(sent.view(torch.uint8), new[W].view(torch.uint8))
    assert residual.relative == 0


def changes(sent: torch.Tensor, held: torch.Tensor) -> int:
    return int((sent.view(torch.uint8) != held.view(torch.uint8)).view(*held.shape, -1).any(-1).sum())


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    fp8=st.booleans(),
    rate=st.floats(1e-5, 0.5),
    budgets=st.tuples(*[st.floats(1e-9, 1.0)] * 2).map(sorted),
)
def test_a_residual_is_kept_and_a_tighter_one_sends_no_less(
    seed: int, fp8: bool, rate: float, budgets: list[float]
) -> None:
    old = random(130, 257, seed=seed)
    exact, names = drifted(old, seed + 1, rate), (W,) if fp8 else ()
    held, new = in_format({W: old}, names)[W], in_format({W: exact}, names)[W]
    counts = []
    for budget in (1e-30, *budgets):
        residual = Residual()
        sent = thinned(new, held, exact, TopK(residual=budget), residual)
        left = float((value(new) - value(new | {W: sent})).double().norm() / exact.double().norm())
        assert residual.relative == pytest.approx(left, rel=1e-3, abs=1e-9)
        assert residual.relative <= budget * (1 + 1e-9)
        counts.append(changes(sent, held[W]))
        if budget == 1e-30:
            assert torch.equal(value(new), value(new | {W: sent}))
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize("fp8", [(), (W,)], ids=["bf16", "fp8"])
def test_a_residual_leaves_no_change_that_would_still_fit(fp8: tuple[str, ...]) -> None:
    """With one change less sent, the residual of a matrix without new scales would be above the budget."""
    old = random(256, 256)
    exact = torch.where(old.abs() > 0.05, old, drifted(old, 1, 0.01).clamp(-0.05, 0.05))  # each block's largest stays
    held, new = in_format({W: old}, fp8)[W], in_format({W: exact}, fp8)[W]
    assert SCALES not in new or torch.equal(new[SCALES], held[SCALES])
    sent, residual = thinned(new, held, exact, TopK(residual=1e-3), Residual()), Residual()
    count = changes(sent, held[W])
    assert 0 < count < changes(new[W], held[W])
    thinned(new, held, exact, TopK(share=(count - 1.5) / old.numel()), residual)
    assert residual.relative > 1e-3


def test_a_residual_holds_in_every_sync_and_for_the_model() -> None:
    names = {"a": random(256, 384), "b": random(130, 257, seed=1) * 50, "norm": random(384)}
    base = Base((), "cpu", {"a"}, TopK(residual=1e-3))
    base.manifest = tuple(entry_of(*pair) for pair in base.recorded(names.items()))
    base.commit("0")
    residuals = []
    for step in range(12):
        names = {name: drifted(tensor, step, 0.0005) for name, tensor in names.items()}
        list(base.patches(names.items(), {}))
        residuals.append(base.residual.relative)
        base.commit(str(step))
    assert 0 < residuals[0] < residuals[-1] <= 1e-3
    assert residuals[-1] > 9e-4


def test_a_matrix_that_is_not_finite_is_sent() -> None:
    for odd in (float("inf"), float("nan")):
        held = in_format({W: random(128, 128)}, ())[W]
        exact = drifted(held[W], 1)
        exact[3, 5] = odd
        sent = thinned({W: exact}, held, exact, TopK(residual=0.5), Residual())
        assert torch.equal(sent.view(torch.int16), exact.view(torch.int16))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(1e-5, 0.1), st.integers(12_000, 200_000))
def test_a_sync_stays_within_its_bytes(seed: int, rate: float, nbytes: int) -> None:
    """The weights here keep the largest value of each block, so that no scale moves."""
    names = {"a": random(256, 384, seed=seed), "b": random(130, 257, seed=seed + 1), "norm": random(384)}
    base = Base((), "cpu", {"a"}, TopK(nbytes=nbytes))
    first = list(base.recorded(names.items()))
    base.manifest = tuple(entry_of(*pair) for pair in first)
    base.commit("0")
    new = {name: drifted(tensor, seed, rate) for name, tensor in names.items()}
    largest = names["a"].abs() >= names["a"].float().std() * 3
    new["a"] = torch.where(largest, names["a"], new["a"].clamp(-0.06, 0.06))
    patches = dict(base.patches(new.items(), {}))
    assert "a" + SCALE_SUFFIX not in patches
    assert sum(patch.numel() for patch in patches.values()) <= nbytes
    live = dict(first)
    entries = [entry_of(name, live[name]) for name in patches]
    apply([live[name] for name in patches], unpacked(list(patches.values()), entries, torch.device("cpu")))
    assert all(torch.equal(live[name], tensor) for name, tensor in base.pairs())


@pytest.mark.parametrize("nbytes", [3000, 6000, 40_000])
def test_long_gaps_in_a_large_matrix_stay_within_the_bytes(nbytes: int) -> None:
    base = Base((), "cpu", (), TopK(nbytes=nbytes))
    base.manifest = tuple(entry_of(*pair) for pair in base.recorded([("a", random(2048, 256))]))
    base.commit("0")
    ((_, patch),) = base.patches([("a", drifted(random(2048, 256), 1, 0.1))], {})
    assert nbytes / 2 < patch.numel() <= nbytes


def test_a_trainers_codes_and_too_few_bytes_are_refused_in_the_first_sync(tmp_path: Path) -> None:
    tensors = {"a": random(256, 256)}
    with pytest.raises(ConfigError, match="allowed with top_k: BF16, FP16 or FP32"):
        list(Base((), "cpu", {"a"}, TopK(share=0.1)).recorded(in_format({"a": tensors["a"]}, {"a"})["a"].items()))
    with pytest.raises(ConfigError, match="allowed for this model: more than"):
        Publisher(str(tmp_path), fp8=["a"], top_k=TopK(nbytes=20)).publish(tensors)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def engine() -> Iterator[RolloutEngine]:
    with started("moe", "a", "fp8_block", delta="cpu", top_k=TopK(share=0.002)) as engine:
        yield engine


def digests(engine: RolloutEngine) -> Any:
    return engine.answer(Rpc("fp8plan_digests"))


def walk(tensors: Tensors, steps: int) -> list[Tensors]:
    states = [tensors]
    for step in range(steps):
        states.append({name: drifted(tensor, step, 0.002) for name, tensor in states[-1].items()})
    return states[1:]


@pytest.mark.slow
@pytest.mark.vllm
def test_what_was_left_out_is_sent_later(engine: RolloutEngine) -> None:
    """With error feedback an engine reaches the very bits of the weights, once these stay."""
    tensors = weights("moe", "b")
    engine.sync_weights(tensors)
    lacking = []
    for new in walk(tensors, 4):
        report = engine.sync_weights(new)
        assert report.patched
        lacking.append(report.residual)
    assert 0 < lacking[0] < lacking[-1] < 0.05
    for _ in range(1000):
        report = engine.sync_weights(new)
        if not report.residual:
            break
        assert report.residual < lacking[-1]
        lacking.append(report.residual)
    assert len(lacking) > 6
    live = digests(engine)
    engine.state.base = None
    engine.sync_weights(new)
    assert digests(engine) == live


@pytest.mark.vllm
def test_an_engine_lacks_no_more_than_the_residual() -> None:
    tensors = weights("moe", "b")
    with started("moe", "a", "fp8_block", delta="cpu", top_k=TopK(residual=0.002)) as engine:
        engine.sync_weights(tensors)
        reports = [engine.sync_weights(new) for new in walk(tensors, 6)]
        assert all(report.patched and 0 < report.residual <= 0.002 for report in reports)
        assert reports[0].bytes < reports[-1].bytes


@pytest.mark.vllm
def test_patches_that_are_refused_heal_to_what_the_base_has(engine: RolloutEngine) -> None:
    tensors = weights("moe", "b")
    engine.sync_weights(tensors)
    engine.state.base.stamp = "that of others"
    report = engine.sync_weights(new := walk(tensors, 1)[0])
    assert report.healed
    assert report.residual > 0
    assert engine.sync_weights(new).patched
    quantised = engine.state.quantised
    codes = {name: x for parts in in_format(new, quantised).values() for name, x in parts.items()}
    with pytest.raises(SyncError, match="allowed with top_k: BF16, FP16 or FP32"):
        engine.sync_weights(codes)


@pytest.mark.vllm
def test_a_chain_of_sparse_versions_is_followed(tmp_path: Path) -> None:
    with started("dense", "a", "fp8_block", weights_in="fp8_block") as engine:
        follower = Follower(str(tmp_path))
        follower.pull(engine)
        publisher = Publisher(str(tmp_path), every=3, top_k=TopK(share=0.001))
        for new in walk(weights("dense", "b"), 5):
            made = publisher.publish(new)
            follower.pull(engine, kv_prompts=CALIBRATION)
        assert made.residual > 0
        live = digests(engine)
        assert publisher._base is not None
        engine.sync_weights(dict(publisher._base.pairs()))
        assert digests(engine) == live


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (lambda: TopK(), "one of its three settings; type: TopK(share=1e-4)"),
        (lambda: TopK(share=0.1, nbytes=5), "one of its three settings"),
        (lambda: TopK(share=0.1, residual=0.1), "one of its three settings"),
        (lambda: TopK(residual=0), "residual is 0; allowed: a number above 0, up to 1"),
        (lambda: TopK(share=0), "share is 0; allowed: a number above 0, up to 1"),
        (lambda: TopK(share=float("nan")), "share is nan"),
        (lambda: TopK(nbytes=-1), "nbytes is -1; allowed: a number of bytes above 0"),
        (
            lambda: for_each_matrix(TopK(nbytes=5), (entry_of("a", random(8, 8)),)),
            "allowed for this model: more than 32",
        ),
        (lambda: SyncSettings(delta="cpu", top_k=1e-4), "top_k is 0.0001; allowed: a TopK, such as TopK(share=1e-4)"),
        (lambda: Publisher("memory://a", fp8=[], top_k=1e-4), "top_k is 0.0001; allowed: a TopK"),
        (lambda: SyncSettings(top_k=TopK(share=0.1)), "top_k is set without delta; type: SyncSettings(delta='cpu'"),
    ],
)
def test_bad_settings_are_refused(made: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        made()
