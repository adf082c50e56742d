"""Mismatch figures: their definitions, the laws of their sums, and what is robust."""

from __future__ import annotations

from math import e, inf, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mismatch_batches import one_of_two, packed, ragged

from fp8plan.errors import ConfigError
from fp8plan.runtime.watch.correction.correct import CorrectionSettings, Thresholds, correct
from fp8plan.runtime.watch.mismatch import measure as tokens_module
from fp8plan.runtime.watch.mismatch.measure import measure, pack
from fp8plan.runtime.watch.mismatch.metrics import SLOTS, Mismatch, MismatchSums

torch = pytest.importorskip("torch")

seeds = st.integers(0, 10**6)


@pytest.fixture(params=[61, 1 << 20], ids=["small chunks", "one chunk"], autouse=True)
def _chunk(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "CPU_CHUNK", request.param)


def assert_same(one: MismatchSums, other: MismatchSums) -> None:
    """To float64 rounding: sums are taken in another order."""
    np.testing.assert_allclose(one.values, other.values, rtol=1e-12, atol=1e-12)
    assert (one.smallest, one.largest) == pytest.approx((other.smallest, other.largest), rel=1e-12)


def one_sequence(log_ratios: Any) -> Mismatch:
    log_ratio = torch.as_tensor(log_ratios, dtype=torch.float32)
    return measure(pack(log_ratio, torch.zeros_like(log_ratio), lengths=[len(log_ratio)])).metrics()


def exact(train: Any, rollout: Any, mask: Any) -> Any:
    """[tokens] float64 log ratios."""
    return (train - rollout)[mask].double().numpy()


@settings(max_examples=15)
@given(seeds, st.sampled_from([0.0, 1e-4, 0.02, 0.3, 3.0]))
def test_means_over_tokens(seed: int, sd: float) -> None:
    data = ragged(seed, sd=sd)
    found, log_ratio = measure(pack(*data)).metrics(), exact(*data)
    ratio = np.exp(np.clip(log_ratio, -20, 20))
    assert found.tokens == len(log_ratio)
    assert found.sequences == data[2].any(1).sum()
    assert found.k1 == pytest.approx(-log_ratio.mean(), rel=1e-9, abs=1e-12)
    assert found.k3 == pytest.approx((np.expm1(log_ratio) - log_ratio).mean(), rel=1e-6, abs=1e-15)
    assert found.ess_raw == pytest.approx(ratio.mean() ** 2 / (ratio**2).mean())
    assert found.chi2_token == pytest.approx((ratio**2).mean() - 1, rel=1e-9, abs=1e-12)


def test_k3_keeps_its_digits_when_the_mismatch_is_tiny() -> None:
    """In float32, exp(x) - 1 - x is noise of 1e-7 here."""
    log_ratio = np.full(1000, np.float32(1e-5), np.float64)
    assert one_sequence(log_ratio).k3 == pytest.approx((log_ratio**2 / 2).mean(), rel=1e-4)


@settings(max_examples=15)
@given(seeds, seeds)
def test_sums_are_additive(one: int, other: int) -> None:
    a, b = ragged(one), ragged(other, rows=3)
    both = [torch.cat(pair) for pair in zip(a, b, strict=True)]
    assert_same(measure(pack(*a), [1] * 6) + measure(pack(*b), [2] * 3), measure(pack(*both), [1] * 6 + [2] * 3))


@settings(max_examples=15)
@given(seeds)
def test_packed_equals_padded_and_numpy_equals_torch(seed: int) -> None:
    train, rollout, mask = ragged(seed)
    expected = measure(pack(train, rollout, mask))
    some_train, some_rollout, lengths = packed(train, rollout, mask)
    assert_same(measure(pack(some_train, some_rollout, lengths=lengths)), expected)
    assert_same(measure(pack(train.numpy(), rollout.numpy(), mask.numpy())), expected)
    assert_same(measure(pack(some_train.numpy(), some_rollout.numpy(), lengths=lengths.tolist())), expected)


@settings(max_examples=15)
@given(seeds)
def test_the_order_of_sequences_does_not_matter(seed: int) -> None:
    data = ragged(seed)
    order = torch.tensor(np.random.default_rng(seed).permutation(6))
    versions = torch.arange(6) % 3
    moved = [tensor[order] for tensor in data]
    assert_same(measure(pack(*moved), versions[order]), measure(pack(*data), versions))


@settings(max_examples=15)
@given(seeds, st.floats(1.01, 20), st.floats(0.05, 0.99))
def test_clipped_mass_and_kept_fraction(seed: int, c: float, low: float) -> None:
    data = ragged(seed, rows=20, length=200, sd=0.2)
    found, ratio = measure(pack(*data)).metrics(), np.exp(exact(*data))
    assert found.clipped_mass(c) == pytest.approx(np.maximum(ratio - c, 0).sum() / ratio.sum(), rel=0.05, abs=1e-4)
    assert found.kept_fraction(low, c) == pytest.approx(((ratio >= low) & (ratio <= c)).mean(), abs=0.01)
    outside = found.tail_fractions[2.0]
    assert outside == pytest.approx(((ratio > 2) | (ratio < 0.5)).mean(), abs=0.005)


@settings(max_examples=15)
@given(seeds, st.floats(1.01, 10), st.floats(0.05, 0.99), st.sampled_from(["sequence", "geometric"]))
def test_figures_of_sequences_are_those_that_the_correction_says(seed: int, c: float, low: float, level: Any) -> None:
    """The correction says them of its own weights, at the level of the thresholds.

    Each sequence counts as its tokens do.
    """
    tokens = pack(*ragged(seed, rows=40, length=30, sd=0.1))
    found = measure(tokens).metrics()
    cut = correct(tokens, CorrectionSettings(level, thresholds=Thresholds(c)))
    assert found.clipped_mass(c, level) == pytest.approx(cut.clipped_mass, rel=0.05, abs=1e-3)
    kept = correct(tokens, CorrectionSettings(level, "mis", Thresholds(None, (low, c))))
    assert found.kept_fraction(low, c, level) == pytest.approx(kept.kept_tokens, abs=0.05)  # a sequence in a bin


def test_a_few_ratios_without_bound_are_no_cut_share() -> None:
    honest = np.random.default_rng(0).normal(-0.02, 0.2, 4000)
    spoiled = honest.copy()
    spoiled[:2] = 20.0
    assert one_sequence(spoiled).clipped_mass(1.5) > 0.9
    found, plain = one_sequence(spoiled).cut_share(1.5), one_sequence(honest).clipped_mass(1.5)
    assert found == pytest.approx(plain, abs=1e-3)
    spoiled[:40] = 20.0  # many tokens count, up to a ratio of 20 each
    assert one_sequence(spoiled).cut_share(1.5) == pytest.approx(38 * 18.5 / (3960 + 38 * 20), rel=0.05)
    assert one_sequence(spoiled).cut_share(21.0) == 0.0
    assert np.isnan(one_sequence([]).cut_share(2.0))


def test_a_ratio_of_exactly_one_is_at_most_one() -> None:
    """Most tokens of a model that is sure of them."""
    found = one_sequence([0.0] * 7 + [-0.5, 0.5, 1.0])
    assert found.kept_fraction(0.0, 1.0) == pytest.approx(0.8)
    assert found.kept_fraction(1.0, inf) == pytest.approx(0.9)
    assert found.kept_fraction(1.0, 1.0) == pytest.approx(0.7)


def test_the_ends_of_a_band_may_be_open() -> None:
    found = one_sequence([-30.0, -1.0, 0.0, 1.0, 30.0])
    assert found.kept_fraction(0.0, inf) == 1.0
    assert found.kept_fraction(0.0, 2.0) == pytest.approx(0.6)
    assert found.kept_fraction(0.9, inf) == pytest.approx(0.6)
    assert found.clipped_mass(inf) == 0.0


def test_quantiles_of_the_size_of_the_log_ratio() -> None:
    sizes = np.linspace(0.001, 1.0, 1000)
    signs = np.where(np.arange(1000) % 2, 1, -1)
    for share, value in one_sequence(sizes * signs).log_ratio_quantiles.items():
        assert value == pytest.approx(np.quantile(sizes, share, method="inverted_cdf"), rel=1 / 32)


@pytest.mark.parametrize("tokens", [100, 500, 20_000])
@pytest.mark.parametrize("outlier", [20.0, -20.0, 80.0])
def test_one_outlier_does_not_move_the_robust_k3(tokens: int, outlier: float) -> None:
    log_ratio = 0.05 * np.random.default_rng(0).standard_normal(tokens)
    before = one_sequence(log_ratio)
    log_ratio[3] = outlier
    after = one_sequence(log_ratio)
    assert after.k3 > before.k3 * 1.1
    assert after.k3_robust == pytest.approx(before.k3_robust, rel=max(0.002, 30 / tokens))


@settings(max_examples=15)
@given(seeds, st.sampled_from([0.01, 0.2, 2.0]))
def test_the_robust_k3_is_the_winsorised_mean(seed: int, sd: float) -> None:
    data = ragged(seed, rows=20, length=300, sd=sd)
    found, log_ratio = measure(pack(*data)).metrics(), exact(*data)
    sizes = np.sort(np.abs(log_ratio))
    rank = len(sizes) - max(1e-3 * len(sizes), 2)
    low, high = (  # winsorised at the neighbours of that rank, which the histogram knows to a bin
        np.expm1(clipped) - clipped
        for clipped in (
            np.clip(log_ratio, -min(q, 20), min(q, 20))
            for q in (sizes[int(rank) - 2] * (1 - 1 / 32), sizes[int(rank) + 1] * (1 + 1 / 32))
        )
    )
    assert low.mean() * 0.99 <= found.k3_robust <= high.mean() * 1.01
    assert found.k3_robust <= found.k3 * (1 + 1e-12)


def test_drift_along_the_response_is_seen_in_the_profile() -> None:
    lengths = [300, 64, 65, 1]
    position = np.concatenate([np.arange(length) for length in lengths])
    log_ratio = torch.tensor(1e-3 * (1 + position)).float()
    found = measure(pack(log_ratio, torch.zeros_like(log_ratio), lengths=lengths)).metrics().profile
    assert [(span.first, span.last) for span in found] == [(0, 63), (64, 127), (128, 255), (256, 511)]
    for span in found:
        inside = (position >= span.first) & (position <= span.last)
        values = log_ratio.double().numpy()[inside]
        assert span.tokens == inside.sum()
        assert span.k1 == pytest.approx(-values.mean())
        assert span.k3 == pytest.approx((np.expm1(values) - values).mean(), rel=1e-6)


def test_by_weight_version() -> None:
    train, rollout, mask = ragged(3)
    found = measure(pack(train, rollout, mask), [70, 70, 70, 7, 8, 8]).metrics().versions
    assert list(found) == [7, 8, 70]
    for version, rows in ((70, slice(0, 3)), (7, slice(3, 4)), (8, slice(4, 6))):
        alone = measure(pack(train[rows], rollout[rows], mask[rows])).metrics()
        assert (found[version].tokens, found[version].k3) == (alone.tokens, pytest.approx(alone.k3, rel=1e-12))
        assert found[version].k1 == pytest.approx(alone.k1, rel=1e-12)
    by_token = torch.tensor([70, 70, 70, 7, 8, 8])[:, None].expand(train.shape)
    assert_same(
        measure(pack(train, rollout, mask), by_token), measure(pack(train, rollout, mask), [70, 70, 70, 7, 8, 8])
    )


@pytest.mark.parametrize(
    ("versions", "says"), [([0, 0, SLOTS], "from 0 to 64"), ([-1, 0, 0], "from -1"), ([1, 2], "one per sequence")]
)
def test_versions_that_do_not_fit(versions: list[int], says: str) -> None:
    log_ratio = torch.zeros(3)
    with pytest.raises(ConfigError, match=says):
        measure(pack(log_ratio, log_ratio, lengths=[1, 1, 1]), versions)


def test_versions_that_do_not_fit_together_once_added() -> None:
    one = [
        measure(pack(torch.zeros(1), torch.zeros(1), lengths=[1]), [version])
        for version in (3, 3 + SLOTS, 3 + 2 * SLOTS, 90)
    ]
    for pair in (one[:2], one[:3:2], one[::3]):
        with pytest.raises(ConfigError, match="64 or more apart"):
            (pair[0] + pair[1]).metrics()


@pytest.mark.parametrize("bad", [nan, -inf])
def test_invalid_tokens_are_in_no_figure(bad: float) -> None:
    train, rollout, mask = ragged(5)
    clean, expected = mask.clone(), train.clone()
    where = tuple(mask.nonzero()[3].tolist())
    train[where] = bad
    clean[where] = False
    found = measure(pack(train, rollout, mask)).metrics()
    assert found.invalid == 1
    assert found.verl_metrics() == measure(pack(expected, rollout, clean)).metrics().verl_metrics()


@pytest.mark.parametrize("how", ["masked", "minus infinity", "no sequences", "packed"])
def test_without_tokens_nothing_is_measured(how: str) -> None:
    train, rollout, mask = ragged(5)
    if how == "masked":
        tokens = pack(train, rollout, torch.zeros_like(mask))
    elif how == "minus infinity":
        tokens = pack(torch.full_like(train, -inf), rollout, mask)
    elif how == "no sequences":
        tokens = pack(train[:0], rollout[:0], mask[:0])
    else:
        tokens = pack(train[0, :0], rollout[0, :0], lengths=[])
    found = measure(tokens).metrics()
    figures = [found.k3_robust, found.ess_raw, *found.verl_metrics().values()]
    figures += [found.clipped_mass(2.0), found.cut_share(2.0), found.kept_fraction(0.5, 2.0)]
    figures += [*found.tail_fractions.values(), *found.log_ratio_quantiles.values()]
    assert np.isnan(figures).all()
    assert (found.tokens, found.profile) == (0, ())
    assert found.invalid == (int(mask.sum()) if how == "minus infinity" else 0)
    assert found.invalid_share == (how == "minus infinity")


def test_the_same_policy_has_no_mismatch() -> None:
    train, _, mask = ragged(5)
    found = measure(pack(train, train, mask)).metrics()
    assert (found.k1, found.k3, found.k3_robust, found.chi2_seq, found.ppl_ratio) == (0, 0, 0, 0, 1)
    assert found.ess_raw == pytest.approx(1.0)
    assert (found.clipped_mass(1.5), found.kept_fraction(0.9, 1.1)) == (0, 1)


def test_one_token_of_ratio_e_to_the_20() -> None:
    found = one_sequence([*np.zeros(999), 20.0])
    assert found.k3 == pytest.approx((e**20 - 21) / 1000)
    assert found.k3_robust == 0.0
    assert found.ess_raw == pytest.approx(1e-3, rel=1e-3)
    assert found.clipped_mass(2.0) == pytest.approx(1.0, abs=1e-4)
    assert found.tail_fractions == pytest.approx({2.0: 1e-3, 5.0: 1e-3, 10.0: 1e-3, 100.0: 1e-3})


def test_a_k3_too_large_for_a_float_is_infinite() -> None:
    assert one_sequence([800.0, 0.0]).k3 == inf


def test_ratios_beyond_float32_stay_finite() -> None:
    found = one_sequence([100.0, 0.0])
    assert found.k3 == pytest.approx((np.expm1(100) - 100) / 2)
    assert found.chi2_token == pytest.approx((e**40 + 1) / 2 - 1)


@pytest.mark.slow
def test_ranks_together_measure_what_one_process_does(tmp_path: Any, _chunk: None) -> None:  # noqa: PT019
    if tokens_module.CPU_CHUNK == 61:
        pytest.skip("the spawned processes have chunks of their own")
    torch.multiprocessing.spawn(one_of_two, args=(str(tmp_path),), nprocs=2)
