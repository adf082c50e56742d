"""Batches that the tests of the mismatch share, also in processes that are spawned (they import this file)."""

from __future__ import annotations

from typing import Any

import numpy as np


def ragged(seed: int, rows: int = 6, length: int = 40, sd: float = 0.3) -> tuple[Any, Any, Any]:
    """(train, rollout, mask) [rows, length] float32 and bool tensors: holes, and the second row empty."""
    import torch

    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(0.7, (rows, length))
    train = rollout + sd * rng.standard_t(3, (rows, length))
    mask = (np.arange(length) < rng.integers(1, length + 1, (rows, 1))) & (rng.random((rows, length)) < 0.9)
    mask[1:2] = False
    return torch.tensor(train).float(), torch.tensor(rollout).float(), torch.tensor(mask)


def packed(train: Any, rollout: Any, mask: Any) -> tuple[Any, Any, Any]:
    """The same tokens as (train, rollout, lengths), without padding."""
    return train[mask], rollout[mask], mask.sum(1)


def gaussian(sigma: float, tokens: int = 4_000, seed: int = 0) -> Any:
    """[tokens] log ratios of honest importance weights: their mean ratio is 1 but for sampling, k3 is sigma^2 / 2."""
    return sigma * np.random.default_rng(seed).normal(size=tokens) - sigma**2 / 2


def mismatch_of(log_ratio: Any) -> Any:
    """The Mismatch of log ratios [tokens], of one sequence, or [sequences, tokens]."""
    from fp8plan.runtime.mismatch.measure import measure, pack

    log_ratio = np.atleast_2d(np.asarray(log_ratio, np.float32))
    return measure(pack(log_ratio - 3.0, np.full_like(log_ratio, -3.0), np.ones_like(log_ratio, bool))).metrics()


def with_outliers(sigma: float) -> tuple[Any, list[Any]]:
    """The Mismatch of 50 honest sequences of 80 tokens, and the same with one token of four extreme ratios."""
    log_ratio = gaussian(sigma).reshape(50, 80)
    plain, spoiled = mismatch_of(log_ratio), []
    for outlier in (-20.0, 5.0, 20.0, 50.0):
        log_ratio[17, 5] = outlier
        spoiled.append(mismatch_of(log_ratio))
    return plain, spoiled


def after(controller: Any, seen: Any, state: Any = None) -> Any:
    """(thresholds, state, decided) of a controller once it has seen some mismatches."""
    state = state or controller.initial()
    for one in seen:
        thresholds, state, decided = controller.update(state, one)
    return thresholds, state, decided


def one_of_two(rank: int, folder: str) -> None:
    """One of two processes: what ranks measure together is what one process measures of all, and so are the weights."""
    import torch
    from torch.distributed import destroy_process_group, init_process_group

    from fp8plan.runtime.correction.correct import CorrectionSettings, correct
    from fp8plan.runtime.mismatch.measure import measure, pack

    whole = ragged(0)
    versions = torch.tensor([4, 4, 5, 5, 6, 6])
    settings = CorrectionSettings(batch_normalize=True), CorrectionSettings(level="sequence", batch_normalize=True)
    # Before the ranks meet, measure and correct are those of one process.
    alone = measure(pack(*whole), versions)
    weights = [correct(pack(*whole), some).weights for some in settings]
    init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    # Some sequences each; the second has none; the second has rows, all without a token.
    for first in (slice(0, 2), slice(0, 6), None):
        part = slice(0, 6) if first is None else (first, slice(first.stop, 6))[rank]
        data = [tensor[part] for tensor in whole]
        if first is None and rank:
            data[2] = torch.zeros_like(data[2])
        found = measure(pack(*data), versions[part]).reduced()
        np.testing.assert_allclose(found.values, alone.values, rtol=1e-12, atol=1e-12)
        assert (found.smallest, found.largest) == (alone.smallest, alone.largest)
        assert found.metrics().versions.keys() == {4, 5, 6}
        for some, expected in zip(settings, weights, strict=True):
            ours = correct(pack(*data), some).weights
            torch.testing.assert_close(ours, expected[part] * data[2], rtol=1e-6, atol=0)
    destroy_process_group()
