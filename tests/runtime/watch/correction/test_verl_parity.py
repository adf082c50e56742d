"""Figures, weights and masks against verl 0.9.1's own function, on 300 seeded random batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fp8plan.runtime.watch.correction.correct import correct
from fp8plan.runtime.watch.correction.settings import REJECTIONS
from fp8plan.runtime.watch.correction.verl import from_verl
from fp8plan.runtime.watch.mismatch import measure as tokens_module
from fp8plan.runtime.watch.mismatch.measure import measure, pack

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.verl

RTOL, ATOL = 1e-5, 1e-6
BATCHES = 300
SCALES = (0.0, 1e-3, 0.05, 0.3, 2.0)
IS_THRESHOLDS = (2.0, 1.2, 5, "2.0", "0.5_5.0", "0.8_1.25", "1e-3_1e3")
K1_BOUNDS = ("0.1_2.0", "0.5_2.0", "0.9_1.2", "0.999_1.001", 1.5, "1000")
UPPER_BOUNDS = (0.001, "0.01", 0.2, "3.0")


@pytest.fixture(scope="module")
def helper() -> Any:
    from verl.trainer.ppo import rollout_corr_helper

    return rollout_corr_helper


def batch(seed: int) -> tuple[Any, Any, Any]:
    """(train, rollout, mask) [batch, length]: padding, empty rows, holes, NaN in the padding, extreme ratios."""
    rng = np.random.default_rng(seed)
    rows, length = int(rng.integers(1, 9)), int(rng.integers(1, 80))
    rollout = -rng.exponential(0.7, (rows, length))
    train = rollout + rng.choice(SCALES) * rng.standard_normal((rows, length))
    if rng.random() < 0.3:  # heavy tails: ratios up to e^30, beyond the clamp
        far = rng.random((rows, length)) < 0.05
        train = np.where(far, rollout + rng.uniform(-30, 30, (rows, length)), train)
    mask = np.arange(length) < rng.integers(0, length + 1, (rows, 1))
    if rng.random() < 0.5:
        mask &= rng.random((rows, length)) < 0.8
    if rng.random() < 0.5:
        mask[rng.integers(rows)] = False
    if not mask.any():
        mask[rng.integers(rows), rng.integers(length)] = True
    dtype = (torch.int64, torch.float32, torch.bool)[rng.integers(3)]
    return torch.tensor(train).float(), torch.tensor(rollout).float(), torch.tensor(mask).to(dtype)


def config(seed: int) -> dict[str, Any]:
    """Settings of verl's, every combination of them in turn or at random."""
    rng = np.random.default_rng([seed, 1])
    found: dict[str, Any] = {"rollout_is": ("token", "sequence", None)[seed % 3]}
    found["rollout_is_threshold"] = IS_THRESHOLDS[seed // 3 % len(IS_THRESHOLDS)]
    found["rollout_is_batch_normalize"] = bool(rng.integers(2))
    names = [REJECTIONS[seed % len(REJECTIONS)], *rng.choice(REJECTIONS, rng.integers(0, 4))]
    if seed % 4:
        given = [_bound(name, rng) for name in dict.fromkeys(names)]
        found |= {"rollout_rs": ",".join(names), "rollout_rs_threshold": ",".join(map(str, given))}
        if len(given) == 1 and rng.random() < 0.5:
            found["rollout_rs_threshold"] = given[0]
    return found


def _bound(name: str, rng: np.random.Generator) -> Any:
    choices = K1_BOUNDS if name.endswith("k1") else UPPER_BOUNDS
    return choices[rng.integers(len(choices))]


@pytest.mark.parametrize(
    "first", [pytest.param(n, marks=() if n < BATCHES // 2 else pytest.mark.slow) for n in range(0, BATCHES, 50)]
)
def test_the_same_as_verl(helper: Any, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if first % 100:  # half of the batches in many chunks
        monkeypatch.setattr(tokens_module, "CPU_CHUNK", 37)
    compared = 0
    for seed in range(first, first + 50):
        train, rollout, mask = batch(seed)
        settings = config(seed)
        filled = mask.bool().any(1)  # to verl the other rows are sequences: a difference that is listed
        data = train[filled], rollout[filled], mask[filled]
        try:
            theirs = helper.compute_rollout_correction_and_rejection_mask(*data, **settings)
        except ZeroDivisionError:  # all weights are 0: a difference that is listed
            assert correct(pack(train, rollout, mask), from_verl(settings)).ess == 0
            continue
        # Standard deviations are compared with those that verl computes in float64, as listed.
        precise = data[0].double(), data[1].double(), data[2]
        exact = helper.compute_rollout_correction_and_rejection_mask(*precise, **settings)[2]
        expected = {name: exact[name] if name.endswith("_std") else value for name, value in theirs[2].items()}
        tokens = pack(train, rollout, mask)
        ours = correct(tokens, from_verl(settings))
        found = {**ours.metrics, **measure(tokens).metrics().verl_metrics()}
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=RTOL, abs=ATOL), (seed, name, settings)
        assert torch.equal(ours.mask[filled], theirs[1]), (seed, settings)
        assert not ours.mask[~filled].any()
        assert ours.mask.dtype == theirs[1].dtype
        if settings["rollout_is"] is None:
            assert ours.weights is None
        else:
            weights = theirs[0].batch["rollout_is_weights"]
            torch.testing.assert_close(ours.weights[filled], weights, rtol=RTOL, atol=ATOL)
            assert not ours.weights[~filled].any()
        compared += 1
    assert compared >= 45


def test_what_the_batches_cover() -> None:
    """Every level, form of threshold and rejection, and both sides of each bound that random batches can cross."""
    configs = [config(seed) for seed in range(BATCHES)]
    assert {(c["rollout_is"], c["rollout_is_threshold"]) for c in configs} == {
        (level, threshold) for level in ("token", "sequence", None) for threshold in IS_THRESHOLDS
    }
    rejections = [c.get("rollout_rs", "").split(",") for c in configs]
    assert all(sum(name in names for names in rejections) > 30 for name in REJECTIONS)
    masks = [batch(seed)[2].bool() for seed in range(BATCHES)]
    assert sum(bool((~mask.any(1)).any()) for mask in masks) > 100
    assert sum(bool((mask[:, 1:] & ~mask[:, :-1]).any()) for mask in masks) > 100  # holes
    extreme = [(batch(seed)[0] - batch(seed)[1]).abs().max() > 20 for seed in range(BATCHES)]
    assert sum(map(bool, extreme)) > 30


def test_the_bounds_of_k1_are_turned_round(helper: Any) -> None:
    """verl's "0.1_2.0" keeps ratios of 0.5 to 10."""
    log_ratio = torch.tensor([[0.4, 0.6, 9.0, 11.0]]).log()
    theirs = helper.compute_rollout_rejection_mask(log_ratio, torch.ones(1, 4), "token_k1", "0.1_2.0")[0]
    settings = from_verl({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.1_2.0"})
    ours = correct(pack(log_ratio, torch.zeros(1, 4), torch.ones(1, 4)), settings)
    assert theirs.tolist() == ours.mask.tolist() == [[0, 1, 1, 0]]
    assert (settings.reject[0].low, settings.reject[0].high) == (0.5, 10.0)


def test_where_verl_gives_up(helper: Any) -> None:
    """The differences that are listed, as long as they are there."""
    run = helper.compute_rollout_correction_and_rejection_mask
    ones, zeros = torch.ones(1, 3), torch.zeros(1, 3)
    with pytest.raises(ValueError, match="at least one valid token"):
        run(zeros, zeros, zeros, "token")
    with pytest.raises(ZeroDivisionError):
        run(zeros, zeros, ones, "token", "2.0_5.0")
    bad = torch.tensor([[0.0, float("nan"), 0.5]])
    weights, _, metrics = run(bad, zeros, ones, "token")
    assert not torch.isfinite(weights.batch["rollout_is_weights"]).all()
    assert np.isnan(metrics["rollout_corr/kl"])
    same = torch.full((1, 3), 0.3)
    noise = run(same, zeros, ones, "token")[2]["rollout_corr/rollout_is_std"]
    assert noise == pytest.approx(0.0, abs=1e-3)
    assert correct(pack(same, zeros, ones)).metrics["rollout_corr/rollout_is_std"] <= noise + 1e-7
    padded = torch.full((4, 3), -2.0), torch.full((4, 3), -1.0), torch.tensor([[1.0], [0.0], [0.0], [0.0]]).expand(4, 3)
    assert run(*padded, "token")[2]["rollout_corr/training_ppl"] == pytest.approx((np.exp(2) + 3) / 4)
    assert measure(pack(*padded)).metrics().training_ppl == pytest.approx(np.exp(2))
