"""Weights and masks: each level, mode and rejection, and what is defined where verl's function is not."""

from __future__ import annotations

from dataclasses import fields, replace
from math import e, exp, inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mismatch_batches import packed, ragged

from fp8plan.errors import ConfigError
from fp8plan.runtime.watch.correction import correct as correct_module
from fp8plan.runtime.watch.correction.correct import Correction, CorrectionSettings, Rejection, Thresholds, correct
from fp8plan.runtime.watch.correction.settings import REJECTIONS
from fp8plan.runtime.watch.correction.verl import _FIELDS, from_verl
from fp8plan.runtime.watch.mismatch import measure as tokens_module
from fp8plan.runtime.watch.mismatch.measure import measure, pack

torch = pytest.importorskip("torch")

BAND = Thresholds(None, (0.5, 2.0))
RATIOS = (0.25, 1.0, 1.5, 4.0, 1.0)  # two sequences, of 3 and 2 tokens
LENGTHS = (3, 2)


@pytest.fixture(params=[2, 1 << 20], ids=["small chunks", "one chunk"], autouse=True)
def _chunk(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "CPU_CHUNK", request.param)


def corrected(some: CorrectionSettings, ratios: Any = RATIOS, lengths: Any = LENGTHS) -> Correction:
    log_ratio = torch.log(torch.tensor(ratios, dtype=torch.float64))
    return correct(pack(log_ratio, torch.zeros_like(log_ratio), lengths=lengths), some)


def rounded(values: Any) -> list[float]:
    return [round(value, 5) for value in values.tolist()]


def test_token_level() -> None:
    tis = corrected(CorrectionSettings())
    assert rounded(tis.weights) == [0.25, 1.0, 1.5, 2.0, 1.0]
    assert tis.mask.all()
    assert (tis.clip_fraction, tis.kept_tokens, tis.kept_sequences) == (0.2, 1.0, 1.0)
    assert tis.clipped_mass == pytest.approx(2 / 7.75)
    assert tis.ess == pytest.approx((5.75 / 5) ** 2 / ((0.0625 + 1 + 2.25 + 4 + 1) / 5))
    icepop = corrected(CorrectionSettings(mode="icepop", thresholds=BAND))
    assert rounded(icepop.weights) == [0.0, 1.0, 1.5, 0.0, 1.0]
    assert icepop.mask.all()
    assert (icepop.clip_fraction, icepop.kept_tokens, icepop.kept_sequences) == (0.4, pytest.approx(0.6), 1.0)
    assert icepop.clipped_mass == pytest.approx(4.25 / 7.75)
    mis = corrected(CorrectionSettings(mode="mis", thresholds=BAND))
    assert torch.equal(mis.weights, icepop.weights)
    assert mis.mask.tolist() == [False, True, True, False, True]
    assert corrected(CorrectionSettings(thresholds=Thresholds(None))).weights.tolist() == pytest.approx(RATIOS)


def test_sequence_and_geometric_level() -> None:
    product = corrected(CorrectionSettings(level="sequence"))
    assert rounded(product.weights) == [0.375] * 3 + [2.0] * 2
    assert (product.clip_fraction, product.clipped_mass) == (0.4, pytest.approx(4 / 9.125))
    mean = corrected(CorrectionSettings(level="geometric", thresholds=Thresholds(1.8)))
    assert rounded(mean.weights) == [round(0.375 ** (1 / 3), 5)] * 3 + [1.8] * 2
    mis = corrected(CorrectionSettings(level="sequence", mode="mis", thresholds=BAND))
    assert mis.mask.tolist() == [False] * 5
    assert (mis.kept_tokens, mis.kept_sequences, mis.ess) == (0.0, 0.0, 0.0)
    half = corrected(CorrectionSettings(level="geometric", mode="mis", thresholds=Thresholds(None, (0.7, 1.3))))
    assert half.mask.tolist() == [True] * 3 + [False] * 2
    assert (half.kept_tokens, half.kept_sequences) == (pytest.approx(0.6), 0.5)


def test_thresholds_of_a_batch_without_the_band_of_its_mode_are_refused() -> None:
    log_ratio = torch.log(torch.tensor(RATIOS, dtype=torch.float64))
    batch = pack(log_ratio, torch.zeros_like(log_ratio), lengths=LENGTHS)
    with pytest.raises(ConfigError, match=r"mode 'mis' needs a band; type Thresholds\(band=\(0.5, 2.0\)\)"):
        correct(batch, CorrectionSettings(mode="mis", thresholds=BAND), thresholds=Thresholds(2.0))


def test_no_level_means_no_weights() -> None:
    found = corrected(CorrectionSettings(level=None, reject=(Rejection("token", "k1", 2.0, 0.5),)))
    assert found.weights is None
    assert found.mask.tolist() == [False, True, True, False, True]
    assert (found.clip_fraction, found.clipped_mass, found.ess) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("rule", "mask"),
    [
        (Rejection("token", "k1", 1.5, 0.25), [1, 1, 1, 0, 1]),
        (Rejection("token", "k1", 1.2), [1, 1, 0, 0, 1]),
        (Rejection("token", "k1", inf, 0.9), [0, 1, 1, 1, 1]),
        (Rejection("seq_sum", "k1", 2.0, 0.3), [1, 1, 1, 0, 0]),
        (Rejection("seq_mean", "k1", 2.1, 0.8), [0, 0, 0, 1, 1]),
        (Rejection("token", "k2", 0.5), [0, 1, 1, 0, 1]),
        (Rejection("seq_max", "k3", 1.0), [1, 1, 1, 0, 0]),
    ],
)
def test_bounds_of_rejections_are_on_train_over_rollout(rule: Rejection, mask: list[int]) -> None:
    assert corrected(CorrectionSettings(reject=[rule])).mask.tolist() == [bool(value) for value in mask]


@pytest.mark.parametrize(
    ("rule", "log_ratios", "kept"),
    [
        (Rejection("token", "k1", 1.0, 1.0), (0.0, -0.1, 0.1, 0.0, 0.0), [1, 0, 0, 1, 1]),
        (Rejection("token", "k2", 2.0), (2.0, -2.0, 2.1, 0.0, 0.0), [1, 1, 0, 1, 1]),
        (Rejection("seq_sum", "k1", 1.0, 1.0), (1.0, -1.0, 0.5, 0.0, -0.1), [1, 1, 0, 0, 0]),
        (Rejection("seq_mean", "k2", 2.0), (2.0, 2.0, 2.0, 2.1, 2.0), [1, 1, 0, 0, 1]),
        (Rejection("seq_max", "k2", 2.0), (2.0, 0.0, 2.1, 0.0, -2.0), [1, 1, 0, 0, 1]),
    ],
)
def test_what_is_exactly_at_a_bound_is_kept(rule: Rejection, log_ratios: Any, kept: list[int]) -> None:
    tokens = pack(torch.tensor(log_ratios), torch.zeros(5), lengths=[2, 2, 0, 1])
    assert correct(tokens, CorrectionSettings(reject=[rule])).mask.tolist() == [bool(value) for value in kept]


def plainly(rule: Rejection, log_ratio: Any, lengths: Any) -> dict[str, float]:
    """The figures of a rejection from its definition, in float64."""
    clamped = np.clip(log_ratio, -20, 20)
    of_tokens = {"k1": -clamped, "k2": clamped**2 / 2, "k3": np.expm1(clamped) - clamped}[rule.estimator]
    sequences = [x for x in np.split(of_tokens, np.cumsum(lengths)[:-1]) if len(x)]
    over = {"token": np.mean, "seq_sum": np.sum, "seq_mean": np.mean, "seq_max": np.max}[rule.over]
    of_sequences = np.array([over(x) for x in sequences])
    judged = of_tokens if rule.over == "token" else np.repeat(of_sequences, [len(x) for x in sequences])
    low, high = (-np.log([rule.high, rule.low])) if rule.estimator == "k1" else (0.0, rule.high)
    above, below = (of_tokens if rule.over == "token" else of_sequences) > high, judged < low
    lost = np.split((judged > high) | below, np.cumsum([len(x) for x in sequences])[:-1])
    return {
        "mean": judged.mean(), "max": judged.max(), "min": judged.min(), "std": np.clip(judged, low, high).std(),
        "fraction_high": above.mean(), "masked_fraction": np.concatenate(lost).mean(),
        "fraction_low": (below if rule.over == "token" else of_sequences < low).mean(),
        "seq_masked_fraction": np.mean([x.any() for x in lost]),
        "seq_mean": of_sequences.mean(), "seq_std": of_sequences.std(ddof=1), "seq_max": of_sequences.max(),
        "seq_min": of_sequences.min(), "seq_max_deviation": abs(of_sequences).max(),
        "seq_fraction_high": (of_sequences > high).mean(),
    } | ({"seq_fraction_low": (of_sequences < low).mean()} if rule.estimator == "k1" else {})  # fmt: skip


@pytest.mark.parametrize("name", REJECTIONS)
def test_figures_of_a_rejection_are_those_of_its_definition(name: str) -> None:
    """With sequences of no token and of one; verl's own figures, on random batches: test_verl_parity.py."""
    lengths = [3, 0, 2, 1, 4]
    log_ratio = np.float32([0.1, -0.9, 1.1, 0.1, -0.3, 0.8, 0.1, -0.1, 0.2, 25.0]).astype(float)
    rule = Rejection(*name.rsplit("_", 1), 1.5, *([0.7] if name.endswith("k1") else []))
    found = correct(pack(log_ratio, np.zeros(10), lengths=lengths), CorrectionSettings(reject=[rule]))
    expected = plainly(rule, log_ratio, lengths)
    assert 0 < expected["seq_masked_fraction"] < 1
    figures = {f"rollout_corr/rollout_rs_{name}_{x}": value for x, value in expected.items()}
    both = {f"rollout_corr/rollout_rs_{x}": expected[x] for x in ("masked_fraction", "seq_masked_fraction")}
    rejected = {x: value for x, value in found.metrics.items() if "_rs_" in x}
    assert rejected == pytest.approx(figures | both, rel=1e-6, abs=1e-12)


def test_all_rejections_must_pass() -> None:
    rules = Rejection("token", "k1", 1.2), Rejection("seq_sum", "k1", inf, 0.5)
    assert corrected(CorrectionSettings(reject=rules)).mask.tolist() == [False] * 4 + [True]


def test_veto_drops_the_whole_sequence_of_a_catastrophic_token() -> None:
    ratios = (1e-5, 1.0, 1.0, 1.0, 2e-4)
    found = corrected(CorrectionSettings(veto=1e-4), ratios)
    assert found.mask.tolist() == [False] * 3 + [True] * 2
    assert found.metrics["rollout_corr/rollout_is_veto_fraction"] == 0.5
    assert found.metrics["rollout_corr/rollout_is_catastrophic_token_fraction"] == pytest.approx(0.2)
    assert (found.kept_tokens, found.kept_sequences) == (pytest.approx(0.4), 0.5)
    twice = corrected(
        CorrectionSettings(reject=[Rejection("token", "k1", 1.2)], veto=1e-4), (1e-5, 1e-6, 1.0, 1.0, 4.0)
    )
    assert twice.mask.tolist() == [False] * 3 + [True, False]  # what either of them drops is dropped
    assert twice.metrics["rollout_corr/rollout_is_veto_fraction"] == 0.5


def test_the_veto_keeps_what_is_at_its_bound_and_counts_no_empty_sequence() -> None:
    log_ratio = torch.tensor([-8.0, 0.0, -8.1, 0.0])
    found = correct(pack(log_ratio, torch.zeros(4), lengths=[1, 0, 2, 0, 1]), CorrectionSettings(veto=exp(-8)))
    assert found.mask.tolist() == [True, False, False, True]
    assert found.metrics["rollout_corr/rollout_is_veto_fraction"] == pytest.approx(1 / 3)
    assert found.metrics["rollout_corr/rollout_is_catastrophic_token_fraction"] == 0.25


def test_a_veto_with_a_largest_ratio_drops_sequences_of_both_kinds_of_outliers() -> None:
    ratios = (1.0, 120.0, 1.0, 0.5, 2.0, 1e-5)
    for veto, mask in (
        ((0.0, 100), [0, 0, 1, 1, 1, 1]),
        ((1e-4, inf), [1, 1, 1, 1, 0, 0]),
        ([1e-4, 100], [0, 0, 1, 1, 0, 0]),
    ):
        found = corrected(CorrectionSettings(veto=veto), ratios, (2, 2, 2))
        assert found.mask.int().tolist() == mask
        assert found.metrics["rollout_corr/rollout_is_veto_fraction"] == pytest.approx(1 - sum(mask) / 6)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_floor_is_the_smallest_weight_and_counts_as_clipped(level: Any) -> None:
    found = corrected(CorrectionSettings(level, thresholds=Thresholds(1.4), floor=0.8))
    ratio = {"token": RATIOS, "sequence": (0.375,) * 3 + (4.0,) * 2, "geometric": (0.375 ** (1 / 3),) * 3 + (2.0,) * 2}[
        level
    ]
    assert rounded(found.weights) == [round(min(max(x, 0.8), 1.4), 5) for x in ratio]
    assert found.clip_fraction == pytest.approx(sum(not 0.8 <= x <= 1.4 for x in ratio) / 5)
    assert found.mask.all()


@pytest.mark.parametrize("mode", ["tis", "icepop"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_figures_of_weights_are_those_of_their_definition(level: Any, mode: Any) -> None:
    """With sequences of no token and of one."""
    lengths = np.array([3, 0, 2, 1, 1, 2])
    ratios = np.array([0.25, 1.0, 4.5, 1.9, 8.0, 1.8, 0.6, 0.125, 0.7])
    low, high = 0.5, 2.0
    found = corrected(CorrectionSettings(level, mode, Thresholds(high, (low, high))), ratios, lengths.tolist())
    lengths = lengths[lengths > 0]
    each = np.split(np.log(ratios), np.cumsum(lengths)[:-1])
    over = np.sum if level == "sequence" else np.mean
    raw = ratios if level == "token" else np.exp([over(x) for x in each])
    weights = np.minimum(raw, high) if mode == "tis" else np.where((raw >= low) & (raw <= high), raw, 0.0)
    cut = (raw > high) if mode == "tis" else (raw > high) | (raw < low)
    tokens, clipped = (x if level == "token" else np.repeat(x, lengths) for x in (weights, cut))
    assert found.weights.tolist() == pytest.approx(tokens.tolist(), rel=1e-6)
    assert found.clip_fraction == pytest.approx(clipped.mean())
    name = "rollout_corr/rollout_is_"
    assert found.metrics[f"{name}mean"] == pytest.approx(tokens.mean(), rel=1e-6)
    assert found.metrics[f"{name}ratio_fraction_high"] == pytest.approx((raw > high).mean())
    assert found.metrics[f"{name}ratio_fraction_low"] == pytest.approx((raw < low).mean())
    shown = weights if level == "token" else raw
    assert (found.metrics[f"{name}max"], found.metrics[f"{name}min"]) == pytest.approx((shown.max(), shown.min()))
    parts = np.split(raw, np.cumsum(lengths)[:-1]) if level == "token" else raw
    means = np.array([np.mean(x) for x in parts])
    assert found.metrics[f"{name}seq_fraction_high"] == pytest.approx((means > high).mean())
    assert found.metrics[f"{name}seq_fraction_low"] == pytest.approx((means < low).mean())
    of_weights = np.split(tokens, np.cumsum(lengths)[:-1])
    assert found.metrics[f"{name}seq_mean"] == pytest.approx(np.mean([x.mean() for x in of_weights]))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_ratio_that_is_exactly_at_both_bounds_is_inside(level: Any) -> None:
    found = corrected(CorrectionSettings(level, "icepop", Thresholds(None, (1.0, 1.0))), (1.0, 1.0, 1.0), (1, 0, 2))
    assert found.weights.tolist() == [1.0] * 3
    assert [found.metrics[f"rollout_corr/rollout_is_ratio_fraction_{end}"] for end in ("high", "low")] == [0.0, 0.0]


@pytest.mark.parametrize("counted", [True, False])
def test_the_mean_is_over_all_ranks_and_a_rank_that_counts_no_sequence_adds_nothing(
    monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    """Another rank has 3 tokens that weigh 9 together."""
    told, checked = [], []

    def with_another_rank(own: Any, group: Any) -> Any:
        told.append((own.tolist(), group))
        return own + np.array([9.0, 3.0])

    monkeypatch.setattr(correct_module, "all_reduced", with_another_rank)
    monkeypatch.setattr(correct_module, "check_group", lambda *groups: checked.append(groups))
    monkeypatch.setattr(tokens_module.Tokens, "counted", counted)
    log_ratio = torch.log(torch.tensor(RATIOS, dtype=torch.float64))
    tokens = pack(log_ratio, torch.zeros_like(log_ratio), lengths=LENGTHS)
    tokens = replace(tokens, sequence_group="pieces", own=torch.arange(5))
    some = CorrectionSettings(thresholds=Thresholds(None), batch_normalize=True)
    weights = correct(tokens, some, "all").weights
    total, count = (16.75, 8.0) if counted else (9.0, 3.0)
    assert weights.tolist() == pytest.approx([ratio * count / total for ratio in RATIOS])
    assert told == [([7.75, 5.0] if counted else [0.0, 0.0], "all")]
    assert checked == [("pieces", "all")]


def test_weights_of_mean_nothing_are_not_normalised_and_the_factor_is_told() -> None:
    band = CorrectionSettings(mode="icepop", thresholds=Thresholds(None, (2.0, 5.0)), batch_normalize=True)
    nothing = corrected(band, (1.0, 1.0), (1, 1))
    assert (nothing.weights.tolist(), nothing.factor) == ([0.0, 0.0], 1.0)
    assert corrected(band, (2.1, 3.9), (1, 1)).factor == pytest.approx(3.0)
    by_sequence = replace(band, level="sequence", mode="tis", thresholds=Thresholds(4.0))
    assert corrected(by_sequence, (2.0, 4.0, 0.5), (1, 0, 2)).factor == pytest.approx(2.0)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_normalised_weights_have_mean_one(level: Any) -> None:
    found = corrected(CorrectionSettings(level=level, batch_normalize=True), lengths=(3, 0, 2))
    means = found.weights if level == "token" else found.weights[[0, 3]]
    assert float(means.mean()) == pytest.approx(1.0)


def test_weights_take_no_part_in_the_gradient() -> None:
    train = torch.zeros(2, requires_grad=True)
    found = correct(pack(train, torch.zeros(2), lengths=[2]))
    (found.weights * train).sum().backward()
    assert train.grad.tolist() == [1.0, 1.0]


@settings(max_examples=15)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["token", "sequence", "geometric", None]),
    st.sampled_from(["tis", "mis", "icepop"]),
    st.lists(st.sampled_from(REJECTIONS), max_size=2),
    st.booleans(),
)
def test_packed_padded_numpy_and_any_order_agree(
    seed: int, level: Any, mode: Any, names: list[str], normalize: bool
) -> None:
    rules = [Rejection(*name.rsplit("_", 1), 1.5) for name in names]
    some = CorrectionSettings(level, mode, Thresholds(2.0, (0.5, 2.0)), rules, 1e-2, normalize)
    train, rollout, mask = ragged(seed)
    found = correct(pack(train, rollout, mask), some)
    some_train, some_rollout, lengths = packed(train, rollout, mask)
    flat = correct(pack(some_train, some_rollout, lengths=lengths), some)
    arrays = correct(pack(train.numpy(), rollout.numpy(), mask.numpy()), some)
    order = torch.tensor(np.random.default_rng(seed).permutation(len(mask)))
    moved = correct(pack(train[order], rollout[order], mask[order]), some)
    for other, kept in ((flat, found.mask[mask]), (arrays, found.mask.numpy()), (moved, found.mask[order])):
        assert (other.mask == kept).all()
        assert other.metrics == pytest.approx(found.metrics, rel=1e-6, abs=1e-9)
        assert other.clipped_mass == pytest.approx(found.clipped_mass, abs=1e-9)
        assert (other.kept_tokens, other.kept_sequences) == pytest.approx((found.kept_tokens, found.kept_sequences))
    assert not found.mask[~mask].any()
    if level is None:
        assert found.weights is None
        return
    assert isinstance(arrays.weights, np.ndarray)
    torch.testing.assert_close(flat.weights, found.weights[mask], rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.from_numpy(arrays.weights), found.weights, rtol=1e-6, atol=0)
    torch.testing.assert_close(moved.weights, found.weights[order], rtol=1e-6, atol=0)
    assert not found.weights[~mask].any()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["tis", "icepop"])
def test_a_gpu_measures_and_corrects_as_the_cpu_does(mode: Any) -> None:
    some = CorrectionSettings("token", mode, Thresholds(2.0, (0.5, 2.0)), (Rejection("seq_mean", "k3", 1.5),))
    batch = ragged(0)
    tokens, on_cpu = pack(*(values.cuda() for values in batch)), pack(*batch)
    np.testing.assert_allclose(measure(tokens).values, measure(on_cpu).values, rtol=1e-9, atol=1e-12)
    ours, reference = correct(tokens, some), correct(on_cpu, some)
    torch.testing.assert_close(ours.weights.cpu(), reference.weights, rtol=1e-6, atol=0)
    assert torch.equal(ours.mask.cpu(), reference.mask)
    assert ours.metrics == pytest.approx(reference.metrics, rel=1e-6, abs=1e-9)


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.floats(1.01, 5.0), st.floats(1.0, 3.0))
def test_a_tighter_threshold_clips_more(seed: int, c: float, factor: float) -> None:
    tokens = pack(*ragged(seed))
    tight, loose = (correct(tokens, CorrectionSettings(thresholds=Thresholds(bound))) for bound in (c, c * factor))
    assert tight.clipped_mass >= loose.clipped_mass - 1e-9
    assert tight.clip_fraction >= loose.clip_fraction
    assert bool((tight.weights <= loose.weights).all())


@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_an_invalid_token_has_no_weight_and_touches_no_other(bad: float, level: Any) -> None:
    some = CorrectionSettings(level, reject=(Rejection("seq_mean", "k3", 10.0),), veto=1e-6, batch_normalize=True)
    train, rollout, mask = ragged(2, sd=0.1)
    where = tuple(mask.nonzero()[3].tolist())
    without = mask.clone()
    without[where] = False
    expected = correct(pack(train, rollout, without), some)
    train[where] = bad
    found = correct(pack(train, rollout, mask), some)
    assert torch.equal(found.weights, expected.weights)
    assert torch.equal(found.mask, expected.mask)
    assert found.metrics == expected.metrics


@pytest.mark.parametrize("level", ["token", "sequence", "geometric", None])
@pytest.mark.parametrize("empty", ["masked", "minus infinity", "no sequences"])
def test_without_tokens(level: Any, empty: str) -> None:
    train, rollout, mask = ragged(2)
    if empty == "masked":
        mask[:] = False
    elif empty == "minus infinity":
        train[:] = -inf
    else:
        train, rollout, mask = train[:0], rollout[:0], mask[:0]
    found = correct(pack(train, rollout, mask), CorrectionSettings(level, veto=1e-4, batch_normalize=True))
    assert found.mask.shape == mask.shape
    assert not found.mask.any()
    assert level is None or (found.weights.shape == mask.shape and not found.weights.any())
    assert np.isnan([found.clip_fraction, found.clipped_mass, found.ess]).all()
    shares = [found.kept_tokens, found.kept_sequences, 1 - found.lost_weight]
    assert shares == [0, 0, 0] if empty == "minus infinity" else np.isnan(shares).all()
    assert found.metrics == {}


def test_one_token_of_ratio_e_to_the_20_and_beyond() -> None:
    for log_ratio in (20.0, 300.0):
        ratios = torch.tensor([log_ratio, *np.zeros(99)])
        tokens = pack(ratios, torch.zeros(100), lengths=[100])
        assert float(correct(tokens).weights.max()) == 2.0
        assert float(correct(tokens, CorrectionSettings(thresholds=Thresholds(None))).weights.max()) == pytest.approx(
            e**20
        )
        everything = CorrectionSettings(
            "sequence", "mis", BAND, [Rejection(*name.rsplit("_", 1), 2.0) for name in REJECTIONS], 1e-4, True
        )
        found = correct(tokens, everything)
        assert not found.mask.any()
        assert all(np.isfinite(value) for value in found.metrics.values())


def test_half_precision_is_computed_in_float32() -> None:
    train, rollout, mask = ragged(4)
    halves = train.bfloat16(), rollout.bfloat16()
    found = correct(pack(*halves, mask)).weights
    assert found.dtype == torch.float32
    assert torch.equal(found, correct(pack(*(half.float() for half in halves), mask)).weights)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: CorrectionSettings("tokens"), "allowed: 'token'"),
        (lambda: CorrectionSettings(mode="clip"), "allowed: 'tis'"),
        (lambda: CorrectionSettings(mode="mis"), "needs a band"),
        (lambda: CorrectionSettings(veto=2.0), "between 0 and 1"),
        (lambda: CorrectionSettings(veto=(0.5, 0.9)), r"\(low, high\) with 0 <= low < 1 < high"),
        (lambda: CorrectionSettings(reject=3), r"reject is 3; allowed: a list of Rejections"),  # type: ignore[arg-type]
        (lambda: CorrectionSettings(reject=["token"]), "allowed: a list of Rejections"),  # type: ignore[list-item]
        (lambda: CorrectionSettings(floor=1.5), "floor is 1.5; allowed: 0 to 1"),
        (lambda: CorrectionSettings(mode="mis", thresholds=BAND, floor=0.5), "allowed: mode 'tis'"),
        (lambda: CorrectionSettings(None, floor=0.5), "without weights that are truncated"),
        (lambda: Thresholds(0.0), "above 0"),
        (lambda: Thresholds(nan), "above 0"),
        (lambda: Thresholds(band=(2.0, 0.5)), "low <= high"),
        (lambda: Rejection("seq_max", "k1", 2.0), "no rejection 'seq_max_k1'"),
        (lambda: Rejection("token", "k4", 2.0), "no rejection"),
        (lambda: Rejection("token", "k3", 2.0, 0.5), "only k1"),
        (lambda: Rejection("token", "k1", 1.0, 2.0), "low <= high"),
        (lambda: Rejection("token", "k2", 0.0), "low <= high > 0"),
        (lambda: Rejection("token", "k3", nan), "low <= high"),
        (lambda: replace(CorrectionSettings(mode="icepop", thresholds=BAND), thresholds=Thresholds()), "needs a band"),
    ],
)
def test_settings_that_cannot_be(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_settings_of_verl() -> None:
    assert from_verl({"rollout_is": "token"}) == CorrectionSettings(thresholds=Thresholds(2.0))
    found = from_verl(
        {
            "rollout_is": "sequence",
            "rollout_is_threshold": "0.5_5.0",
            "rollout_is_batch_normalize": True,
            "rollout_rs": "token_k1, seq_mean_k3,token_k1",
            "rollout_rs_threshold": "0.1_2.0, 0.01",
        }
    )
    rules = Rejection("token", "k1", 10.0, 0.5), Rejection("seq_mean", "k3", 0.01)
    assert found == CorrectionSettings("sequence", "icepop", Thresholds(None, (0.5, 5.0)), rules, None, True)
    shared = from_verl({"rollout_rs": "token_k1,seq_sum_k1", "rollout_rs_threshold": 2.0}).reject
    assert shared == (Rejection("token", "k1", 2.0, 0.5), Rejection("seq_sum", "k1", 2.0, 0.5))
    bypass = {"rollout_is": "token", "bypass_mode": True}
    assert from_verl(bypass).level is None
    assert from_verl(bypass | {"loss_type": "reinforce"}).level == "token"


NODE = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0", "rollout_rs": None, "bypass_mode": False}


@pytest.mark.parametrize(
    "config",
    [
        NODE,
        SimpleNamespace(**NODE),
        {"rollout_correction": NODE},
        {"algorithm": {"gamma": 1.0, "rollout_correction": NODE}, "trainer": {"nnodes": 1}},
        {"algorithm": SimpleNamespace(gamma=1.0, rollout_correction=SimpleNamespace(**NODE)), "data": None},
        NODE | {"_target_": "verl.trainer.config.RolloutCorrectionConfig"},
    ],
)
def test_settings_of_verl_wherever_they_lie(config: Any) -> None:
    assert from_verl(config) == CorrectionSettings(mode="icepop", thresholds=Thresholds(None, (0.5, 5.0)))


def test_settings_of_verl_that_are_off() -> None:
    for config in ({"algorithm": {"gamma": 1.0, "rollout_correction": None}}, {"rollout_correction": {}}):
        assert from_verl(config) == CorrectionSettings(None, thresholds=Thresholds(2.0))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"rollout_is_treshold": 5.0}, r"rollout_is_treshold \(did you mean rollout_is_threshold\?\)"),
        ({"rollout_iss": "token", "xyz": 1}, r"rollout_iss \(did you mean rollout_is\?\), xyz, which"),
        ({"algorithm": {"rollout_correction": {"bypas_mode": True}}}, r"algorithm\.rollout_correction has bypas_mode"),
        ({"algoritm": {"rollout_correction": NODE}}, "did you mean algorithm"),
        ({"algorithm": {"rollout_corection": NODE, "gamma": 1.0}}, "did you mean rollout_correction"),
        ({"trainer": {"nnodes": 1}}, "the config has trainer, .*allowed: verl's whole config"),
        (SimpleNamespace(rollout_is="token", threshold=3.0), "has threshold"),
        ({}, "the config is empty"),
        ({"algorithm": {}}, "algorithm is empty"),
        ({"rollout_correction": NODE, "rollout_is": "sequence"}, "has rollout_is beside rollout_correction"),
        ({"algorithm": {"rollout_correction": NODE, "rollout_is_thresold": 3}}, "has rollout_is_thresold beside"),
        (NODE | {"rollout_is_threshold": "1_2_3"}, "rollout_is_threshold is '1_2_3'"),
        (["rollout_is=token"], "the config is .*allowed: a mapping"),
        ("token", "the config is 'token'"),
        (None, "the config is None"),
        ({"algorithm": {"rollout_correction": "token"}}, "algorithm.rollout_correction is 'token'"),
        (
            NODE | {"rollout_is_batch_normalize": "false"},
            "rollout_is_batch_normalize is 'false'; allowed: true or false",
        ),
        (NODE | {"bypass_mode": 1}, "bypass_mode is 1; allowed: true or false"),
        (NODE | {"loss_type": "ppo"}, "loss_type is 'ppo'; allowed: ppo_clip or reinforce"),
        (NODE | {"rollout_is": 3}, "rollout_is is 3; allowed: token, sequence or null"),
        (NODE | {"rollout_is_threshold": [0.5, 5.0]}, "rollout_is_threshold is"),
        (NODE | {"rollout_rs": ["token_k1"], "rollout_rs_threshold": 2.0}, "rollout_rs is"),
        (NODE | {"rollout_rs": "token_k1", "rollout_rs_threshold": {}}, "rollout_rs_threshold is"),
        (NODE | {"rollout_rs": "binary_kl", "rollout_rs_threshold": 0.1}, "binary_kl compares probabilities"),
        ({"rollout_is": None, "rollout_is_threshold": True}, "rollout_is_threshold is True"),
    ],
)
def test_what_is_not_verls_is_refused_by_name(config: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        from_verl(config)


@pytest.mark.verl
@pytest.mark.parametrize("trainer", ["ppo_trainer", "ppo_megatron_trainer"])
def test_verls_whole_config(trainer: str) -> None:
    """As Hydra makes it: a DictConfig with everything in it; and that config as plain data."""
    import verl
    from omegaconf import OmegaConf

    path = Path(verl.__file__).parent / "trainer" / "config" / f"_generated_{trainer}.yaml"
    config: Any = OmegaConf.load(path)
    assert from_verl(config) == CorrectionSettings(None, thresholds=Thresholds(2.0))
    config.algorithm.rollout_correction.rollout_is = "sequence"
    config.algorithm.rollout_correction.rollout_is_threshold = 3
    expected = CorrectionSettings("sequence", thresholds=Thresholds(3.0))
    plain = OmegaConf.to_container(config)
    for one in (config, config.algorithm, config.algorithm.rollout_correction, plain):
        assert from_verl(one) == expected
    config.algorithm.rollout_correction.rollout_i = "token"
    with pytest.raises(ConfigError, match="did you mean rollout_is"):
        from_verl(config)


@pytest.mark.verl
def test_the_fields_are_those_of_verl() -> None:
    from verl.trainer.config.algorithm import RolloutCorrectionConfig

    assert {field.name for field in fields(RolloutCorrectionConfig)} - {"_target_"} == set(_FIELDS)


@pytest.mark.verl
def test_settings_of_verl_s_own_presets() -> None:
    from verl.trainer.config.algorithm import RolloutCorrectionConfig

    assert from_verl(RolloutCorrectionConfig.decoupled_token_is(3.0)) == CorrectionSettings(thresholds=Thresholds(3.0))
    found = from_verl(RolloutCorrectionConfig.decoupled_geo_rs_seq_tis())
    assert (found.level, found.mode) == ("sequence", "tis")
    assert [rule.name for rule in found.reject] == ["seq_mean_k1"]
    assert exp(-1) < found.reject[0].low < 1 < found.reject[0].high < e


@pytest.mark.parametrize(
    "config",
    [
        {"rollout_is": "geometric"},
        {"rollout_is": "token", "rollout_is_threshold": True},
        {"rollout_is": "token", "rollout_is_threshold": "two"},
        {"rollout_is": "token", "rollout_is_threshold": "5_0.5"},
        {"rollout_is": "token", "rollout_is_threshold": -1},
        {"rollout_rs": "token_k1"},
        {"rollout_rs": "token_k9", "rollout_rs_threshold": 1},
        {"rollout_rs": ",", "rollout_rs_threshold": 1},
        {"rollout_rs": "token_k1,token_k2,token_k3", "rollout_rs_threshold": "1,2"},
        {"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_2"},
        {"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5},
    ],
)
def test_settings_that_verl_refuses(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        from_verl(config)
