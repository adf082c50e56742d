"""The fused kernels against torch's operations: in Triton's interpreter (TRITON_INTERPRET=1), or on a GPU."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from math import inf, log, nan

import numpy as np
import pytest

from fp8plan.runtime.correction.correct import Correction, CorrectionSettings, Rejection, Thresholds, correct
from fp8plan.runtime.mismatch import backend as dispatch
from fp8plan.runtime.mismatch.histogram import BINS, SIDE, FloatArray
from fp8plan.runtime.mismatch.measure import measure
from fp8plan.runtime.mismatch.tokens import Tokens, pack
from fp8plan.runtime.monitor.monitor import Monitor

torch = pytest.importorskip("torch")

Pair = tuple[Callable[[], Tokens], Callable[[], Tokens]]
# Lengths of sequences: none, one token, about a tile, and pieces cut at positions that are no tile's.
LENGTHS = {
    "ragged": [0, 1, 63, 64, 65, 511, 512, 513, 0, 2047, 2048, 2049, 700, 0],
    "short": [3, 0, 1, 7, 2] * 8,
    "long": [9000],
    "one token": [1],
    "empty rows around": [0, 0, 5, 0],
}
SETTINGS = {
    "tis": CorrectionSettings(),
    "not truncated": CorrectionSettings(thresholds=Thresholds(tis=None)),
    "icepop": CorrectionSettings(mode="icepop", thresholds=Thresholds(None, (0.9, 1.2))),
    "mis": CorrectionSettings(mode="mis", thresholds=Thresholds(None, (0.5, 5.0))),
    "nothing inside": CorrectionSettings(mode="icepop", thresholds=Thresholds(None, (1e12, 1e13))),
    "normalised": CorrectionSettings(batch_normalize=True),
    "sequence": CorrectionSettings(level="sequence", reject=(Rejection("seq_mean", "k3", 0.01),), veto=1e-4),
    "rejected": CorrectionSettings(reject=(Rejection("token", "k1", 1.5, 0.5),)),
}


@pytest.fixture(
    params=[
        pytest.param("triton_interpreter", marks=[pytest.mark.triton, pytest.mark.slow]),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.triton]),
    ]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where fused kernels run. Triton's interpreter wants TRITON_INTERPRET=1, and a machine without a GPU."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1")
    return "cpu"


@pytest.fixture
def fused(device: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Turns the fused kernels on and off."""
    return lambda on: monkeypatch.setattr(dispatch, "by_triton", lambda tensor: on)


def batch(lengths: list[int], sd: float = 0.1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(train, rollout) [tokens] float32; every fifth token is the same on both sides, every seventh almost."""
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(0.7, sum(lengths)).astype(np.float32)
    change = sd * rng.standard_t(3, sum(lengths))
    change[::5], change[::7] = 0, change[::7] * 1e-5
    return torch.tensor(rollout + change).float(), torch.tensor(rollout)


def extreme(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log ratios of all kinds of magnitude, of +-20 and the float32 beside it, and beyond."""
    train, rollout = batch(lengths)
    some = [20.0, -20.0, 20.000002, -20.000002, 25.0, -25.0, 80.0, -300.0, 1e-30, -1e-30, 2.0**-16, -(2.0**-16), 1e-45]
    rollout[:40], train[:40] = 0.0, 0.0
    train[: len(some)] = torch.tensor(some)
    train[20:40] = torch.tensor([log(2.0) * k for k in range(-10, 10)])
    return train, rollout


def padded(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(train, rollout, mask bool) [sequences, 2,100]: prompts before the responses, and holes."""
    rng = np.random.default_rng(seed)
    shape = len(lengths), 2100
    train, rollout = (x.reshape(shape) for x in batch([shape[0] * shape[1]]))
    where = np.arange(shape[1])
    mask = (where >= 30) & (where < 30 + np.array(lengths)[:, None]) & (rng.random(shape) < 0.95)
    return train, rollout, torch.tensor(mask)


def assert_same_sums(ours: FloatArray, reference: FloatArray) -> None:
    # float64 rounds exp(x) - 1 - x to 2e-16, whatever it is; here are thousands of them.
    np.testing.assert_allclose(ours, reference, rtol=1e-9, atol=1e-12)


def assert_close(ours: torch.Tensor, reference: torch.Tensor, ulps: int = 4) -> None:
    assert ours.dtype == reference.dtype == torch.float32
    assert ours.shape == reference.shape
    bits = [x.cpu().contiguous().view(torch.int32).long() for x in (ours, reference)]  # weights are 0 or more
    assert int((bits[0] - bits[1]).abs().max()) <= ulps


def assert_same(ours: Correction, reference: Correction) -> None:
    # What the weights are normalised by may differ by an ulp too.
    normalised = "rollout_corr/rollout_is_batch_norm_factor" in reference.metrics
    assert_close(ours.weights, reference.weights, 5 if normalised else 4)
    assert torch.equal(ours.mask.cpu(), reference.mask.cpu())
    for name in ("clip_fraction", "clipped_mass", "kept_tokens", "kept_sequences", "ess"):
        assert getattr(ours, name) == pytest.approx(getattr(reference, name), rel=1e-6, abs=1e-7)
    assert ours.metrics == pytest.approx(dict(reference.metrics), rel=1e-6, abs=1e-7)  # the weights' ulps are in them


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("make", [batch, extreme])
def test_measures_what_torch_measures(device: str, fused: Callable[[bool], None], make: Callable, lengths) -> None:
    if make is extreme and sum(lengths) < 40:
        pytest.skip("too few tokens for all extremes")
    train, rollout = (x.to(device) for x in make(lengths))
    fused(True)
    ours = measure(pack(train, rollout, lengths=lengths))
    again = measure(pack(train, rollout, lengths=lengths))
    fused(False)
    reference = measure(pack(train.cpu(), rollout.cpu(), lengths=lengths))
    assert_same_sums(ours.values, reference.values)
    for name in ("tokens", "sequences", "invalid", "histogram_tokens", "position_tokens"):
        assert np.array_equal(ours[name], reference[name])
    for name in (
        "k1",
        "ratio_squared",
        "training_log_ppl",
        "log_ppl_abs_diff",
        "sequence_ratio_squared",
        "position_k3",
    ):
        np.testing.assert_allclose(ours[name], reference[name], rtol=1e-9, atol=1e-12)
    assert (ours.smallest, ours.largest) == pytest.approx((reference.smallest, reference.largest), rel=1e-9, abs=1e-12)
    assert np.array_equal(ours.values, again.values)


def test_a_k3_too_large_for_a_float_is_infinite_in_both(device: str, fused: Callable[[bool], None]) -> None:
    train, rollout = torch.tensor([800.0, 0.1, -0.2]).to(device), torch.zeros(3).to(device)
    found = []
    for on in (True, False):
        fused(on)
        found.append(measure(pack(train, rollout, lengths=[1, 2])).values)
    np.testing.assert_allclose(*found, rtol=1e-9)
    assert np.isinf(found[0]).any()


def test_the_histogram_adds_up_without_rounding_whatever_the_order(device: str, fused: Callable[[bool], None]) -> None:
    train, rollout = (x.to(device) for x in batch([6000]))
    order = torch.randperm(6000, generator=torch.Generator().manual_seed(0)).to(device)
    fused(True)
    one, other = (measure(pack(a, b, lengths=[6000])) for a, b in ((train, rollout), (train[order], rollout[order])))
    bins = np.r_[1 : SIDE - 1, SIDE + 1 : BINS - 1]  # without those that have no end, or one at 0
    for name in ("histogram_tokens", "histogram_ratio", "histogram_k3"):
        assert np.array_equal(one[name][bins], other[name][bins])


def test_versions_are_measured_apart(device: str, fused: Callable[[bool], None]) -> None:
    train, rollout = (x.to(device) for x in batch([700, 0, 90]))
    versions = torch.arange(790) // 100
    found = []
    for on in (True, False):
        fused(on)
        found.append(measure(pack(train, rollout, lengths=[700, 0, 90]), versions).metrics().versions)
    assert list(found[0]) == list(found[1]) == list(range(8))
    for ours, reference in zip(found[0].values(), found[1].values(), strict=True):
        assert ours.tokens == reference.tokens
        assert (ours.k1, ours.k3) == pytest.approx((reference.k1, reference.k3), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", SETTINGS)
def test_corrects_as_torch_does(device: str, fused: Callable[[bool], None], name: str, lengths: list[int]) -> None:
    train, rollout = extreme(lengths) if sum(lengths) >= 40 else batch(lengths)
    fused(True)
    ours = correct(pack(train.to(device), rollout.to(device), lengths=lengths), SETTINGS[name])
    fused(False)
    assert_same(ours, correct(pack(train, rollout, lengths=lengths), SETTINGS[name]))


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_packs_and_unpacks_as_torch_does(device: str, fused: Callable[[bool], None], mask_dtype, dtype) -> None:
    train, rollout, mask = padded([0, 1, 2048, 2070, 0, 300])
    train, rollout, mask = train.to(device, dtype), rollout.to(device, dtype), mask.to(device, mask_dtype)
    train[3, 40], rollout[3, 41], train[2, 2000], train[0, 5] = nan, -inf, inf, nan  # the last is masked
    found = []
    for on in (True, False):
        fused(on)
        tokens = pack(train, rollout, mask)
        keep = tokens.log_ratio > 0
        unpacked = tokens.unpack(tokens.log_ratio, fill=7.0), tokens.unpack(keep), tokens.mask(keep), tokens.mask()
        found.append((tokens.train, tokens.rollout, tokens.log_ratio, tokens.offsets, tokens.kept, *unpacked))
        assert tokens.invalid == int(mask[3, 40]) + int(mask[3, 41]) + int(mask[2, 2000])
    for ours, reference in zip(*found, strict=True):
        assert ours.dtype == reference.dtype
        assert torch.equal(ours, reference)


def test_strided_log_probs_are_packed(device: str, fused: Callable[[bool], None]) -> None:
    train, rollout, mask = (x.to(device) for x in padded([5, 600, 0, 1000]))
    flat = [torch.stack([x.flatten()] * 2, 1)[:, 1] for x in (train, rollout, mask)]  # each second of what is stored
    found = []
    for on in (True, False):
        fused(on)
        for some in (flat, flat[:2]):
            tokens = pack(*some, lengths=[2100] * 4)
            found.append((tokens.train, tokens.log_ratio, tokens.offsets, torch.tensor(measure(tokens).values)))
    for ours, reference in zip(found[:2], found[2:], strict=True):
        for x, y in zip(ours, reference, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rows", [0, 3])
def test_no_tokens(device: str, fused: Callable[[bool], None], rows: int) -> None:
    fused(True)
    nothing = torch.zeros(rows, 50, device=device)
    tokens = pack(nothing, nothing, nothing)
    assert (len(tokens), tokens.sequences) == (0, rows)
    assert math.isnan(measure(tokens).metrics().k3)
    assert correct(tokens).weights.tolist() == nothing.tolist()


def test_a_step_of_the_monitor(device: str, fused: Callable[[bool], None]) -> None:
    data = [x.to(device) for x in padded([0, 1, 2048, 2000, 0, 300])]
    steps = []
    for on in (True, False):
        fused(on)
        with Monitor() as monitor:
            steps.append(monitor.step(*data))
    ours, reference = steps
    assert_close(ours.weights, reference.weights)
    assert torch.equal(ours.mask, reference.mask)
    for name, expected in reference.metrics.items():
        if name != "fp8plan/monitor_s":
            assert ours.metrics[name] == (expected and pytest.approx(expected, rel=1e-6, abs=1e-7)), name
